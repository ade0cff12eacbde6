#include "tap/host/row_kernel.h"

#include <algorithm>
#include <bit>
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

// Sums that stay in registers while products are added to them.
constexpr int n_sums = n_registers / 2;

// Products of a run of cells: in blocks of at most n_sums, of which each head has its share.
template <int n_heads>
struct run_of {
    static constexpr int block =  // cells
        static_cast<int>(std::bit_floor(static_cast<unsigned>(n_sums / n_heads)));
    static constexpr int n_blocks = block < lanes ? lanes / block : 1;
    static constexpr int n_cells = n_blocks * block;
};

template <int n_heads, class cell_type>
[[gnu::always_inline]] inline void dot_run(const std::byte* keys, std::size_t stride,
                                           const float* const* q, int n_embd, float* const* out) {
    using run = run_of<n_heads>;
    constexpr int block = run::block, n_blocks = run::n_blocks;
    constexpr int step = cell_type::vecs * lanes;
    vec parts[n_heads][n_blocks];
    int i = 0;
#pragma GCC unroll 1
    for (int b = 0; b < n_blocks; ++b) {
        const auto* const cells = keys + static_cast<std::size_t>(b * block) * stride;
        vec sums[n_heads * block] = {};
        const auto* at = cells;
        for (i = 0; i + step <= n_embd; i += step, at += cell_type::bytes) {
            for_each<cell_type::vecs>([&]<int i_vec>() __attribute__((always_inline)) {
                vec cell[block];
#pragma GCC unroll 16
                for (int c = 0; c < block; ++c)
                    cell[c] =
                        cell_type::template get<i_vec>(at + static_cast<std::size_t>(c) * stride);
#pragma GCC unroll 4
                for (int h = 0; h < n_heads; ++h) {
                    vec query = load(q[h] + i + i_vec * lanes);
                    keep_in_register(query);
#pragma GCC unroll 16
                    for (int c = 0; c < block; ++c) sums[h * block + c] += query * cell[c];
                }
            });
        }
        if constexpr (block < lanes) {
#pragma GCC unroll 4
            for (int h = 0; h < n_heads; ++h) parts[h][b] = sum_each<block>(sums + h * block);
        } else {
#pragma GCC unroll 4
            for (int h = 0; h < n_heads; ++h)
#pragma GCC unroll 4
                for (int c = 0; c < block; c += lanes)
                    store(out[h] + c, sum_each<lanes>(sums + h * block + c));
        }
    }
    if constexpr (block < lanes) {
#pragma GCC unroll 4
        for (int h = 0; h < n_heads; ++h) store(out[h], sum_each<n_blocks, block>(parts[h]));
    }
    if constexpr (cell_type::vecs == 1) {
        for (; i < n_embd; ++i) {  // head sizes that are not a multiple of the vector width
            for (int c = 0; c < run::n_cells; ++c) {
                const float key = cell_type::one(keys + static_cast<std::size_t>(c) * stride, i);
                for (int h = 0; h < n_heads; ++h) out[h][c] += q[h][i] * key;
            }
        }
    }
}

template <int n_heads, class cell_type>
void dot_heads(const key_rows& keys, const float* const* q, int n_columns, float* const* out,
               const next_cells& next) {
    constexpr int n_cells = run_of<n_heads>::n_cells;
    const float* queries[n_heads];
    float* to[n_heads];
    for (int h = 0; h < n_heads; ++h) queries[h] = q[h], to[h] = out[h];
    const auto* cells = keys.data;
    const auto stride = keys.cell_stride_bytes;
    const int n_embd = keys.n_embd;
    int c = 0;
    for (; c + n_cells <= n_columns; c += n_cells, cells += n_cells * stride) {
        for (int i = 0; i < n_cells; ++i) next.fetch(c + i);
        dot_run<n_heads, cell_type>(cells, stride, queries, n_embd, to);
        for (int h = 0; h < n_heads; ++h) to[h] += n_cells;
    }
    if (c == n_columns) return;
    alignas(sizeof(vec)) float last[n_heads][n_cells];
    for (int h = 0; h < n_heads; ++h) to[h] = last[h];
    dot_run<n_heads, cell_type>(cells, stride, queries, n_embd, to);
    for (int h = 0; h < n_heads; ++h) std::copy_n(last[h], n_columns - c, out[h] + c);
}

// Heads in groups of four and what is left; the first group fetches what is read later.
template <class cell_type>
void dot_all(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
             float* const* out, next_cells next) {
    const auto run = [&]<int n>() {
        dot_heads<n, cell_type>(keys, q, n_columns, out, next);
        q += n, out += n, n_heads -= n;
        next = {};
    };
    while (n_heads >= 4) run.template operator()<4>();
    if (n_heads == 3) run.template operator()<3>();
    if (n_heads == 2) run.template operator()<2>();
    if (n_heads == 1) run.template operator()<1>();
}

void dot_quantised(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
                   float* const* out, row_scratch& scratch, const next_cells& next) {
    const auto to_float = ggml_get_type_traits(keys.type)->to_float;
    const auto n_embd = static_cast<std::size_t>(keys.n_embd);
    scratch.cells.resize(static_cast<std::size_t>(n_sums) * n_embd);
    const key_rows floats{reinterpret_cast<const std::byte*>(scratch.cells.data()),
                          n_embd * sizeof(float), GGML_TYPE_F32, keys.n_embd, n_sums};
    for (int c = 0; c < n_columns; c += n_sums) {
        const int n = std::min(n_sums, n_columns - c);
        for (int i = 0; i < n; ++i) {
            next.fetch(c + i);
            const auto* const cell =
                keys.data + static_cast<std::size_t>(c + i) * keys.cell_stride_bytes;
            float* const to = scratch.cells.data() + static_cast<std::size_t>(i) * n_embd;
            if (!widen_quantised(keys.type, cell, keys.n_embd, to)) to_float(cell, to, keys.n_embd);
        }
        float* at[max_heads_at_once];
        for (int h = 0; h < n_heads; ++h) at[h] = out[h] + c;
        dot_all<f32_cells>(floats, q, n_heads, n, at, {});
    }
}

bool is_zero(const void* data, std::size_t n_bytes) {
    const auto* const bytes = static_cast<const std::byte*>(data);
    std::uint64_t any = 0, word = 0;
    std::size_t i = 0;
    for (; i + sizeof word <= n_bytes; i += sizeof word) {
        std::memcpy(&word, bytes + i, sizeof word);
        any |= word;
    }
    word = 0;
    std::memcpy(&word, bytes + i, n_bytes - i);
    return (any | word) == 0;
}

float mask_at(const mask_row& mask, int column) {
    const auto* const data = static_cast<const std::byte*>(mask.data);
    return mask.type == GGML_TYPE_F16 ? f16_cells::one(data, column) : f32_cells::one(data, column);
}

// Of `lanes` columns.
vec mask_from(const mask_row& mask, int column) {
    const auto* const data = static_cast<const std::byte*>(mask.data);
    const std::size_t at = static_cast<std::size_t>(column);
    return mask.type == GGML_TYPE_F16 ? f16_cells::get<0>(data + at * 2)
                                      : f32_cells::get<0>(data + at * 4);
}

}  // namespace

void dot_rows(const key_rows& keys, const float* const* q, int n_heads, int n_columns,
              float* const* out, row_scratch& scratch, const next_cells& next) {
    // A block reads up to n_sums cells at a time: if the cache ends within the last one, its cells
    // go one by one.
    const int n_tiled = keys.n_cells % n_sums == 0 ? n_columns : n_columns / n_sums * n_sums;
    switch (keys.type) {
        case GGML_TYPE_F16: dot_all<f16_cells>(keys, q, n_heads, n_tiled, out, next); break;
        case GGML_TYPE_F32: dot_all<f32_cells>(keys, q, n_heads, n_tiled, out, next); break;
        case GGML_TYPE_BF16: dot_all<bf16_cells>(keys, q, n_heads, n_tiled, out, next); break;
        case GGML_TYPE_Q8_0:
            dot_all<block_cells<GGML_TYPE_Q8_0>>(keys, q, n_heads, n_tiled, out, next);
            break;
        case GGML_TYPE_Q4_0:
            dot_all<block_cells<GGML_TYPE_Q4_0>>(keys, q, n_heads, n_tiled, out, next);
            break;
        default: return dot_quantised(keys, q, n_heads, n_columns, out, scratch, next);
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
    // Of most rows all columns are visible, and nothing is added to them.
    if (!data || is_zero(data, static_cast<std::size_t>(n_columns) * ggml_type_size(type)))
        return mask;
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
    int c = 0;
    for (; c + lanes <= n_columns; c += lanes) {
        const vec hidden = mask_from(mask, c);
        store(row + c, hidden == minus_infinity ? hidden : load(row + c));
    }
    for (; c < n_columns; ++c) {
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
        int c = 0;
        for (; c + lanes <= n_columns; c += lanes)
            store(row + c, load(row + c) + params.slope * mask_from(mask, c));
        for (; c < n_columns; ++c) row[c] += params.slope * mask_at(mask, c);
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
