// The parts of the extension module; module.cpp calls them in order. Bindings know no policy.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "llama/model.h"
#include "sample/token_filter.h"
#include "sched/llama_runner.h"
#include "sched/request.h"
#include "sched/scheduler.h"

namespace kqview::bind {

namespace nb = nanobind;

// True where the process has imported the module before: it has everything then. Raises in a
// subinterpreter.
bool is_bound_before(nb::module_& module);

void bind_errors(nb::module_& module);
void bind_log(nb::module_& module);
void bind_model(nb::module_& module);
void bind_sampling(nb::module_& module);
void bind_capture(nb::module_& module);
void bind_engine(nb::module_& module);
void bind_generation(nb::module_& module);
void bind_state(nb::module_& module);
void bind_system(nb::module_& module);

// Text of llama.cpp or of a file, which may be no UTF-8 or cut inside a character: such bytes
// become U+FFFD.
nb::str to_text(std::string_view bytes);

// What was captured as Python sees it: (attention, positions, hidden), or None without a block.
// Attention and positions are one array, a tuple of arrays where layers keep different numbers of
// heads, or None. `has_query_axis`: rows of several queries. bind_rows.cpp is the only file that
// makes ndarrays.
nb::object rows_to_python(const captured_rows& rows, bool has_query_axis);

// (None, None, values) with values of shape (n_rows, n_values), the caller's own.
nb::object embedding_to_python(std::vector<float> values, int n_rows);

// What an Engine and its generations share.
struct engine_core {
    std::shared_ptr<model> source;
    int n_ctx = 0;
    int n_chunk = 0;
    capture_source capture;
    bool has_cache = true;
    bool can_split_embedding = false;
    std::string pooling;
    embedding_facts embeddings{};
    std::string shift_obstacle;
    std::shared_ptr<const graph_counters> graphs;
    std::shared_ptr<copy_counters> copies;
    scheduler_handle sched;

    std::unique_ptr<token_filters> filters;

    // Dropped without close(): joining the engine thread must not hold up the other Python threads.
    ~engine_core() {
        if (!sched) return;
        const nb::gil_scoped_release release;
        source->rpc().leave();
        sched.reset();
    }

    // A step that waits for an RPC server ends at once.
    void close(double limit_s) {
        source->rpc().leave();
        sched->close(std::chrono::duration<double>(std::clamp(limit_s, 0.0, 1e6)));
    }
};

// Process exit begins, on this thread: others that wait without the GIL and would take it again
// wait for ever instead, because CPython ends such a thread by unwinding it, which C++ destructors
// do not survive.
void stop_waking() noexcept;
void stay_if_exiting() noexcept;

// Handle of one request; dropping it cancels the request.
struct generation_handle {
    std::shared_ptr<engine_core> core;
    std::shared_ptr<request> wanted;
    std::shared_ptr<const end_event> end;  // once seen
    const std::byte* written_at = nullptr;
    std::atomic<bool> is_taken{false};  // one consumer at a time

    ~generation_handle() { core->sched->cancel(wanted); }
};

}  // namespace kqview::bind
