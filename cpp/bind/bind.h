// The parts of the extension module; module.cpp calls them in order. Bindings know no policy.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>
#include <vector>

#include "sched/request.h"

namespace kqview::bind {

namespace nb = nanobind;

// True where the process has imported the module before: it has everything then. Raises in a
// subinterpreter.
bool is_bound_before(nb::module_& module);

void bind_process(nb::module_& module);
void bind_system(nb::module_& module);
void bind_model(nb::module_& module);
void bind_request(nb::module_& module);
void bind_generation(nb::module_& module);
void bind_engine(nb::module_& module);
void bind_state(nb::module_& module);

// Text of llama.cpp or of a file, which may be no UTF-8 or cut inside a character: such bytes
// become U+FFFD.
nb::str to_text(std::string_view bytes);

// Views of captured rows, None where there are none. Attention and positions are one array, or a
// tuple of arrays where layers keep different numbers of heads. `has_query_axis`: rows of several
// queries. bind_rows.cpp is the only file that makes ndarrays.
nb::object attention_view(const captured_rows& rows, bool has_query_axis);
nb::object positions_view(const captured_rows& rows, bool has_query_axis);
nb::object hidden_view(const captured_rows& rows);

// A writable array of shape (n_rows, n_values), None without values. It keeps `owner`, to which they
// belong, alive.
nb::object embedding_array(std::vector<float>& values, int n_rows, nb::handle owner);

// Process exit begins, on this thread: others that wait without the GIL and would take it again
// wait for ever instead, because CPython ends such a thread by unwinding it, which C++ destructors
// do not survive.
void stop_waking() noexcept;
void stay_if_exiting() noexcept;

}  // namespace kqview::bind
