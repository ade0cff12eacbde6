// Arithmetic of attention rows on the CPU: K·q for a few heads that share their keys, and the
// conversion of these products into scores or probabilities. Vectorised with 16, 8 or 4 lanes,
// depending on the compiler's target; `dot_rows_scalar` is the reference for tests. Stateless;
// called by ggml's compute threads.
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
    int n_cells;  // readable cells, at least as many as requested columns
};

// Cells that are read later, fetched from memory meanwhile: a row of bytes for each cell of a
// product. All at once would fill the queue of outstanding misses and wait for it.
struct next_cells {
    const std::byte* data = nullptr;
    std::size_t stride_bytes = 0;
    std::size_t row_bytes = 0;  // 0: none

    void fetch(int cell) const {
        constexpr std::size_t line_bytes = 64;
        const auto* const row = data + static_cast<std::size_t>(cell) * stride_bytes;
        for (std::size_t i = 0; i < row_bytes; i += line_bytes) __builtin_prefetch(row + i, 0, 2);
    }
};

// Working memory of one compute thread; grows, never shrinks.
struct row_scratch {
    std::vector<float> rows;   // results to convert or reduce before they are written
    std::vector<float> cells;  // keys of a tile as floats, cell by cell or by dimension
    std::vector<std::pair<float, std::int32_t>> best;  // the largest values of a row
    std::vector<float> maxima;                         // of blocks of a row's columns
    std::vector<float> gathered;   // max_heads_at_once rows over gathered keys, before scatter()
    std::vector<float> extra;      // a row over keys that stand for no token
    std::vector<double> segments;  // sums over parts of a row
    std::vector<float> keys;       // of a tile of attention, as floats
    std::vector<float> values;     // the same
};

// out[h][c] = sum over n_embd of keys[c] * q[h], c < n_columns, h < n_heads <= max_heads_at_once.
void dot_rows(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
              float* const* out, row_scratch& scratch, const next_cells& next = {});
void dot_rows_scalar(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
                     float* const* out);

// One row of the attention mask, F16 or F32: 0 or a bias for a visible cell, -inf for a hidden one.
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
    float slope = 1.0f;    // of the mask's bias: this head's ALiBi slope
};
void logits_to_scores(float* row, int n_columns, const score_params& params, const mask_row& mask);

// `sink`: an extra logit that counts in the softmax's sum but has no column; null = none.
void scores_to_probs(float* row, int n_columns, const float* sink);

// ALiBi slope of a head as in the paper (Press et al., 2022) and in ggml's softmax; 1 without
// ALiBi.
float alibi_slope(float max_bias, int n_head, int head);

}  // namespace kqview
