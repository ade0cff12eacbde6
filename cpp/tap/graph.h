// Finds the attention nodes of a llama.cpp graph and adds nodes beside them. Only graph.h and
// graph.cpp know llama.cpp's graph names; tests/engine/test_tap.py fails when upstream renames
// them.
// Threads: the thread that builds the graph (the engine thread, or the constructor's).
#pragma once

#include <ggml.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tap/plan.h"

namespace kqview {

// Says why the rows that are wanted cannot be captured. tap::prepare keeps the error: it must not
// cross llama.cpp.
template <typename... Parts>
[[noreturn]] void refuse_capture(const Parts&... why) {
    throw error(errc::unsupported_model, "capture: ", why...);
}

// Byte strides of an operand. `token` steps over queries, or over cells of the cache; `head` over
// query heads in q, over KV heads elsewhere. A stride is 0 where all share one part.
struct operand_strides {
    std::size_t token = 0;
    std::size_t head = 0;
    std::size_t stream = 0;
};
inline operand_strides strides_of(const ggml_tensor* tensor) {
    return {tensor->nb[1], tensor->nb[2], tensor->nb[3]};
}

// Where an operand has its part for a token, a head and a stream.
inline const std::byte* part_of(const ggml_tensor* tensor, const operand_strides& strides,
                                int token, int head, int stream) {
    return static_cast<const std::byte*>(tensor->data) +
           static_cast<std::size_t>(token) * strides.token +
           static_cast<std::size_t>(head) * strides.head +
           static_cast<std::size_t>(stream) * strides.stream;
}

// What is behind a cast that llama.cpp makes for its flash attention alone, of an F32 cache; else
// the tensor itself.
inline ggml_tensor* cast_source(ggml_tensor* tensor) {
    const bool is_cast = tensor->op == GGML_OP_CPY && tensor->src[0] &&
                         tensor->src[0]->type == GGML_TYPE_F32 &&
                         ggml_are_same_shape(tensor, tensor->src[0]);
    return is_cast ? tensor->src[0] : tensor;
}

// The input behind casts and views of a mask that no nodes made.
ggml_tensor* input_of(ggml_tensor* mask);

// One layer's attention as llama.cpp built it. Shapes are ggml's, fastest dimension first, and
// describe the common layout; the strides hold for every layout.
struct attention_site {
    int il = -1;
    int position = 0;  // index in the graph of the node that was found
    int n_head = 0;
    int n_head_kv = 0;
    int n_stream = 1;
    int n_cells = 0;  // cells of one stream, in position order: the upper bound of a row's columns
    // Cells are in any order, and are some of the last positions (row_table::ring_columns).
    bool is_ring = false;
    float scale = 1.0f;
    float max_bias = 0.0f;
    float softcap = 0.0f;  // flash attention only; otherwise the nodes before `softmax` apply it
    ggml_tensor* mask = nullptr;   // F16|F32 ne=[n_kv, n_tokens, 1, n_stream], or null
    ggml_tensor* sinks = nullptr;  // F32 ne=[n_head], or null
    operand_strides mask_strides;
    int heads_per_mask = 0;      // query heads that share a part of the mask; 0: all share it
    bool has_made_mask = false;  // by nodes of the graph, as sparse attention has it

    // With flash attention, or if the model gathers its keys first:
    ggml_tensor* flash = nullptr;  // the node that reads q and k
    ggml_tensor* q = nullptr;      // F32 ne=[n_embd_head, n_tokens, n_head, n_stream]
    ggml_tensor* k = nullptr;  // ne=[n_embd_head, n_kv, n_head_kv, n_stream], the cache's own type
    operand_strides q_strides;
    operand_strides k_strides;
    int n_step_queries = 0;  // where q is a copy of the last queries of a step: how many that had
    int n_extra_cells = 0;   // keys in k after the cells that stand for no token (deepseek4)
    // Sparse attention gathers the keys that a query sees. Then k and mask are the gathered ones,
    // n_cells counts them, and cell j is column `gathered[j] / rows_per_cell % n_cells_max`.
    ggml_tensor* gathered = nullptr;  // I32, or null
    operand_strides gathered_strides;
    int rows_per_cell = 1;
    int n_cells_max = 0;
    bool has_stream_per_query = false;  // each query gathers its own keys (glm5-next)

    // Otherwise:
    ggml_tensor* kq = nullptr;  // F32 ne=[n_kv, n_tokens, n_head, n_stream]: K·Q
    ggml_tensor* softmax =
        nullptr;  // same shape; softmax->src[0] is what enters it before the scale

    // What its heads give out, before the output projection: `flash` itself, or else
    // F32 ne=[n_value, n_tokens, n_head, n_stream]. Null where a model lays it out in another way.
    ggml_tensor* output = nullptr;

    int mask_of_head(int head) const { return heads_per_mask > 0 ? head / heads_per_mask : 0; }
    // The operand of the node that reads the mask.
    ggml_tensor*& mask_operand() const { return flash ? flash->src[3] : softmax->src[1]; }
    ggml_tensor* keys() const { return flash ? k : kq->src[0]; }
    int n_queries() const { return static_cast<int>(flash ? q->ne[1] : kq->ne[1]); }
    // Of the step, also where q has the last ones alone.
    int n_queries_of_step() const { return n_step_queries > 0 ? n_step_queries : n_queries(); }
    // The node behind which rows of this kind can be read: llama.cpp's softmax overwrites its input
    // in place.
    ggml_tensor* node_of(row_kind kind) const {
        if (flash) return flash;
        if (kind == row_kind::logits) return kq;
        return kind == row_kind::scores ? softmax->src[0] : softmax;
    }
};

// Attention sites in layer order. If several nodes claim a layer, it is left out and listed in
// `ambiguous`: capturing it could return the rows of the wrong node.
struct attention_sites {
    std::vector<attention_site> sites;
    std::vector<int> ambiguous;
};
attention_sites find_attention(ggml_cgraph* graph);

// The residual stream after one layer: F32 ne=[n_embd, n_tokens]. For the last layer, llama.cpp may
// keep only the tokens whose logits are wanted.
struct hidden_site {
    int il;
    ggml_tensor* output;
};
// In layer order; omits layers whose output llama.cpp does not name.
std::vector<hidden_site> find_hidden(ggml_cgraph* graph);

// The product with the output matrix, if nothing but logits comes from it; else null.
ggml_tensor* find_head(ggml_cgraph* graph);

// What a part of a layer adds to the residual stream, behind its norm if it has one: of the shape
// of the layer's output. Null where a model adds no such thing.
ggml_tensor* attention_addend(const hidden_site& layer, const attention_site& attention);
ggml_tensor* mlp_addend(const hidden_site& layer);

// What reads `before` reads `after` from then on, which is not in the graph yet.
void replace_for_readers(ggml_cgraph* graph, const ggml_tensor* before, ggml_tensor* after);

// Adds each node to the graph directly after its anchor, so that the anchor's inputs do not have to
// stay alive longer; or after its last source, if that comes later. Every source of a node must
// already be in the graph.
struct placed_node {
    ggml_tensor* anchor;
    ggml_tensor* node;
};
// Returns false, and leaves the graph unchanged, if it has no room for the nodes.
bool insert_nodes(ggml_cgraph* graph, const std::vector<placed_node>& placed);

}  // namespace kqview
