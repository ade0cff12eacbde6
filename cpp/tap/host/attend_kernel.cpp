#include "tap/host/attend_kernel.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "base/vector_exp.h"
#include "tap/host/quantised_cells.h"
#include "tap/host/vectors.h"

namespace kqview {

namespace {

using namespace vectors;

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

static_assert(attend_tile % lanes == 0);

// ---- cells as floats

template <class cell_type>
void widen(const key_rows& cells, int n_cells, float* to) {
    const auto* from = cells.data;
    for (int c = 0; c < n_cells; ++c, from += cells.cell_stride_bytes, to += cells.n_embd) {
        int i = 0;
        for (; i + lanes <= cells.n_embd; i += lanes)
            store(to + i, cell_type::template get<0>(from + i / lanes * cell_type::bytes));
        for (; i < cells.n_embd; ++i) to[i] = cell_type::one(from, i);
    }
}

// The cells as floats one behind the other, in `buffer` unless they are floats already.
key_rows as_floats(const key_rows& cells, int n_cells, std::vector<float>& buffer) {
    if (cells.type == GGML_TYPE_F32) return cells;
    const auto n_embd = static_cast<std::size_t>(cells.n_embd);
    if (buffer.size() < attend_tile * n_embd) buffer.resize(attend_tile * n_embd);
    float* const to = buffer.data();
    if (cells.type == GGML_TYPE_F16) {
        widen<f16_cells>(cells, n_cells, to);
    } else if (cells.type == GGML_TYPE_BF16) {
        widen<bf16_cells>(cells, n_cells, to);
    } else {
        const auto to_float = ggml_get_type_traits(cells.type)->to_float;
        for (std::size_t c = 0; c < static_cast<std::size_t>(n_cells); ++c) {
            const auto* const cell = cells.data + c * cells.cell_stride_bytes;
            if (!widen_quantised(cells.type, cell, cells.n_embd, to + c * n_embd))
                to_float(cell, to + c * n_embd, cells.n_embd);
        }
    }
    return {reinterpret_cast<const std::byte*>(to), n_embd * sizeof(float), GGML_TYPE_F32,
            cells.n_embd, attend_tile};
}

// ---- softmax

// Turns a tile of scores, padded with -inf, into weights relative to the head's largest score.
// Returns by how much what the head has found so far shrinks.
float weigh(float* scores, float scale, attended_head& head) {
    constexpr int n_vecs = attend_tile / lanes;
    vec x[n_vecs];
    for (int i = 0; i < n_vecs; ++i) x[i] = load(scores + i * lanes) * scale;
    vec most = x[0];
    for (int i = 1; i < n_vecs; ++i) most = x[i] > most ? x[i] : most;
    const float tile_max = largest_of(most);
    float factor = 1.0f;
    if (tile_max > head.max) {
        factor = std::exp(head.max - tile_max);  // 0 at first
        head.sum *= factor;
        head.max = tile_max;
    }
    if (head.max == minus_infinity) {
        std::fill_n(scores, attend_tile, 0.0f);
        head.tile_sum = 0.0f;
        return factor;
    }
    vec sums{};
    for (int i = 0; i < n_vecs; ++i) {
        const vec weight = x[i] == minus_infinity ? vec{} : exp_nonpositive(x[i] - head.max);
        store(scores + i * lanes, weight);
        sums += weight;
    }
    head.tile_sum = sum_of(sums);
    head.sum += head.tile_sum;
    return factor;
}

void keep_row(const attended_head& head, const float* values) {
    if (!head.row) return;
    if (head.streams_row) return stream(head.row, values, head.n_row);
    std::memcpy(head.row, values, static_cast<std::size_t>(head.n_row) * sizeof(float));
}

void keep_logits(const attended_head& head, const float* tile) {
    if (!head.row || !head.mask->row.hides_columns) return keep_row(head, tile);
    float shown[attend_tile];
    std::copy_n(tile, head.n_row, shown);
    hide_masked(shown, head.n_row, head.mask->row);
    keep_row(head, shown);
}

// What of a tile of products comes before its softmax, for the row as well. Returns by what the
// scores are still to be multiplied.
float score_tile(const attended_head& head, float* tile, int n_cells, float scale, float softcap) {
    const auto& mask = head.mask->row;
    std::fill(tile + n_cells, tile + attend_tile, minus_infinity);
    if (head.kind == row_kind::logits) keep_logits(head, tile);
    if (softcap != 0.0f || mask.has_bias || head.kind == row_kind::scores) {
        logits_to_scores(tile, n_cells, {scale, softcap, head.slope}, mask);
        scale = 1.0f;
    } else {
        hide_masked(tile, n_cells, mask);
    }
    if (head.kind == row_kind::scores) keep_row(head, tile);
    return scale;
}

// All bits of lane i where i >= first, none of the others.
ivec lanes_from(int first) {
    static constexpr auto table = [] {
        std::array<std::int32_t, std::size_t{2} * lanes> bits{};
        std::fill(bits.begin() + lanes, bits.end(), -1);
        return bits;
    }();
    ivec mask;
    std::memcpy(&mask, table.data() + lanes - first, sizeof mask);
    return mask;
}

// The last vector may hold weights of other pieces, which do not count.
float sum_of_piece(const float* tile, const cut_ranges::piece& piece) {
    vec sums{};
    int c = piece.begin;
    for (; c + lanes <= piece.end; c += lanes) sums += load(tile + c);
    if (c < piece.end) {
        const int from = std::min(c, attend_tile - lanes);  // no cell behind the tile is read
        const ivec mask = lanes_from(c - from) & ~lanes_from(piece.end - from);
        sums += reinterpret_cast<vec>(reinterpret_cast<ivec>(load(tile + from)) & mask);
    }
    return sum_of(sums);
}

void keep_probs(const attended_head& head, const float* tile) {
    if (head.kind != row_kind::probs || !head.row) return;
    *head.row_max = head.max;
    if (!head.pieces) return keep_row(head, tile);
    for (int i = 0; i < head.n_row; ++i) {
        const auto& piece = head.pieces[i];
        const bool is_whole = piece.end - piece.begin == attend_tile;
        head.row[i] = is_whole ? head.tile_sum : sum_of_piece(tile, piece);
    }
}

// A tile of products becomes weights; the row takes what it wants on the way.
void take_tile(attended_head& head, float* tile, int n_cells, int n_value, float scale,
               float softcap) {
    scale = score_tile(head, tile, n_cells, scale, softcap);
    const float factor = weigh(tile, scale, head);
    if (factor != 1.0f)
        for (int i = 0; i < n_value; ++i) head.values[i] *= factor;
    keep_probs(head, tile);
}

// ---- values

// acc[h] += weights[h] * cells, for n_vecs vectors of dimensions; `first` is that of the block at
// `cells` which comes first.
template <int n_heads, int n_vecs, class cell_type, int first>
void add_block(const std::byte* cells, std::size_t stride, const float* const* weights, int n_cells,
               float* const* acc, const next_cells& next) {
    vec sums[n_heads][n_vecs];
#pragma GCC unroll 4
    for (int h = 0; h < n_heads; ++h)
#pragma GCC unroll 16
        for (int i = 0; i < n_vecs; ++i) sums[h][i] = load(acc[h] + i * lanes);
    for (int c = 0; c < n_cells; ++c, cells += stride) {
        next.fetch(c);
        vec value[n_vecs];
        for_each<n_vecs>([&]<int i>() __attribute__((always_inline)) {
            constexpr int i_block = (first + i) / cell_type::vecs;
            value[i] = cell_type::template get<(first + i) % cell_type::vecs>(
                cells + i_block * cell_type::bytes);
        });
#pragma GCC unroll 4
        for (int h = 0; h < n_heads; ++h) {
            const vec weight = spread(weights[h][c]);
#pragma GCC unroll 16
            for (int i = 0; i < n_vecs; ++i) sums[h][i] += weight * value[i];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < n_heads; ++h)
#pragma GCC unroll 16
        for (int i = 0; i < n_vecs; ++i) store(acc[h] + i * lanes, sums[h][i]);
}

template <int n_heads, class cell_type>
void add_values_of(const key_rows& values, const float* const* weights, int n_cells,
                   float* const* acc, const next_cells& next) {
    constexpr int most_vecs = n_registers / 2 / n_heads;
    const auto stride = values.cell_stride_bytes;
    int dim = 0;
    constexpr int n_of_block = cell_type::vecs * lanes;
    const auto* cells = values.data;
    const auto run = [&]<int n_vecs>() {
        constexpr int n_calls = std::max(1, cell_type::vecs / n_vecs);
        constexpr int n_blocks = n_vecs * n_calls / cell_type::vecs;
        for (; dim + n_blocks * n_of_block <= values.n_embd; cells += n_blocks * cell_type::bytes) {
            for_each<n_calls>([&]<int i>() {
                float* at[n_heads];
                for (int h = 0; h < n_heads; ++h) at[h] = acc[h] + dim;
                add_block<n_heads, n_vecs, cell_type, i * n_vecs>(cells, stride, weights, n_cells,
                                                                  at, dim ? next_cells{} : next);
                dim += n_vecs * lanes;
            });
        }
    };
    if constexpr (most_vecs >= 8) run.template operator()<8>();
    if constexpr (most_vecs >= 4) run.template operator()<4>();
    if constexpr (most_vecs >= 2) run.template operator()<2>();
    if constexpr (cell_type::vecs == 1) {
        run.template operator()<1>();
        for (; dim < values.n_embd; ++dim)  // head sizes that are no multiple of the vector width
            for (int h = 0; h < n_heads; ++h)
                for (int c = 0; c < n_cells; ++c)
                    acc[h][dim] +=
                        weights[h][c] *
                        cell_type::one(values.data + static_cast<std::size_t>(c) * stride, dim);
    }
}

template <class cell_type>
void add_values_as(const key_rows& values, const float* const* weights, int n_heads, int n_cells,
                   float* const* acc, const next_cells& next) {
    for_each<max_heads_at_once>([&]<int i>() {
        if (n_heads == i + 1) add_values_of<i + 1, cell_type>(values, weights, n_cells, acc, next);
    });
}

void add_values(const key_rows& values, const float* const* weights, int n_heads, int n_cells,
                float* const* acc, const next_cells& next) {
    switch (values.type) {
        case GGML_TYPE_F16:
            return add_values_as<f16_cells>(values, weights, n_heads, n_cells, acc, next);
        case GGML_TYPE_BF16:
            return add_values_as<bf16_cells>(values, weights, n_heads, n_cells, acc, next);
        case GGML_TYPE_Q8_0:
            return add_values_as<block_cells<GGML_TYPE_Q8_0>>(values, weights, n_heads, n_cells,
                                                              acc, next);
        case GGML_TYPE_Q4_0:
            return add_values_as<block_cells<GGML_TYPE_Q4_0>>(values, weights, n_heads, n_cells,
                                                              acc, next);
        default: return add_values_as<f32_cells>(values, weights, n_heads, n_cells, acc, next);
    }
}

// ---- many heads: products of blocks of heads and columns, whose sums stay in registers

constexpr int heads_of_block = 6;
constexpr int vecs_of_block = n_registers / 8;
constexpr int kept_floats = (heads_of_block + lanes - 1) / lanes * lanes;
// From so many on, a tile is laid out for them. It is worth it for fewer, but steps with guesses
// then add in another order than single tokens do, and weights of 8 bits make much of a last bit.
constexpr int least_heads_of_blocks = 8 * heads_of_block;

// Rows of floats.
struct float_rows {
    const float* data;
    std::size_t stride;  // floats
    int n_columns;
};

// to[h] = the sum over i < n of factors[h][i] * rows[i], in n_vecs vectors of columns from `first`
// on; `adds`: to what is there, multiplied by kept[h].
template <int n_heads, int n_vecs, bool adds>
void multiply(const float* const* factors, const float_rows& rows, int first, int n,
              float* const* to, const float* kept) {
    vec sums[n_heads][n_vecs] = {};
    if constexpr (adds) {
#pragma GCC unroll 8
        for (int h = 0; h < n_heads; ++h)
#pragma GCC unroll 4
            for (int v = 0; v < n_vecs; ++v) sums[h][v] = load(to[h] + first + v * lanes) * kept[h];
    }
    const float* row = rows.data + first;
#pragma GCC unroll 1
    for (int i = 0; i < n; ++i, row += rows.stride) {
        vec values[n_vecs];
#pragma GCC unroll 4
        for (int v = 0; v < n_vecs; ++v) values[v] = load(row + v * lanes);
#pragma GCC unroll 8
        for (int h = 0; h < n_heads; ++h) {
            vec factor = spread(factors[h][i]);
            keep_in_register(factor);
#pragma GCC unroll 4
            for (int v = 0; v < n_vecs; ++v) sums[h][v] += factor * values[v];
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < n_heads; ++h)
#pragma GCC unroll 4
        for (int v = 0; v < n_vecs; ++v) store(to[h] + first + v * lanes, sums[h][v]);
}

// The same in all columns.
template <int n_heads, bool adds>
void multiply_rows(const float* const* factors, const float_rows& rows, int n, float* const* to,
                   const float* kept) {
    int c = 0;
    const auto run = [&]<int n_vecs>() {
        for (; c + n_vecs * lanes <= rows.n_columns; c += n_vecs * lanes)
            multiply<n_heads, n_vecs, adds>(factors, rows, c, n, to, kept);
    };
    run.template operator()<vecs_of_block>();
    run.template operator()<2>();
    run.template operator()<1>();
    for (; c < rows.n_columns; ++c) {
        for (int h = 0; h < n_heads; ++h) {
            float sum = adds ? to[h][c] * kept[h] : 0.0f;
            for (int i = 0; i < n; ++i)
                sum += factors[h][i] * rows.data[static_cast<std::size_t>(i) * rows.stride +
                                                 static_cast<std::size_t>(c)];
            to[h][c] = sum;
        }
    }
}

template <bool adds>
void multiply_block(const float* const* factors, int n_heads, const float_rows& rows, int n,
                    float* const* to, const float* kept = nullptr) {
    const auto run = [&]<int n_now>() {
        if (n_heads < n_now) return;
        multiply_rows<n_now, adds>(factors, rows, n, to, kept);
        factors += n_now, to += n_now, n_heads -= n_now;
        if (adds) kept += n_now;
    };
    run.template operator()<heads_of_block>();
    run.template operator()<4>();
    run.template operator()<2>();
    run.template operator()<1>();
}

// As `weigh`, for the heads of a block; kept[h]: by how much what a head has found so far shrinks.
void weigh_block(attended_head* const* heads, float (*tiles)[attend_tile], const float* scales,
                 int n_heads, float* kept) {
    constexpr int n_vecs = attend_tile / lanes;
    float before[kept_floats] = {}, now[kept_floats] = {};
    for (int h = 0; h < n_heads; ++h) {
        vec most = load(tiles[h]);
        for (int i = 1; i < n_vecs; ++i) {
            const vec x = load(tiles[h] + i * lanes);
            most = x > most ? x : most;
        }
        const float max = std::max(heads[h]->max, largest_of(most) * scales[h]);
        if (max == minus_infinity) continue;
        before[h] = heads[h]->max;
        heads[h]->max = now[h] = max;
    }
    for (int h = 0; h < n_heads; h += lanes)
        store(kept + h, exp_nonpositive(load(before + h) - load(now + h)));
    for (int h = 0; h < n_heads; ++h) {
        vec sums{};
        for (int i = 0; i < n_vecs; ++i) {
            const vec x = load(tiles[h] + i * lanes) * scales[h] - now[h];
            const vec weight = x == minus_infinity ? vec{} : exp_nonpositive(x);
            store(tiles[h] + i * lanes, weight);
            sums += weight;
        }
        heads[h]->tile_sum = sum_of(sums);
        heads[h]->sum = heads[h]->sum * kept[h] + heads[h]->tile_sum;
    }
}

// Turns the rows of a square into its columns: each step brings the lanes of two rows together.
[[gnu::always_inline]] inline void transpose(vec* rows) {
    constexpr int n_half = lanes / 2;
#pragma GCC unroll 4
    for (int step = 1; step < lanes; step *= 2) {
        vec next[lanes];
#pragma GCC unroll 8
        for (int i = 0; i < n_half; ++i) {
            [&]<int... j>(std::integer_sequence<int, j...>) {
                const vec a = rows[i], b = rows[i + n_half];
                next[2 * i] = __builtin_shufflevector(a, b, (j / 2 + j % 2 * lanes)...);
                next[2 * i + 1] =
                    __builtin_shufflevector(a, b, (n_half + j / 2 + j % 2 * lanes)...);
            }(std::make_integer_sequence<int, lanes>{});
        }
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) rows[i] = next[i];
    }
}

// The cells of a tile by dimension: to[i * attend_tile + c].
template <class cell_type>
void lay_out(const key_rows& cells, int n_cells, float* to) {
    const auto at = [&](int c) {
        return cells.data +
               static_cast<std::size_t>(std::min(c, n_cells - 1)) * cells.cell_stride_bytes;
    };
    int i = 0;
    for (; i + lanes <= cells.n_embd; i += lanes) {
        for (int c = 0; c < n_cells; c += lanes) {
            vec square[lanes];
#pragma GCC unroll 16
            for (int j = 0; j < lanes; ++j)
                square[j] = cell_type::template get<0>(at(c + j) + i / lanes * cell_type::bytes);
            transpose(square);
#pragma GCC unroll 16
            for (int j = 0; j < lanes; ++j) store(to + (i + j) * attend_tile + c, square[j]);
        }
    }
    for (; i < cells.n_embd; ++i)
        for (int c = 0; c < n_cells; ++c) to[i * attend_tile + c] = cell_type::one(at(c), i);
}

float_rows laid_out(const key_rows& keys, int n_cells, row_scratch& scratch) {
    const auto n_floats = static_cast<std::size_t>(keys.n_embd) * attend_tile;
    if (scratch.cells.size() < n_floats) scratch.cells.resize(n_floats);
    float* const to = scratch.cells.data();
    if (keys.type == GGML_TYPE_F16) {
        lay_out<f16_cells>(keys, n_cells, to);
    } else if (keys.type == GGML_TYPE_BF16) {
        lay_out<bf16_cells>(keys, n_cells, to);
    } else {
        lay_out<f32_cells>(as_floats(keys, n_cells, scratch.keys), n_cells, to);
    }
    return {to, attend_tile, attend_tile};
}

// Whether cells become floats as they are loaded, for these heads; else they are converted once for
// all of them. What takes longer than a load is done once where each cell is read several times.
bool is_read_directly(ggml_type type, int n_heads) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_BF16: return true;
        case GGML_TYPE_F16: return converts_f16 && n_heads <= 4 * max_heads_at_once;
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0: return n_heads <= max_heads_at_once;
        default: return false;
    }
}

// Whether the query sees none of a tile's cells, as of most that it does not see whole: read as
// words.
bool hides_all(const void* data, ggml_type type, int n_cells) {
    constexpr std::uint64_t wanted = 0xFC00FC00FC00FC00;  // -inf
    constexpr int n_of_word = sizeof wanted / 2;
    if (!data || type != GGML_TYPE_F16 || n_cells % n_of_word != 0) return false;
    std::uint64_t differs = 0;
    for (int c = 0; c < n_cells; c += n_of_word) {
        std::uint64_t word;
        std::memcpy(&word, static_cast<const std::byte*>(data) + 2 * c, sizeof word);
        differs |= word ^ wanted;
    }
    return differs == 0;
}

// A row's values where the query sees nothing.
void keep_unseen(const attended_head& head) {
    if (!head.row) return;
    std::fill_n(head.row, head.n_row, unseen_value(head.kind));
    if (head.kind == row_kind::probs) *head.row_max = minus_infinity;
}

}  // namespace

int most_attended_queries() { return lanes >= 8 ? std::numeric_limits<int>::max() : 63; }

tile_mask read_tile_mask(const void* data, ggml_type type, int n_cells) {
    if (hides_all(data, type, n_cells)) return {{data, type, true}, 0};
    tile_mask mask{read_mask(data, type, n_cells), n_cells};
    if (!mask.row.hides_columns) return mask;
    float row[attend_tile] = {};
    hide_masked(row, n_cells, mask.row);
    while (mask.n_seen > 0 && row[mask.n_seen - 1] == minus_infinity) --mask.n_seen;
    return mask;
}

namespace {

// `attend` for many heads: the tile's keys are laid out once, so that no sum has to be put together
// from lanes, and its values are floats once.
void attend_blocks(const cell_tile& tile, float scale, float softcap, attended_head* heads,
                   int n_heads, row_scratch& scratch) {
    alignas(sizeof(vec)) float weights[heads_of_block][attend_tile];
    float_rows keys{}, values{};
    int n_fetched = 0;
    for (int i = 0; i < n_heads;) {
        attended_head* now[heads_of_block];
        const float *q[heads_of_block], *factors[heads_of_block];
        float *out[heads_of_block], *acc[heads_of_block];
        int n = 0, n_seen = 0;
        for (; i < n_heads && n < heads_of_block; ++i) {
            auto& head = heads[i];
            if (head.mask->n_seen == 0) {
                keep_unseen(head);
                continue;
            }
            now[n] = &head, q[n] = head.q, factors[n] = out[n] = weights[n], acc[n] = head.values;
            n_seen = std::clamp(head.mask->n_seen, n_seen, tile.n_cells);
            ++n;
        }
        if (n == 0) continue;
        if (!keys.data) {
            keys = laid_out(tile.keys, tile.n_cells, scratch);
            const auto cells = as_floats(tile.values, tile.n_cells, scratch.values);
            values = {reinterpret_cast<const float*>(cells.data),
                      cells.cell_stride_bytes / sizeof(float), cells.n_embd};
        }
        for (; n_fetched < attend_tile * i / n_heads; ++n_fetched) {
            tile.next_keys.fetch(n_fetched);
            tile.next_values.fetch(n_fetched);
        }
        keys.n_columns = (n_seen + lanes - 1) / lanes * lanes;
        multiply_block<false>(q, n, keys, tile.keys.n_embd, out);
        float scales[heads_of_block], kept[kept_floats];
        for (int h = 0; h < n; ++h)
            scales[h] = score_tile(*now[h], weights[h], n_seen, scale, softcap);
        weigh_block(now, weights, scales, n, kept);
        for (int h = 0; h < n; ++h) keep_probs(*now[h], weights[h]);
        multiply_block<true>(factors, n, values, n_seen, acc, kept);
    }
}

}  // namespace

void attend(const cell_tile& tile, float scale, float softcap, attended_head* heads, int n_heads,
            row_scratch& scratch) {
    if (n_heads >= least_heads_of_blocks)
        return attend_blocks(tile, scale, softcap, heads, n_heads, scratch);
    alignas(sizeof(vec)) float weights[max_heads_at_once][attend_tile];
    next_cells next_keys = tile.next_keys, next_values = tile.next_values;
    key_rows keys = tile.keys, values = tile.values;
    bool is_read = false;
    for (int i = 0; i < n_heads;) {
        attended_head* now[max_heads_at_once];
        const float* q[max_heads_at_once];
        float* out[max_heads_at_once];
        float* acc[max_heads_at_once];
        int n = 0;
        for (; i < n_heads && n < max_heads_at_once; ++i) {
            auto& head = heads[i];
            if (head.mask->n_seen == 0) {
                keep_unseen(head);
                continue;
            }
            now[n] = &head, q[n] = head.q, out[n] = weights[n], acc[n] = head.values;
            ++n;
        }
        if (n == 0) continue;
        if (!is_read) {
            is_read = true;
            // For few heads dot_rows converts keys in pieces that stay in the first-level cache.
            if (n_heads > max_heads_at_once && !is_read_directly(keys.type, n_heads))
                keys = as_floats(keys, tile.n_cells, scratch.keys);
            if (!is_read_directly(values.type, n_heads))
                values = as_floats(values, tile.n_cells, scratch.values);
        }
        dot_rows(keys, q, n, tile.n_cells, out, scratch, next_keys);
        for (int h = 0; h < n; ++h)
            take_tile(*now[h], weights[h], tile.n_cells, values.n_embd, scale, softcap);
        add_values(values, out, n, tile.n_cells, acc, next_values);
        next_keys = next_values = {};
    }
}

void attend_scalar(const cell_tile& tile, float scale, float softcap, attended_head* heads,
                   int n_heads) {
    const auto cell_of = [](const key_rows& cells, int c) {
        std::vector<float> cell(static_cast<std::size_t>(cells.n_embd));
        const auto* const from = cells.data + static_cast<std::size_t>(c) * cells.cell_stride_bytes;
        if (cells.type == GGML_TYPE_F32) {
            std::memcpy(cell.data(), from, cell.size() * sizeof(float));
        } else {
            ggml_get_type_traits(cells.type)->to_float(from, cell.data(), cells.n_embd);
        }
        return cell;
    };
    for (int h = 0; h < n_heads; ++h) {
        auto& head = heads[h];
        if (head.mask->n_seen == 0) {
            keep_unseen(head);
            continue;
        }
        std::vector<float> scores(attend_tile, minus_infinity);
        for (int c = 0; c < tile.n_cells; ++c) {
            const auto key = cell_of(tile.keys, c);
            float sum = 0.0f;
            for (std::size_t i = 0; i < key.size(); ++i) sum += key[i] * head.q[i];
            scores[static_cast<std::size_t>(c)] = sum;
        }
        take_tile(head, scores.data(), tile.n_cells, tile.values.n_embd, scale, softcap);
        for (int c = 0; c < tile.n_cells; ++c) {
            const auto value = cell_of(tile.values, c);
            for (std::size_t i = 0; i < value.size(); ++i)
                head.values[i] += scores[static_cast<std::size_t>(c)] * value[i];
        }
    }
}

softmax_sum join_partials(const float* partials, int n_runs, int n_values, float sink, float* to) {
    const auto n = static_cast<std::size_t>(n_values);
    float max = sink;
    for (std::size_t i = 0; i < static_cast<std::size_t>(n_runs); ++i)
        max = std::max(max, partials[i * (n + 2)]);
    float sum = sink == minus_infinity ? 0.0f : std::exp(sink - max);
    std::fill_n(to, n, 0.0f);
    for (const auto* run = partials; n_runs > 0; --n_runs, run += n + 2) {
        if (run[1] == 0.0f) continue;
        const float factor = std::exp(run[0] - max);
        sum += run[1] * factor;
        for (std::size_t i = 0; i < n; ++i) to[i] += factor * run[2 + i];
    }
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    for (std::size_t i = 0; i < n; ++i) to[i] *= inverse;
    return {max, sum};
}

void end_rows() { end_streaming(); }

namespace {

// What makes weights relative to `row_max` probabilities.
float factor_of(float row_max, const softmax_sum& all) {
    const bool is_seen = all.sum > 0.0f && row_max != minus_infinity;
    return is_seen ? std::exp(row_max - all.max) / all.sum : 0.0f;
}

}  // namespace

void finish_pieces(const float* sums, std::span<const cut_ranges::piece> pieces,
                   const float* row_max, const softmax_sum& all, std::span<double> segments) {
    std::ranges::fill(segments, 0.0);
    // Most tiles share one: a head's largest score seldom grows after the first of them.
    float max = minus_infinity, factor = 0.0f;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        const float max_now = row_max[pieces[i].tile];
        if (max_now != max) factor = factor_of(max = max_now, all);
        segments[pieces[i].segment] += static_cast<double>(sums[i] * factor);
    }
}

void finish_probs(const float* row, int n_columns, const float* row_max, const softmax_sum& all,
                  float* to) {
    for (int first = 0; first < n_columns; first += attend_tile, ++row_max) {
        const float factor = factor_of(*row_max, all);
        const int n = std::min(attend_tile, n_columns - first);
        float probs[attend_tile];
        for (int c = 0; c < n; ++c) probs[c] = row[first + c] * factor;
        if (to == row)
            std::copy_n(probs, n, to + first);
        else
            stream(to + first, probs, n);
    }
    if (to != row) end_streaming();
}

}  // namespace kqview
