// Saving and restoring slots. A blob is written directly into the bytes object returned to Python,
// and read directly from the one passed in: bytes are immutable while the engine thread checks and
// then reads them.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "bind/bind.h"
#include "sched/edit_history.h"
#include "sched/engine.h"
#include "sched/slot_cache.h"

namespace kqview::bind {

namespace {

// Called without the GIL after a signal handler ran on this thread: may Python keep waiting?
bool goes_on_after_signal() {
    stay_if_exiting();
    const nb::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() == 0;
}

void run_on_slot(engine& self, slot_id slot, const slot_work& work) {
    const bool is_done =
        unlocked([&] { return self.sched().run_on_slot(slot, work, goes_on_after_signal); });
    if (!is_done) throw nb::python_error();  // the handler's exception, usually KeyboardInterrupt
}

nb::object bytes_of_size(std::size_t n_bytes) {
    PyObject* const made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(n_bytes));
    if (made) return nb::steal(made);
    PyErr_Clear();
    throw error(errc::out_of_memory, "no memory for a saved slot of ", n_bytes,
                " bytes; hold fewer saved slots");
}

struct saved_slot {
    nb::bytes blob;
    nb::bytes checkpoints;
    std::size_t n_exact;  // number of exact tokens, counted from the first
    lora_scales lora;
    std::vector<edit_history::run> edits;
};

// A bytes object while it is written: no other code has it yet.
struct unfinished_bytes {
    nb::object object = bytes_of_size(0);
    std::size_t n_wanted = 0;

    std::span<std::byte> room() {
        return {reinterpret_cast<std::byte*>(PyBytes_AsString(object.ptr())), n_room()};
    }
    std::size_t n_room() const { return static_cast<std::size_t>(PyBytes_Size(object.ptr())); }
    // False: it has another size than what is wanted; it then has that size, and is not written.
    bool is_whole() {
        if (n_wanted == n_room()) return true;
        object = bytes_of_size(n_wanted);
        return false;
    }
    nb::bytes take() { return nb::steal<nb::bytes>(object.release()); }
};

saved_slot save(engine& self, slot_id slot, bool with_checkpoints) {
    unfinished_bytes blob, checkpoints;
    std::size_t n_exact = 0;
    lora_scales lora;
    std::vector<edit_history::run> edits;
    for (;;) {
        const auto to = blob.room(), checkpoints_to = checkpoints.room();
        run_on_slot(self, slot, [&](slot_cache& cache) {
            blob.n_wanted = cache.save(to);
            if (with_checkpoints) checkpoints.n_wanted = cache.save_checkpoints(checkpoints_to);
            n_exact = std::min(cache.n_exact(), cache.size());
            lora = cache.lora();
            edits = cache.edits().runs();
        });
        // The slot may change again before the next round.
        const bool is_whole = blob.is_whole();
        if (checkpoints.is_whole() && is_whole)
            return {blob.take(), checkpoints.take(), n_exact, std::move(lora), std::move(edits)};
    }
}

std::span<const std::byte> bytes_in(const nb::bytes& object) {
    return {reinterpret_cast<const std::byte*>(object.c_str()), object.size()};
}

void restore(engine& self, slot_id slot, const nb::bytes& blob, std::size_t n_exact,
             const lora_scales& lora, const std::vector<edit_history::run>& edits,
             const nb::bytes& checkpoints) {
    const auto bytes = bytes_in(blob), kept = bytes_in(checkpoints);
    run_on_slot(self, slot,
                [&](slot_cache& cache) { cache.restore(bytes, n_exact, lora, edits, kept); });
}

std::vector<edit_history::run> edits_of(engine& self, slot_id slot) {
    std::vector<edit_history::run> edits;
    run_on_slot(self, slot, [&](slot_cache& cache) { edits = cache.edits().runs(); });
    return edits;
}

void truncate(engine& self, slot_id slot, std::size_t n_keep) {
    run_on_slot(self, slot, [&](slot_cache& cache) { cache.truncate(n_keep); });
}

// Ranges are (start, stop), non-empty, ascending and disjoint.
void remove(engine& self, slot_id slot,
            const std::vector<std::pair<std::size_t, std::size_t>>& ranges) {
    std::vector<token_range> gone;
    gone.reserve(ranges.size());
    for (const auto& [start, stop] : ranges) gone.push_back({start, stop - start});
    run_on_slot(self, slot, [&](slot_cache& cache) { cache.remove(gone); });
}

std::vector<slot_id> branch(engine& self, slot_id slot, int n) {
    std::vector<slot_id> branches;
    const bool is_done =
        unlocked([&] { return self.sched().branch(slot, n, branches, goes_on_after_signal); });
    if (!is_done) throw nb::python_error();
    return branches;
}

void clear(engine& self, slot_id slot) {
    run_on_slot(self, slot, [](slot_cache& cache) { cache.clear(); });
}

}  // namespace

void bind_state(nb::module_& module) {
    nb::class_<saved_slot>(module, "SavedSlot")
        .def_ro("blob", &saved_slot::blob)
        .def_ro("checkpoints", &saved_slot::checkpoints, "As a state file has them.")
        .def_ro("n_exact", &saved_slot::n_exact)
        .def_ro("lora", &saved_slot::lora, "Scales of the adapters that it was computed with.")
        .def_ro("edits", &saved_slot::edits, "Edits that it was computed with.");
    module.def("save_slot", &save, nb::arg("engine"), nb::arg("slot"), nb::arg("checkpoints"),
               "Save a slot as a SES1 blob, with its number of exact tokens.");
    module.def("restore_slot", &restore, nb::arg("engine"), nb::arg("slot"), nb::arg("blob"),
               nb::arg("n_exact"), nb::arg("lora"), nb::arg("edits"), nb::arg("checkpoints"),
               "Replace the contents of a slot; a blob that is refused changes nothing.");
    module.def("slot_edits", &edits_of, nb::arg("engine"), nb::arg("slot"),
               "Edits that the cells of an idle slot were computed with.");
    module.def("truncate_slot", &truncate, nb::arg("engine"), nb::arg("slot"), nb::arg("n_keep"),
               "Keep the first n_keep tokens, or those of the last checkpoint before.");
    module.def("remove_from_slot", &remove, nb::arg("engine"), nb::arg("slot"), nb::arg("ranges"),
               "Remove (start, stop) ranges, which are ascending and disjoint, in one move.");
    module.def("branch_slot", &branch, nb::arg("engine"), nb::arg("slot"), nb::arg("n"),
               "Copy what an idle slot holds to n other idle ones; returns them.");
    module.def("clear_slot", &clear, nb::arg("engine"), nb::arg("slot"));
}

}  // namespace kqview::bind
