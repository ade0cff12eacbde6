// Arithmetic of attention rows on the CPU: K·q for a few heads that share their keys, and what
// turns the products into scores or probabilities. Vectorised by width (16, 8 or 4 lanes by the
// compiler's target); `dot_rows_scalar` is its twin for tests. Stateless; ggml's compute threads
// call it.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kqview {

constexpr int max_heads_at_once = 4;

// Keys of one KV head: cell c begins at data + c * cell_stride_bytes.
struct key_rows {
    const std::byte* data;
    std::size_t cell_stride_bytes;
    ggml_type type;
    int n_embd;   // head size
    int n_cells;  // readable cells, at least the columns asked for
};

// Working memory of one compute thread; grows, never shrinks.
struct row_scratch {
    std::vector<float> rows;   // results that are converted or reduced before they leave
    std::vector<float> cells;  // dequantised keys of a tile
    std::vector<std::pair<float, std::int32_t>> best;  // the largest values of a row
    std::vector<float>
        gathered;              // max_heads_at_once rows over gathered keys, before they are columns
    std::vector<float> extra;  // a row over keys that are no tokens
};

// out[h][c] = sum over n_embd of keys[c] * q[h], c < n_columns, h < n_heads <= max_heads_at_once.
void dot_rows(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
              float* const* out, row_scratch& scratch);
void dot_rows_scalar(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
                     float* const* out);

// One row of the attention mask: F16 or F32, 0 or a bias where a cell is seen, -inf where not.
struct mask_row {
    const void* data = nullptr;
    ggml_type type = GGML_TYPE_F32;
    bool hides_columns = false;  // some of the row's columns are -inf
    bool has_bias = false;       // some are neither 0 nor -inf (ALiBi)
};
mask_row read_mask(const void* data, ggml_type type, int n_columns);

// row[c] = -inf where the mask hides c.
void hide_masked(float* row, int n_columns, const mask_row& mask);

struct score_params {
    float scale = 1.0f;
    float softcap = 0.0f;  // 0 = none: cap * tanh(x * scale / cap)
    float slope = 1.0f;    // of the mask's bias, this head's ALiBi slope
};
void logits_to_scores(float* row, int n_columns, const score_params& params, const mask_row& mask);

// `sink`: an extra logit that takes part in the sum and has no column; null = none.
void scores_to_probs(float* row, int n_columns, const float* sink);

// ALiBi's slope of a head as in the paper (Press et al., 2022) and in ggml's softmax; 1 without
// ALiBi.
float alibi_slope(float max_bias, int n_head, int head);

}  // namespace kqview
