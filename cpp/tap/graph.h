// Finds the attention nodes of a llama.cpp graph and adds nodes beside them. The only file pair that
// knows llama.cpp's graph names; tests/engine/test_graph_names.py fails when upstream renames them.
// Threads: the one that builds the graph (the engine thread, or the constructor's).
#pragma once

#include <ggml.h>

#include <utility>
#include <vector>

#include "tap/plan.h"

namespace kqview {

// One layer's attention as llama.cpp built it. Shapes are ggml's, fastest dimension first.
struct attention_site {
    int il = -1;
    int n_head = 0;
    int n_head_kv = 0;
    float scale = 1.0f;
    float max_bias = 0.0f;
    float softcap = 0.0f;  // flash attention only: without it the chain before `softmax` has it
    ggml_tensor* mask = nullptr;   // F16|F32 ne=[n_kv, n_tokens, 1, n_stream], or null
    ggml_tensor* sinks = nullptr;  // F32 ne=[n_head], or null

    // With flash attention:
    ggml_tensor* flash = nullptr;  // the node
    ggml_tensor* q = nullptr;      // F32 ne=[n_embd_head, n_tokens, n_head, n_stream]
    ggml_tensor* k = nullptr;  // ne=[n_embd_head, n_kv, n_head_kv, n_stream], the cache's own type

    // Without:
    ggml_tensor* kq = nullptr;  // F32 ne=[n_kv, n_tokens, n_head, n_stream]: K·Q
    ggml_tensor* softmax =
        nullptr;  // same shape; softmax->src[0] is what enters it before the scale
};

// Attention sites in order of layer. A layer that several nodes claim is left out and named in
// `ambiguous`: capturing it would hand out one for the other.
struct attention_sites {
    std::vector<attention_site> sites;
    std::vector<int> ambiguous;
};
attention_sites find_attention(ggml_cgraph* graph);

// The residual stream behind one layer: F32 ne=[n_embd, n_tokens]; of the last layer maybe only the
// tokens whose logits are wanted.
struct hidden_site {
    int il;
    ggml_tensor* output;
};
// In order of layer; a layer whose output has no name of llama.cpp's is left out.
std::vector<hidden_site> find_hidden(ggml_cgraph* graph);

// Adds each node to the graph directly behind its anchor, so that nothing the anchor read has to stay
// alive longer than it did. Every source of a node must already be in the graph.
struct placed_node {
    ggml_tensor* anchor;
    ggml_tensor* node;
};
// False when the graph has no room for them; then it is unchanged.
bool insert_nodes(ggml_cgraph* graph, const std::vector<placed_node>& placed);

}  // namespace kqview
