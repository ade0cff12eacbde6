// The custom op that writes attention rows while the graph runs: one node per layer and source.
// Threads: ggml's compute threads run it, between begin_step and the end of the decode; the table it
//          reads is set before by the engine thread and does not change meanwhile.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tap/graph.h"
#include "tap/plan.h"
#include "tap/row_kernel.h"

namespace kqview {

// Where the rows of one query go.
struct row_target {
    std::shared_ptr<const capture_plan> plan;
    int i_stream;     // which of the graph's KV streams
    int i_query;      // which query of that stream
    int n_columns;    // positions the query sees: the width of its rows
    std::byte* data;  // plan->bytes(n_columns) bytes, rows packed in order (layer, head)
};

// The targets of the step that runs now, and what was written to them.
struct row_table {
    std::vector<row_target> targets;
    std::atomic<int> n_rows_written{0};
    std::atomic<const std::byte*> first_write{
        nullptr};                      // address of row 0 of target 0, by the kernel
    std::vector<row_scratch> scratch;  // one per compute thread
};

// What a node needs besides its sources; must outlive the graph.
struct row_op {
    row_table* table;
    int il;
    int n_head;
    int n_head_kv;
    row_kind kind;  // from a flash site: unused, the target's kind decides
    bool is_flash;
    int i_mask = -1;  // index in the node's sources, -1 = none
    int i_sinks = -1;
    float scale;
    float max_bias;
    float softcap;
};

// A node that computes K·q for the wanted rows itself (flash attention keeps no product), in any kind.
ggml_tensor* make_flash_row_node(ggml_context* tensors, const attention_site& site, row_op& op);

// A node that reads rows llama.cpp computes anyway: kq, the softmax's input or its result.
ggml_tensor* make_plain_row_node(ggml_context* tensors, const attention_site& site, row_kind kind,
                                 row_op& op);

}  // namespace kqview
