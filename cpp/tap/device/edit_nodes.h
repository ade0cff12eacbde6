// Edits of layers on a device: nodes that any backend has multiply what llama.cpp computed and add
// to it, with operands that are inputs of the graph. What reads it reads their result.
// Owner:   the tap, with the graph that they are part of.
// Threads: the engine thread.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <vector>

#include "tap/graph.h"
#include "tap/host/edit_op.h"

namespace kqview {

class device_edit {
public:
    // Of a layer's output, which the site has from then on. Adds the nodes to `placed`.
    device_edit(ggml_cgraph* graph, ggml_context* tensors, hidden_site& site,
                std::vector<placed_node>& placed);
    // Of what its heads give out; `sets`: also by values in its place. Requires site.output.
    device_edit(ggml_cgraph* graph, ggml_context* tensors, attention_site& site, bool sets,
                std::vector<placed_node>& placed);
    static constexpr std::size_t n_tensors_max = 4;

    // Writes the operands of a step. The graph's memory must have been assigned.
    void fill(edit_table& table) const;

private:
    struct operands {
        std::vector<float> factors, values;
    };

    void add(ggml_cgraph* graph, ggml_context* tensors, ggml_tensor*& output,
             std::vector<placed_node>& placed);
    void fill_rows(const edited_run& run, const edit_table& table, operands& to) const;
    void fill_heads(const edited_run& run, operands& to) const;

    int il_;
    bool of_heads_;
    bool is_flash_ = false;
    const ggml_tensor* output_;       // as llama.cpp computed it
    ggml_tensor* factors_ = nullptr;  // F32, one for each row of output_
    ggml_tensor* values_ = nullptr;   // F32, of its shape; or null
};

}  // namespace kqview
