// The parts of the extension module; module.cpp calls them in order. Bindings contain no policy.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "sched/request.h"

namespace kqview::bind {

namespace nb = nanobind;

// True if the process has imported the module before; the module is then complete already. Raises
// in a subinterpreter.
bool is_bound_before(nb::module_& module);

void bind_process(nb::module_& module);
void bind_system(nb::module_& module);
void bind_model(nb::module_& module);
void bind_edits(nb::module_& module);
void bind_request(nb::module_& module);
void bind_generation(nb::module_& module);
void bind_engine(nb::module_& module);
void bind_state(nb::module_& module);

// Text from llama.cpp or from a file, which may be invalid UTF-8 or cut inside a character: such
// bytes become U+FFFD.
nb::str to_text(std::string_view bytes);

// Views of captured rows; None if there are none. Attention and positions are one array, or a tuple
// of arrays if layers keep different numbers of heads. `has_query_axis`: the rows belong to several
// queries. Only bind_rows.cpp creates ndarrays.
nb::object attention_view(const captured_rows& rows, bool has_query_axis);
nb::object positions_view(const captured_rows& rows, bool has_query_axis);
nb::object hidden_view(const captured_rows& rows, bool has_query_axis);
nb::object logits_view(const captured_rows& rows);

// A read-only array of shape (n_vocab,), which keeps the row alive, and nothing else.
nb::object logits_view(const std::shared_ptr<const std::vector<float>>& logits);

// The values of a caller's one-dimensional array of floats; converted, or else not copied. Raises
// request, naming `what`, for anything else. Must die with the GIL.
struct read_values {
    std::span<const float> values;
    std::shared_ptr<const void> owner;
};
read_values values_of(const char* what, const nb::object& array);

// A writable array of shape (n_rows, n_values), or None without values. It keeps `owner`, which
// owns the values, alive.
nb::object embedding_array(std::vector<float>& values, int n_rows, nb::handle owner);

// Call stop_waking when process exit begins, on the exiting thread. From then on, other threads
// that return from a wait without the GIL block forever in stay_if_exiting instead of taking the
// GIL: CPython would end such a thread by unwinding it, which C++ destructors do not survive.
void stop_waking() noexcept;
void stay_if_exiting() noexcept;

// Runs `call` without the GIL.
template <typename Call>
auto unlocked(Call&& call) {
    const nb::gil_scoped_release release;
    try {
        auto result = call();
        stay_if_exiting();
        return result;
    } catch (...) {
        stay_if_exiting();
        throw;
    }
}

}  // namespace kqview::bind
