#include "tap/host/row_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/vector_exp.h"
#include "tap/host/quantised_cells.h"
#include "tap/host/vectors.h"

namespace kqview {

namespace {

using namespace vectors;

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

template <int... i>
vec add_even_odd(vec a, vec b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (2 * i)...) +
           __builtin_shufflevector(a, b, (2 * i + 1)...);
}

// Horizontal sums of `lanes` vectors at once: lane i of the result is the sum of values[i]. A tree
// of pairwise additions shares the adds and shuffles among all sums (16 with 16 lanes).
template <int n>
vec sum_each(const vec* values) {
    if constexpr (n == 1) {
        return values[0];
    } else {
        vec halves[n / 2];
        for (int i = 0; i < n / 2; ++i) {
            halves[i] = add_even_odd(values[2 * i], values[2 * i + 1],
                                     std::make_integer_sequence<int, lanes>{});
        }
        return sum_each<n / 2>(halves);
    }
}

// `lanes` products at once: n_heads heads x lanes / n_heads cells, all in registers.
template <int n_heads, class cell_type>
void dot_tile(const std::byte* keys, std::size_t stride, const float* const* q, int n_embd,
              float* const* out, int first_column, int n_columns) {
    constexpr int n_cells = lanes / n_heads;
    vec sums[lanes] = {};
    int i = 0;
    for (; i + lanes <= n_embd; i += lanes) {
        vec cell[n_cells];
        for (int c = 0; c < n_cells; ++c) {
            cell[c] =
                cell_type::get(keys + static_cast<std::size_t>(c) * stride + i * cell_type::bytes);
        }
        for (int h = 0; h < n_heads; ++h) {
            const vec query = load(q[h] + i);
            for (int c = 0; c < n_cells; ++c) sums[h * n_cells + c] += query * cell[c];
        }
    }
    vec result = sum_each<lanes>(sums);
    for (; i < n_embd; ++i) {  // head sizes that are not a multiple of the vector width
        for (int c = 0; c < n_cells; ++c) {
            const float key =
                cell_type::one(keys + static_cast<std::size_t>(c) * stride + i * cell_type::bytes);
            for (int h = 0; h < n_heads; ++h) result[h * n_cells + c] += q[h][i] * key;
        }
    }
    float flat[lanes];
    store(flat, result);
    const auto n_bytes =
        static_cast<std::size_t>(std::min(n_cells, n_columns - first_column)) * sizeof(float);
    for (int h = 0; h < n_heads; ++h) {
        std::memcpy(out[h] + first_column, flat + h * n_cells, n_bytes);
    }
}

// A tile of `lanes` cells against all heads, in groups of the largest remaining power of two.
template <class cell_type>
void dot_cells(const std::byte* keys, std::size_t stride, const float* const* q, int n_heads,
               int n_embd, float* const* out, int first_column, int n_columns) {
    const auto run = [&]<int n>() {
        constexpr int step = lanes / n;
        const int end = std::min(first_column + lanes, n_columns);
        for (int c = first_column; c < end; c += step) {
            dot_tile<n, cell_type>(keys + static_cast<std::size_t>(c - first_column) * stride,
                                   stride, q, n_embd, out, c, n_columns);
        }
        q += n, out += n, n_heads -= n;
    };
    while (n_heads >= 4) run.template operator()<4>();
    if (n_heads >= 2) run.template operator()<2>();
    if (n_heads >= 1) run.template operator()<1>();
}

template <class cell_type>
void dot_all(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
             float* const* out) {
    for (int c = 0; c < n_columns; c += lanes) {
        dot_cells<cell_type>(keys.data + static_cast<std::size_t>(c) * keys.cell_stride_bytes,
                             keys.cell_stride_bytes, q, n_heads, keys.n_embd, out, c, n_columns);
    }
}

void dot_quantised(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
                   float* const* out, row_scratch& scratch) {
    const auto to_float = ggml_get_type_traits(keys.type)->to_float;
    const auto n_embd = static_cast<std::size_t>(keys.n_embd);
    scratch.cells.resize(static_cast<std::size_t>(lanes) * n_embd);
    for (int c = 0; c < n_columns; c += lanes) {
        for (int i = 0; i < std::min(lanes, n_columns - c); ++i) {
            const auto* const cell =
                keys.data + static_cast<std::size_t>(c + i) * keys.cell_stride_bytes;
            float* const to = scratch.cells.data() + static_cast<std::size_t>(i) * n_embd;
            if (!widen_quantised(keys.type, cell, keys.n_embd, to)) to_float(cell, to, keys.n_embd);
        }
        dot_cells<f32_cells>(reinterpret_cast<const std::byte*>(scratch.cells.data()),
                             n_embd * sizeof(float), q, n_heads, keys.n_embd, out, c, n_columns);
    }
}

float mask_at(const mask_row& mask, int column) {
    return mask.type == GGML_TYPE_F16
               ? ggml_fp16_to_fp32(static_cast<const ggml_fp16_t*>(mask.data)[column])
               : static_cast<const float*>(mask.data)[column];
}

}  // namespace

void dot_rows(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
              float* const* out, row_scratch& scratch) {
    // A tile reads `lanes` cells at a time: if the cache ends within the last tile, its cells go
    // one by one.
    const int n_tiled = keys.n_cells % lanes == 0 ? n_columns : n_columns / lanes * lanes;
    switch (keys.type) {
        case GGML_TYPE_F16: dot_all<f16_cells>(keys, q, n_heads, n_tiled, out); break;
        case GGML_TYPE_F32: dot_all<f32_cells>(keys, q, n_heads, n_tiled, out); break;
        case GGML_TYPE_BF16: dot_all<bf16_cells>(keys, q, n_heads, n_tiled, out); break;
        default: dot_quantised(keys, q, n_heads, n_columns, out, scratch); return;
    }
    if (n_tiled == n_columns) return;
    key_rows rest = keys;
    rest.data += static_cast<std::size_t>(n_tiled) * keys.cell_stride_bytes;
    float* rest_out[max_heads_at_once];
    for (int h = 0; h < n_heads; ++h) rest_out[h] = out[h] + n_tiled;
    dot_rows_scalar(rest, q, n_heads, n_columns - n_tiled, rest_out);
}

void dot_rows_scalar(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
                     float* const* out) {
    std::vector<float> cell(static_cast<std::size_t>(keys.n_embd));
    for (int c = 0; c < n_columns; ++c) {
        const auto* const from = keys.data + static_cast<std::size_t>(c) * keys.cell_stride_bytes;
        if (keys.type == GGML_TYPE_F32) {
            std::memcpy(cell.data(), from, cell.size() * sizeof(float));
        } else {
            ggml_get_type_traits(keys.type)->to_float(from, cell.data(), keys.n_embd);
        }
        for (int h = 0; h < n_heads; ++h) {
            float sum = 0.0f;
            for (int i = 0; i < keys.n_embd; ++i)
                sum += q[h][i] * cell[static_cast<std::size_t>(i)];
            out[h][c] = sum;
        }
    }
}

mask_row read_mask(const void* data, ggml_type type, int n_columns) {
    mask_row mask{data, type};
    if (!data) return mask;
    if (type == GGML_TYPE_F16) {
        const auto* const bits = static_cast<const std::uint16_t*>(data);
        std::uint16_t any = 0;
        bool hides = false;
        for (int c = 0; c < n_columns; ++c) {
            const bool is_hidden = bits[c] == 0xFC00;  // -inf
            hides |= is_hidden;
            any = static_cast<std::uint16_t>(any | (is_hidden ? 0 : bits[c]));
        }
        mask.hides_columns = hides;
        mask.has_bias = (any & 0x7FFF) != 0;
        return mask;
    }
    for (int c = 0; c < n_columns; ++c) {
        const float value = static_cast<const float*>(data)[c];
        mask.hides_columns |= value == minus_infinity;
        mask.has_bias |= value != 0.0f && value != minus_infinity;
    }
    return mask;
}

void hide_masked(float* row, int n_columns, const mask_row& mask) {
    if (!mask.hides_columns) return;
    for (int c = 0; c < n_columns; ++c) {
        if (mask_at(mask, c) == minus_infinity) row[c] = minus_infinity;
    }
}

void logits_to_scores(float* row, int n_columns, const score_params& params, const mask_row& mask) {
    if (params.softcap != 0.0f) {
        const float inner = params.scale / params.softcap;
        for (int c = 0; c < n_columns; ++c) row[c] = params.softcap * std::tanh(row[c] * inner);
    } else {
        for (int c = 0; c < n_columns; ++c) row[c] *= params.scale;
    }
    if (mask.has_bias) {
        for (int c = 0; c < n_columns; ++c) row[c] += params.slope * mask_at(mask, c);
    } else {
        hide_masked(row, n_columns, mask);
    }
}

void scores_to_probs(float* row, int n_columns, const float* sink) {
    float largest = sink ? *sink : minus_infinity;
    for (int c = 0; c < n_columns; ++c) largest = std::max(largest, row[c]);
    if (largest == minus_infinity) {  // no visible column
        std::fill_n(row, n_columns, 0.0f);
        return;
    }
    vec sums{};
    int c = 0;
    for (; c + lanes <= n_columns; c += lanes) {
        const vec score = load(row + c);
        const vec value = score == minus_infinity ? vec{} : exp_nonpositive(score - largest);
        store(row + c, value);
        sums += value;
    }
    float sum = sink ? std::exp(*sink - largest) : 0.0f;
    for (int i = 0; i < lanes; ++i) sum += sums[i];
    for (; c < n_columns; ++c) {
        row[c] = std::exp(row[c] - largest);
        sum += row[c];
    }
    const float factor = 1.0f / sum;
    for (int i = 0; i < n_columns; ++i) row[i] *= factor;
}

float alibi_slope(float max_bias, int n_head, int head) {
    if (max_bias <= 0.0f) return 1.0f;
    const int n_first = 1 << static_cast<int>(std::floor(std::log2(static_cast<float>(n_head))));
    const float base =
        std::exp2(-(head < n_first ? max_bias : max_bias / 2.0f) / static_cast<float>(n_first));
    const int power = head < n_first ? head + 1 : 2 * (head - n_first) + 1;
    return std::pow(base, static_cast<float>(power));
}

}  // namespace kqview
