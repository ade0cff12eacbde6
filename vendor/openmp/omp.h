// What ggml's CPU backend asks of OpenMP, as cpp/llama/openmp.cpp has it: zig's clang comes without
// this header.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
int omp_get_num_threads(void);
int omp_get_thread_num(void);
#ifdef __cplusplus
}
#endif
