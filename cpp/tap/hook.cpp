// The four calls of llama.cpp into ggml's scheduler that vendor/llama.cmake renames to these. Each
// does its part for the thread's current tap and then calls the real one. Without a current tap
// they pass through, and a tap without a plan adds nothing. This file must not be compiled with the
// renaming definitions: it calls the real functions.
#include <ggml-backend.h>

#include "tap/tap.h"

extern "C" {

bool kqview_sched_alloc_graph(ggml_backend_sched_t sched, ggml_cgraph* graph) {
    auto* const tap = kqview::tap::current();
    if (tap && !tap->prepare(graph)) return false;
    return ggml_backend_sched_alloc_graph(sched, graph);
}

bool kqview_sched_reserve(ggml_backend_sched_t sched, ggml_cgraph* graph) {
    auto* const tap = kqview::tap::current();
    if (tap && !tap->prepare(graph)) return false;
    return ggml_backend_sched_reserve(sched, graph);
}

void kqview_sched_reserve_size(ggml_backend_sched_t sched, ggml_cgraph* graph, size_t* sizes) {
    auto* const tap = kqview::tap::current();
    if (tap) tap->prepare(graph);
    ggml_backend_sched_reserve_size(sched, graph, sizes);
}

ggml_status kqview_sched_graph_compute_async(ggml_backend_sched_t sched, ggml_cgraph* graph) {
    auto* const tap = kqview::tap::current();
    if (tap && !tap->may_compute(graph)) return GGML_STATUS_FAILED;
    if (tap) tap->starts_compute(sched, graph);
    return ggml_backend_sched_graph_compute_async(sched, graph);
}
}
