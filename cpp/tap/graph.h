// Finds the attention nodes of a llama.cpp graph and adds nodes beside them. The only file pair
// that knows llama.cpp's graph names; tests/engine/test_tap.py fails when upstream renames
// them.
// Threads: the one that builds the graph (the engine thread, or the constructor's).
#pragma once

#include <ggml.h>

#include <utility>
#include <vector>

#include "tap/plan.h"

namespace kqview {

// Byte offsets between neighbours in an operand. `token` is a query, or a cell of the cache; `head`
// a query head in q, a KV head elsewhere. 0 where all share one.
struct operand_strides {
    std::size_t token = 0;
    std::size_t head = 0;
    std::size_t stream = 0;
};

// One layer's attention as llama.cpp built it. Shapes are ggml's, fastest dimension first, of the
// common layout; the strides hold for every layout.
struct attention_site {
    int il = -1;
    int position = 0;  // in the graph, of the node that was found
    int n_head = 0;
    int n_head_kv = 0;
    int n_stream = 1;
    int n_cells = 0;  // cells of one stream, in order of position: the most columns a row has
    float scale = 1.0f;
    float max_bias = 0.0f;
    float softcap = 0.0f;  // flash attention only: without it the chain before `softmax` has it
    ggml_tensor* mask = nullptr;   // F16|F32 ne=[n_kv, n_tokens, 1, n_stream], or null
    ggml_tensor* sinks = nullptr;  // F32 ne=[n_head], or null
    operand_strides mask_strides;

    // With flash attention, or where the keys were gathered first:
    ggml_tensor* flash = nullptr;  // the node that reads q and k
    ggml_tensor* q = nullptr;      // F32 ne=[n_embd_head, n_tokens, n_head, n_stream]
    ggml_tensor* k = nullptr;  // ne=[n_embd_head, n_kv, n_head_kv, n_stream], the cache's own type
    operand_strides q_strides;
    operand_strides k_strides;
    int n_extra_cells = 0;  // in k behind the cells: keys that are no tokens (deepseek4)
    // Sparse attention gathers the keys that a query sees: k and mask are the gathered ones,
    // n_cells counts them, and cell j is column `gathered[j] / rows_per_cell % n_cells_max`.
    ggml_tensor* gathered = nullptr;  // I32, or null
    operand_strides gathered_strides;
    int rows_per_cell = 1;
    int n_cells_max = 0;
    bool has_stream_per_query = false;  // each query has its own gathered keys (glm5-next)

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

// Adds each node to the graph directly behind its anchor, so that nothing the anchor read has to
// stay alive longer than it did; behind its last source where that comes later. Every source of a
// node must already be in the graph.
struct placed_node {
    ggml_tensor* anchor;
    ggml_tensor* node;
};
// False when the graph has no room for them; then it is unchanged.
bool insert_nodes(ggml_cgraph* graph, const std::vector<placed_node>& placed);

}  // namespace kqview
