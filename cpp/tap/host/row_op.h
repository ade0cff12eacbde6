// The custom ops that read a graph while it runs: attention rows, and hidden states. One node per
// layer and source.
// Threads: ggml's compute threads run them, between begin_step and the end of the decode; the table
//          they read is set before by the engine thread and does not change meanwhile.
#pragma once

#include <ggml.h>

#include "tap/graph.h"
#include "tap/host/row_sink.h"

namespace kqview {

// What a node needs besides its sources; must outlive the graph.
struct row_op {
    row_table* table = nullptr;
    int il = 0;
    row_kind kind = row_kind::logits;  // from a flash site: unused, the target's kind decides
    bool is_flash = false;
    int i_mask = -1;  // index in the node's sources, -1 = none
    int i_sinks = -1;
    int i_gathered = -1;
    attention_site site;  // its numbers; its tensors are the node's sources
};

// A node that computes K·q for the wanted rows itself (flash attention keeps no product), in any
// kind.
ggml_tensor* make_flash_row_node(ggml_context* tensors, const attention_site& site, row_op& op);

// A node that reads rows llama.cpp computes anyway: kq, the softmax's input or its result.
ggml_tensor* make_plain_row_node(ggml_context* tensors, const attention_site& site, row_kind kind,
                                 row_op& op);

// A node that copies the wanted queries' rows of a layer's output.
ggml_tensor* make_hidden_node(ggml_context* tensors, const hidden_site& site, row_op& op);

}  // namespace kqview
