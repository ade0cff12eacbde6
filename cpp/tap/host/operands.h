// Where one query's operands lie in a row node's sources, in whatever layout the model uses: its
// part of q, one KV head's keys and their mask, and how gathered keys go back to columns.
// Threads: ggml's compute threads; nothing is written but their own scratch.
#pragma once

#include <optional>

#include "tap/host/row_kernel.h"
#include "tap/host/row_op.h"

namespace kqview {

// A query in the node's operands.
struct query_place {
    int token;
    int stream;
};
query_place place_of(const attention_site& site, int i_query, int i_stream);

const float* query_of(const row_op& op, const ggml_tensor* node, query_place query, int head);

// The mask of cells [first, first + n_cells) for one KV head.
mask_row mask_of(const row_op& op, const ggml_tensor* node, query_place query, int head_kv,
                 int first, int n_cells);

// A query's keys of one KV head.
struct seen_keys {
    key_rows keys;   // in order of position, or gathered
    key_rows extra;  // keys that are no tokens
    mask_row extra_mask;
    const std::int32_t* gathered;  // where gathered keys come from, else null
};
seen_keys keys_of(const row_op& op, const ggml_tensor* node, query_place query, int head_kv);

// The logit that stands for what takes part in the softmax and has no column: the model's own sink
// and every key that is no token. Empty where there is neither.
std::optional<float> sink_of(const row_op& op, const ggml_tensor* node, const seen_keys& seen,
                             const float* q, int head, row_scratch& scratch);

// A row over gathered keys to a row of columns: what was not gathered is as if masked.
void scatter(const attention_site& site, const seen_keys& seen, row_kind kind, const float* from,
             float* to, int n_columns);

}  // namespace kqview
