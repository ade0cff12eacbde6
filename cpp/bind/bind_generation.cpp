#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>

#include "base/fork_guard.h"
#include "bind/bind.h"
#include "sched/wakeup.h"

// What next() returns, for the type stubs.
#define KQVIEW_ITEM                                                                      \
    "tuple[int, float | None, list[tuple[int, float]] | None, typing.Any, bool, int] | " \
    "tuple[int, int, typing.Any] | list[int] | types.EllipsisType | None"

namespace kqview::bind {

namespace {

const char* name_of_reason(finish_reason reason) {
    switch (reason) {
        case finish_reason::stop: return "stop";
        case finish_reason::length: return "length";
        case finish_reason::stop_token: return "stop_token";
        case finish_reason::cancelled: return "cancelled";
        case finish_reason::error: return "error";
    }
    return "error";
}

// Taking from two threads at once would split the text between them.
class single_consumer {
public:
    explicit single_consumer(generation_handle& handle) : taken_(handle.is_taken) {
        if (taken_.exchange(true)) {
            throw error(errc::busy,
                        "generation: another thread or task is iterating it; iterate it once");
        }
    }
    ~single_consumer() { taken_.store(false); }
    single_consumer(const single_consumer&) = delete;
    single_consumer& operator=(const single_consumer&) = delete;

private:
    std::atomic<bool>& taken_;
};

// (id, logprob or None, top or None, rows or None, is_last, n_discarded) of a token, (start,
// n_rows, rows or None) of prompt rows, or None at the end, whose error is raised.
nb::object to_python(generation_handle& self, mailbox::item item) {
    if (item.end && !self.end) self.end = std::make_shared<const end_event>(*item.end);
    if (item.prompt) {
        auto& prompt = *item.prompt;
        self.written_at = prompt.rows.written_at;
        const bool embeds = !prompt.embedding.empty();
        return nb::make_tuple(prompt.start, prompt.n_rows,
                              embeds
                                  ? embedding_to_python(std::move(prompt.embedding), prompt.n_rows)
                                  : rows_to_python(prompt.rows, true));
    }
    if (!item.token) {
        if (self.end->failure) throw *self.end->failure;
        return nb::none();
    }
    auto& token = *item.token;
    self.written_at = token.rows.written_at;
    const bool has_logprob = !std::isnan(token.logprob);
    nb::object top = nb::none();
    if (has_logprob) {
        nb::list pairs;
        for (const auto& [id, logprob] : token.top) pairs.append(nb::make_tuple(id, logprob));
        top = pairs;
    }
    return nb::make_tuple(
        token.id, has_logprob ? nb::object(nb::float_(token.logprob)) : nb::none(), top,
        rows_to_python(token.rows, false), item.end.has_value(), token.n_discarded);
}

// Waits of this thread. A forked child gets one of its own: it shares the parent's descriptor.
const std::shared_ptr<wake_handle>& waiter_of_thread() {
    struct waiter {
        fork_guard fork;
        std::shared_ptr<wake_handle> handle = std::make_shared<wake_handle>();
    };
    thread_local std::optional<waiter> mine;
    if (!mine || mine->fork.is_forked()) mine.emplace();
    return mine->handle;
}

// What Python holds of a wake handle. The engine thread drops its share when it wakes a consumer: a
// shared_ptr that nanobind made from a Python object would take the GIL for that.
struct shared_waiter {
    std::shared_ptr<wake_handle> handle = std::make_shared<wake_handle>();
};

using clock = std::chrono::steady_clock;
constexpr double longest_wait_s = 365.0 * 24 * 3600;  // well within the clock's range

int milliseconds_until(const std::optional<clock::time_point>& deadline) {
    if (!deadline) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline - clock::now());
    return static_cast<int>(
        std::clamp<std::int64_t>(left.count(), 0, std::numeric_limits<int>::max()));
}

// Sleeps without the GIL until signalled; a signal handler that raises ends it.
void sleep_on(generation_handle& self, wake_handle& waiter, int timeout_ms) {
    bool is_signalled = false;
    {
        const nb::gil_scoped_release release;
        is_signalled = waiter.wait(timeout_ms);
        stay_if_exiting();
    }
    if (!is_signalled && PyErr_CheckSignals() != 0) {
        self.wanted->box->disarm(&waiter);
        throw nb::python_error();
    }
}

// The item, or the ids of the requests that keep it from starting, or `...` after `wait_s`.
nb::object next_item(generation_handle& self, std::optional<double> wait_s, bool goes_on) {
    self.core->sched->check_not_forked();
    const single_consumer guard(self);
    auto& box = *self.wanted->box;
    const auto& waiter = waiter_of_thread();
    if (!goes_on && self.wanted->slot.load() < 0) box.forget_stall();
    std::optional<clock::time_point> deadline;
    if (wait_s) {
        const std::chrono::duration<double> wait(std::clamp(*wait_s, 0.0, longest_wait_s));
        deadline = clock::now() + std::chrono::duration_cast<clock::duration>(wait);
    }
    for (;;) {
        if (auto item = box.try_take()) return to_python(self, std::move(*item));
        if (auto holders = box.take_stall(); !holders.empty()) return nb::cast(std::move(holders));
        const int left_ms = milliseconds_until(deadline);
        if (left_ms == 0) {
            box.disarm(waiter.get());
            return nb::ellipsis();
        }
        waiter->drain();
        if (!box.arm(waiter)) sleep_on(self, *waiter, left_ms);
    }
}

// As next_item, without waiting.
nb::object try_next_item(generation_handle& self, bool goes_on) {
    self.core->sched->check_not_forked();
    const single_consumer guard(self);
    auto& box = *self.wanted->box;
    if (auto item = box.try_take()) return to_python(self, std::move(*item));
    if (!goes_on && self.wanted->slot.load() < 0) box.forget_stall();
    if (auto holders = box.take_stall(); !holders.empty()) return nb::cast(std::move(holders));
    return nb::ellipsis();
}

void wait_settled(generation_handle& self) {
    const auto& waiter = waiter_of_thread();
    for (;;) {
        if (self.core->sched->is_forked()) return;
        waiter->drain();
        if (self.wanted->box->arm_settled(waiter)) return;
        sleep_on(self, *waiter, -1);
    }
}

std::atomic<bool> is_exiting{false};
thread_local bool is_exit_thread = false;

}  // namespace

void stop_waking() noexcept {
    is_exit_thread = true;  // exit handlers may still wait
    is_exiting.store(true);
}

void stay_if_exiting() noexcept {
    while (is_exiting.load() && !is_exit_thread) ::pause();
}

void bind_generation(nb::module_& module) {
    module.def("stop_waking", &stop_waking,
               "The interpreter exits: threads that wait do so for ever.");
    nb::class_<shared_waiter>(module, "WakeHandle")
        .def(nb::init<>())
        .def(
            "fileno", [](const shared_waiter& self) { return self.handle->fd(); },
            "Descriptor that becomes readable when a wait is over.")
        .def(
            "drain", [](const shared_waiter& self) { self.handle->drain(); },
            "Takes the signal back; then look at who was woken.");

    nb::class_<generation_handle>(module, "Generation")
        .def_prop_ro("id", [](const generation_handle& self) { return self.wanted->id; })
        .def_prop_ro(
            "slot", [](const generation_handle& self) { return self.wanted->slot.load(); },
            "Slot index, -1 while the request is queued.")
        .def_prop_ro(
            "written_at",
            [](const generation_handle& self) {
                return reinterpret_cast<std::uintptr_t>(self.written_at);
            },
            "Address that the kernel of the last taken token wrote first; 0 without capture.")
        .def("next", &next_item, nb::arg("wait_s") = nb::none(), nb::arg("goes_on") = false,
             nb::sig("def next(self, wait_s: float | None = None, goes_on: bool = False) "
                     "-> " KQVIEW_ITEM),
             "Next item, blocking: (id, logprob, top, rows, is_last, n_discarded) of a token or "
             "(start, n_rows, rows) of the prompt, rows being (attention, positions, hidden) or "
             "the embedding as (None, None, values); None at the end. "
             "While the request is queued and every slot waits for its consumer: the ids of the "
             "requests in them, once unless they change; `goes_on` then waits on. `...` after "
             "wait_s.")
        .def("try_next", &try_next_item, nb::arg("goes_on") = false,
             nb::sig("def try_next(self, goes_on: bool = False) -> " KQVIEW_ITEM),
             "As next(), but `...` when nothing is there yet.")
        .def(
            "arm",
            [](generation_handle& self, const shared_waiter& waiter) {
                self.core->sched->check_not_forked();
                return self.wanted->box->arm(waiter.handle);
            },
            nb::arg("waiter"), "Asks to be woken at the next item; True when one is there already.")
        .def(
            "arm_settled",
            [](generation_handle& self, const shared_waiter& waiter) {
                return self.core->sched->is_forked() ||
                       self.wanted->box->arm_settled(waiter.handle);
            },
            nb::arg("waiter"),
            "Asks to be woken when a cancellation was carried out; True when it was.")
        .def(
            "disarm",
            [](generation_handle& self, const shared_waiter& waiter) {
                if (!self.core->sched->is_forked()) self.wanted->box->disarm(waiter.handle.get());
            },
            nb::arg("waiter"))
        .def(
            "cancel", [](generation_handle& self) { self.core->sched->cancel(self.wanted); },
            "Asks the engine to stop at the next step; returns at once.")
        .def("wait_settled", &wait_settled, "Blocks until a cancellation is carried out.")
        .def_prop_ro(
            "end",
            [](generation_handle& self) -> nb::object {
                if (!self.end) return nb::none();
                const auto& usage = self.end->usage;
                return nb::make_tuple(name_of_reason(self.end->reason), usage.prompt_tokens,
                                      usage.cached_tokens, usage.completion_tokens, usage.prefill_s,
                                      usage.decode_s);
            },
            nb::sig("def end(self) -> tuple[str, int, int, int, float, float] | None"),
            "(finish reason, prompt, cached and completion tokens, prefill_s, decode_s) once it is "
            "known.")
        .def(
            "peek_end",
            [](generation_handle& self) {
                if (self.end || self.core->sched->is_forked()) return;
                if (auto end = self.wanted->box->end())
                    self.end = std::make_shared<const end_event>(*end);
            },
            "Makes `end` known after a cancellation, which takes no further items.");
}

}  // namespace kqview::bind
