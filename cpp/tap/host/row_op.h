// The custom ops that read attention rows and hidden states from a graph while it runs. One node
// per layer and source.
// Threads: ggml's compute threads run them, between begin_step and the end of the decode. The
//          engine thread fills the table they read beforehand; it does not change while they run.
#pragma once

#include <ggml.h>

#include "tap/graph.h"
#include "tap/host/row_sink.h"
#include "tap/plan.h"

namespace kqview {

// State of a node besides its sources; must outlive the graph.
struct row_op {
    row_table* table = nullptr;
    int il = 0;
    row_kind kind = row_kind::logits;  // unused for a flash site: the target's kind decides
    int i_mask = -1;                   // index into the node's sources, -1 = none
    int i_sinks = -1;
    int i_gathered = -1;
    attention_site site;  // its numbers; the tensors are the node's sources
};

// Creates a node that reads rows llama.cpp computes anyway: kq, the softmax's input or its result.
// Flash attention does not store the product: the node then computes K·q for the wanted rows
// itself, in any kind.
ggml_tensor* make_row_node(ggml_context* tensors, const attention_site& site, row_kind kind,
                           row_op& op);

// Creates a node that copies a layer's output for the wanted queries.
ggml_tensor* make_hidden_node(ggml_context* tensors, const hidden_site& site, row_op& op);

}  // namespace kqview
