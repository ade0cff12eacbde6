// The custom ops that change activations while a graph runs: a node behind each point of a layer
// that is edited, one behind the outputs of its heads, unless our own attention gives them out and
// changes them itself. They write into the tensor that llama.cpp computed, in place, so
// that all that reads it sees the change; nothing but the tokens of edited requests is touched.
// Biases of all layers and heads go into the masks, which are inputs, and need no node; those of
// one layer are added by a node that makes the layer a mask of its own.
// Threads: ggml's compute threads run the ops, between begin_step and the end of the decode. The
//          engine thread fills the table they read beforehand, and edits the masks.
#pragma once

#include <ggml.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "tap/edits.h"
#include "tap/graph.h"
#include "tap/plan.h"

namespace kqview {

// Adjacent tokens of a step that belong to one edited request.
struct edited_run {
    const edit_plan* plan;
    int i_token;  // of the first one in the step
    int n_tokens;
    int position;  // of the first one in its text
    int i_stream;  // which of the graph's KV streams
    int i_query;   // of the first one in that stream
};

// The edited tokens of the running step.
struct edit_table {
    std::vector<edited_run> runs;
    int n_tokens = 0;            // of the step
    std::vector<int> output_of;  // index of each token among those whose logits are wanted, or -1
    int n_outputs = 0;
    std::atomic<int> n_done{0};  // (run, edited site)

    void begin(std::span<const step_token> tokens);
    void end() noexcept { runs.clear(); }
    // The row of what a layer has that belongs to a token; -1: it has none.
    std::int64_t row_of(const ggml_tensor* output, int i_token) const;
    // How often a node has to have worked on a run when the step has ended.
    int n_due() const;
};

// State of a node besides its source; must outlive the graph.
struct edit_op {
    edit_table* table = nullptr;
    int il = 0;
    edit_point point{};
    attention_site site{};  // its numbers
};

// Creates a node that changes what a layer has at op.point, F32 ne=[n_embd, n_tokens], for the
// edited tokens.
ggml_tensor* make_output_edit(ggml_context* tensors, ggml_tensor* output, edit_op& op);

// Creates a node that changes, and keeps, what heads give out. Requires site.output.
ggml_tensor* make_head_edit(ggml_context* tensors, const attention_site& site, edit_op& op);
// The same without a node, and without keeping it, for queries [first, end) of a stream, as soon as
// they are computed. Each query is in one call, which any thread makes.
void edit_heads(const edit_op& op, ggml_tensor* outputs, int stream, int first, int end);

// Creates a node in place of the mask that a layer reads, with the biases of that layer added; for
// each head, or for all alike. The site reads it from then on.
ggml_tensor* make_mask_edit(ggml_context* tensors, attention_site& site, bool by_head, edit_op& op);

// Adds the biases of all layers to one mask: F16 or F32 ne=[n_kv, n_tokens, 1, n_stream]. The
// graph's inputs must have been set.
void edit_mask(ggml_tensor* mask, const edit_table& table);

}  // namespace kqview
