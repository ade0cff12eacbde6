// OpenMP for ggml's CPU backend: what gcc and clang compile its directives to, answered by the
// process's compute pool instead of libgomp or libomp. libgomp has workers for each thread that
// computes, counts the idle ones too, and sleeps at every barrier once they are more than the CPUs;
// otherwise it spins for milliseconds, which on a busy machine keeps the thread that is waited for
// from running.
//
// vendor/llama.cmake compiles the only other directives, of quantising, away. The names are local
// to this module (cpp/exports.map): other libraries in the process keep their own OpenMP.
#ifdef __clang__
#include <cstdarg>
#include <cstdlib>
#include <utility>
#endif

#include "base/compute_pool.h"
#include "base/system.h"

using kqview::compute_pool;

extern "C" {

#ifdef __clang__

// The body of a directive: its function takes two thread numbers, then what it shares with the code
// around it. A function may be called with more arguments than it takes.
struct omp_body {
    using function = void (*)(int*, int*, void*, void*, void*, void*);
    static constexpr int n_shared_max = 4;

    function call;
    void* shared[n_shared_max];

    static void run(void* data) {
        const auto& [call, shared] = *static_cast<omp_body*>(data);
        int thread = static_cast<int>(compute_pool::thread_index());
        call(&thread, &thread, shared[0], shared[1], shared[2], shared[3]);
    }
};

namespace {

thread_local unsigned n_threads_wanted = 0;  // of the directive that comes next

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier): clang's names
void __kmpc_push_num_threads(void* /*place*/, int /*thread*/, int n_threads) {
    n_threads_wanted = static_cast<unsigned>(n_threads);
}

void __kmpc_fork_call(void* /*place*/, int n_shared, omp_body::function call, ...) {
    // The compiler knows how many: at most four in the pinned llama.cpp, whatever is computed.
    if (n_shared > omp_body::n_shared_max) std::abort();
    omp_body body{call, {}};
    va_list arguments;
    va_start(arguments, call);
    for (int i = 0; i < n_shared; ++i) body.shared[i] = va_arg(arguments, void*);
    va_end(arguments);
    const unsigned n_threads = std::exchange(n_threads_wanted, 0);
    const auto pool = compute_pool::shared();
    pool->run(omp_body::run, &body, n_threads > 0 ? n_threads : kqview::n_cpus());
}

int __kmpc_global_thread_num(void* /*place*/) {
    return static_cast<int>(compute_pool::thread_index());
}

void __kmpc_barrier(void* /*place*/, int /*thread*/) { compute_pool::barrier(); }

int __kmpc_single(void* /*place*/, int /*thread*/) { return compute_pool::is_chosen(); }

void __kmpc_end_single(void* /*place*/, int /*thread*/) {}
// NOLINTEND(bugprone-reserved-identifier)

#else

// `n_threads`: 0 lets the runtime choose, as when weights are packed for AMX.
void GOMP_parallel(void (*body)(void*), void* data, unsigned n_threads, unsigned /*flags*/) {
    const auto pool = compute_pool::shared();
    pool->run(body, data, n_threads > 0 ? n_threads : kqview::n_cpus());
}

void GOMP_barrier() { compute_pool::barrier(); }

bool GOMP_single_start() { return compute_pool::is_chosen(); }

#endif

int omp_get_num_threads() { return static_cast<int>(compute_pool::n_threads()); }

int omp_get_thread_num() { return static_cast<int>(compute_pool::thread_index()); }

}  // extern "C"
