// OpenMP for ggml's CPU backend: what gcc compiles its directives to, answered by the process's
// compute pool instead of libgomp. libgomp has workers for each thread that computes, counts the
// idle ones too, and sleeps at every barrier once they are more than the CPUs; otherwise it spins
// for milliseconds, which on a busy machine keeps the thread that is waited for from running.
//
// vendor/llama.cmake compiles the only other directives, of quantising, away. The names are local
// to this module (cpp/exports.map): other libraries in the process keep their own OpenMP.
// Only with gcc; other compilers' OpenMP is their own runtime.
#include "base/compute_pool.h"
#include "base/system.h"

using kqview::compute_pool;

extern "C" {

// `n_threads`: 0 lets the runtime choose, as when weights are packed for AMX.
void GOMP_parallel(void (*body)(void*), void* data, unsigned n_threads, unsigned /*flags*/) {
    const auto pool = compute_pool::shared();
    pool->run(body, data, n_threads > 0 ? n_threads : kqview::n_cpus());
}

void GOMP_barrier() { compute_pool::barrier(); }

bool GOMP_single_start() { return compute_pool::is_chosen(); }

int omp_get_num_threads() { return static_cast<int>(compute_pool::n_threads()); }

int omp_get_thread_num() { return static_cast<int>(compute_pool::thread_index()); }

}  // extern "C"
