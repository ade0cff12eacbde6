#include "tap/host/attend_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/vector_exp.h"
#include "tap/host/quantised_cells.h"
#include "tap/host/vectors.h"

namespace kqview {

namespace {

using namespace vectors;

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

static_assert(attend_tile % lanes == 0);

// ---- the cells that are read next

// Fetched row by row while a tile is worked on: all at once would fill the queue of outstanding
// misses and wait for it.
class ahead {
public:
    ahead() = default;
    ahead(const next_cells& cells, const key_rows& like)
        : cells_(cells), row_bytes_(cells.data ? ggml_row_size(like.type, like.n_embd) : 0) {}

    void fetch(int cell) const {
        const auto* const row = cells_.data + static_cast<std::size_t>(cell) * cells_.stride_bytes;
        for (std::size_t i = 0; i < row_bytes_; i += cache_line) __builtin_prefetch(row + i, 0, 2);
    }

private:
    static constexpr std::size_t cache_line = 64;
    next_cells cells_;
    std::size_t row_bytes_ = 0;
};

// ---- cells as floats

template <class cell_type>
void widen(const key_rows& cells, int n_cells, float* to) {
    const auto* from = cells.data;
    for (int c = 0; c < n_cells; ++c, from += cells.cell_stride_bytes, to += cells.n_embd) {
        int i = 0;
        for (; i + lanes <= cells.n_embd; i += lanes)
            store(to + i, cell_type::get(from + i * cell_type::bytes));
        for (; i < cells.n_embd; ++i) to[i] = cell_type::one(from + i * cell_type::bytes);
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

// ---- keys

// Heads whose products share a vector: a lane is (head, one of four dimensions), so that four
// dimensions of a key serve all of them, and only four lanes are left to add up at the end.
constexpr int heads_per_vec = lanes / 4;

template <int... i>
vec low_pairs(vec a, vec b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (i / 4 * 4 + i % 4 / 2 + i % 2 * lanes)...);
}
template <int... i>
vec high_pairs(vec a, vec b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (i / 4 * 4 + 2 + i % 4 / 2 + i % 2 * lanes)...);
}
template <int... i>
vec low_halves(vec a, vec b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (i / 4 * 4 + i % 2 + i % 4 / 2 * lanes)...);
}
template <int... i>
vec high_halves(vec a, vec b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (i / 4 * 4 + 2 + i % 2 + i % 4 / 2 * lanes)...);
}

// Sums of each group of four lanes: of cell j's in lane j of the group.
vec sum_quads(const vec* cells) {
    constexpr auto all = std::make_integer_sequence<int, lanes>{};
    const vec a = low_pairs(cells[0], cells[1], all) + high_pairs(cells[0], cells[1], all);
    const vec b = low_pairs(cells[2], cells[3], all) + high_pairs(cells[2], cells[3], all);
    return low_halves(a, b, all) + high_halves(a, b, all);
}

// sums[c] += products of 4 * n_quads dimensions, whose queries stay in registers.
template <int n_quads>
void add_products(const float* keys, std::size_t stride, const float* const* q, int first_dim,
                  int n_cells, vec* sums, const ahead& next) {
    vec queries[n_quads];
    for (int i = 0; i < n_quads; ++i) {
        float part[lanes];
        for (int h = 0; h < heads_per_vec; ++h)
            std::memcpy(part + 4 * h, q[h] + first_dim + 4 * i, 4 * sizeof(float));
        queries[i] = load(part);
    }
    for (int c = 0; c < n_cells; c += 4) {
        const float* const cell = keys + static_cast<std::size_t>(c) * stride + first_dim;
        if (first_dim == 0)
            for (int j = 0; j < 4; ++j) next.fetch(c + j);
        vec s[4];
        for (int j = 0; j < 4; ++j) s[j] = first_dim ? sums[c + j] : vec{};
#pragma GCC unroll 16
        for (int i = 0; i < n_quads; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j)
                s[j] +=
                    repeat_quad(cell + static_cast<std::size_t>(j) * stride + 4 * i) * queries[i];
        }
        for (int j = 0; j < 4; ++j) sums[c + j] = s[j];
    }
}

// `heads_per_vec` heads against a tile of floats; n_cells and the head size are multiples of 4.
void dot_quads(const key_rows& keys, const float* const* q, int n_cells, float* const* out,
               const ahead& next) {
    constexpr int most_quads = n_registers / 2;
    alignas(sizeof(vec)) vec sums[attend_tile];
    const auto* const data = reinterpret_cast<const float*>(keys.data);
    const auto stride = keys.cell_stride_bytes / sizeof(float);
    int dim = 0;
    const auto run = [&]<int n_quads>() {
        for (; dim + 4 * n_quads <= keys.n_embd; dim += 4 * n_quads)
            add_products<n_quads>(data, stride, q, dim, n_cells, sums, next);
    };
    run.template operator()<most_quads>();
    run.template operator()<4>();
    run.template operator()<1>();
    for (int c = 0; c < n_cells; c += 4) {
        float flat[lanes];
        store(flat, sum_quads(sums + c));
        for (int h = 0; h < heads_per_vec; ++h)
            std::memcpy(out[h] + c, flat + 4 * h, 4 * sizeof(float));
    }
}

// out[h][c] of up to max_heads_at_once heads; out has room for attend_tile values.
void dot_tile(const key_rows& keys, const float* const* q, int n_heads, int n_cells,
              float* const* out, const ahead& next, row_scratch& scratch) {
    const int n_padded = (n_cells + 3) / 4 * 4;
    const bool has_quads = keys.n_embd % 4 == 0 && n_padded <= keys.n_cells;
    int h = 0;
    bool is_fetched = false;
    while (has_quads && 2 * (n_heads - h) > heads_per_vec) {
        // The last vector may be more than half full: its other heads are repeated.
        const float* queries[heads_per_vec];
        float* to[heads_per_vec];
        alignas(sizeof(vec)) float unused[attend_tile];
        for (int i = 0; i < heads_per_vec; ++i) {
            const bool is_used = h + i < n_heads;
            queries[i] = is_used ? q[h + i] : q[h];
            to[i] = is_used ? out[h + i] : unused;
        }
        dot_quads(keys, queries, n_padded, to, is_fetched ? ahead{} : next);
        is_fetched = true;
        h = std::min(h + heads_per_vec, n_heads);
    }
    if (h == n_heads) return;
    if (!is_fetched)
        for (int c = 0; c < n_cells; ++c) next.fetch(c);
    dot_rows(keys, q + h, n_heads - h, n_cells, out + h, scratch);
}

// ---- softmax

// Turns a tile of scores, padded with -inf, into weights relative to the head's largest score.
// Returns by how much what the head has found so far shrinks.
float weigh(float* scores, attended_head& head) {
    vec most = load(scores);
    for (int i = lanes; i < attend_tile; i += lanes) {
        const vec x = load(scores + i);
        most = x > most ? x : most;
    }
    float tile_max = most[0];
    for (int i = 1; i < lanes; ++i) tile_max = std::max(tile_max, most[i]);
    float factor = 1.0f;
    if (tile_max > head.max) {
        factor = std::exp(head.max - tile_max);  // 0 at first
        head.sum *= factor;
        head.max = tile_max;
    }
    if (head.max == minus_infinity) {
        std::fill_n(scores, attend_tile, 0.0f);
        return factor;
    }
    vec sums{};
    for (int i = 0; i < attend_tile; i += lanes) {
        const vec x = load(scores + i);
        const vec weight = x == minus_infinity ? vec{} : exp_nonpositive(x - head.max);
        store(scores + i, weight);
        sums += weight;
    }
    for (int i = 0; i < lanes; ++i) head.sum += sums[i];
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

// A tile of products becomes weights; the row takes what it wants on the way.
void take_tile(attended_head& head, float* tile, int n_cells, int n_value, float scale,
               float softcap) {
    const auto& mask = head.mask->row;
    std::fill(tile + n_cells, tile + attend_tile, minus_infinity);
    if (head.kind == row_kind::logits) keep_logits(head, tile);
    logits_to_scores(tile, n_cells, {scale, softcap, head.slope}, mask);
    if (head.kind == row_kind::scores) keep_row(head, tile);
    const float factor = weigh(tile, head);
    if (factor != 1.0f)
        for (int i = 0; i < n_value; ++i) head.values[i] *= factor;
    if (head.kind == row_kind::probs && head.row) {
        keep_row(head, tile);
        *head.row_max = head.max;
    }
}

// ---- values

// acc[h] += weights[h] * cells, for n_vecs vectors of dimensions.
template <int n_heads, int n_vecs, class cell_type>
void add_block(const std::byte* cells, std::size_t stride, const float* const* weights, int n_cells,
               float* const* acc, const ahead& next) {
    vec sums[n_heads][n_vecs];
    for (int h = 0; h < n_heads; ++h)
        for (int i = 0; i < n_vecs; ++i) sums[h][i] = load(acc[h] + i * lanes);
    for (int c = 0; c < n_cells; ++c, cells += stride) {
        next.fetch(c);
        vec value[n_vecs];
        for (int i = 0; i < n_vecs; ++i)
            value[i] = cell_type::get(cells + i * lanes * cell_type::bytes);
        for (int h = 0; h < n_heads; ++h) {
            const vec weight = vec{} + weights[h][c];
            for (int i = 0; i < n_vecs; ++i) sums[h][i] += weight * value[i];
        }
    }
    for (int h = 0; h < n_heads; ++h)
        for (int i = 0; i < n_vecs; ++i) store(acc[h] + i * lanes, sums[h][i]);
}

template <int n_heads, class cell_type>
void add_values_of(const key_rows& values, const float* const* weights, int n_cells,
                   float* const* acc, const ahead& next) {
    constexpr int most_vecs = n_registers / 2 / n_heads;
    const auto stride = values.cell_stride_bytes;
    int dim = 0;
    const auto run = [&]<int n_vecs>() {
        for (; dim + n_vecs * lanes <= values.n_embd; dim += n_vecs * lanes) {
            float* at[n_heads];
            for (int h = 0; h < n_heads; ++h) at[h] = acc[h] + dim;
            add_block<n_heads, n_vecs, cell_type>(values.data + dim * cell_type::bytes, stride,
                                                  weights, n_cells, at, dim ? ahead{} : next);
        }
    };
    if constexpr (most_vecs >= 4) run.template operator()<4>();
    if constexpr (most_vecs >= 2) run.template operator()<2>();
    run.template operator()<1>();
    for (; dim < values.n_embd; ++dim) {  // head sizes that are no multiple of the vector width
        const auto* const from = values.data + dim * cell_type::bytes;
        for (int h = 0; h < n_heads; ++h)
            for (int c = 0; c < n_cells; ++c)
                acc[h][dim] +=
                    weights[h][c] * cell_type::one(from + static_cast<std::size_t>(c) * stride);
    }
}

template <class cell_type>
void add_values_as(const key_rows& values, const float* const* weights, int n_heads, int n_cells,
                   float* const* acc, const ahead& next) {
    static_assert(max_heads_at_once == 4);
    if (n_heads == 4) return add_values_of<4, cell_type>(values, weights, n_cells, acc, next);
    if (n_heads >= 2) {
        add_values_of<2, cell_type>(values, weights, n_cells, acc, next);
        weights += 2, acc += 2, n_heads -= 2;
    }
    if (n_heads == 1) add_values_of<1, cell_type>(values, weights, n_cells, acc, next);
}

void add_values(const key_rows& values, const float* const* weights, int n_heads, int n_cells,
                float* const* acc, const ahead& next) {
    switch (values.type) {
        case GGML_TYPE_F16:
            return add_values_as<f16_cells>(values, weights, n_heads, n_cells, acc, next);
        case GGML_TYPE_BF16:
            return add_values_as<bf16_cells>(values, weights, n_heads, n_cells, acc, next);
        default: return add_values_as<f32_cells>(values, weights, n_heads, n_cells, acc, next);
    }
}

bool is_read_directly(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

// A row's values where the query sees nothing.
void keep_unseen(const attended_head& head) {
    if (!head.row) return;
    std::fill_n(head.row, head.n_row, unseen_value(head.kind));
    if (head.kind == row_kind::probs) *head.row_max = minus_infinity;
}

}  // namespace

tile_mask read_tile_mask(const void* data, ggml_type type, int n_cells) {
    tile_mask mask{read_mask(data, type, n_cells)};
    if (!mask.row.hides_columns) return mask;
    float row[attend_tile] = {};
    hide_masked(row, n_cells, mask.row);
    mask.hides_all = std::all_of(row, row + n_cells, [](float x) { return x == minus_infinity; });
    return mask;
}

void attend(const cell_tile& tile, float scale, float softcap, attended_head* heads, int n_heads,
            row_scratch& scratch) {
    alignas(sizeof(vec)) float weights[max_heads_at_once][attend_tile];
    ahead next_keys(tile.next_keys, tile.keys), next_values(tile.next_values, tile.values);
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
            if (head.mask->hides_all) {
                keep_unseen(head);
                continue;
            }
            now[n] = &head, q[n] = head.q, out[n] = weights[n], acc[n] = head.values;
            ++n;
        }
        if (n == 0) continue;
        if (!is_read) {
            is_read = true;
            keys = as_floats(keys, tile.n_cells, scratch.keys);
            // Several heads share the work of turning values into floats.
            if (n_heads > max_heads_at_once || !is_read_directly(values.type))
                values = as_floats(values, tile.n_cells, scratch.values);
        }
        dot_tile(keys, q, n, tile.n_cells, out, next_keys, scratch);
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
        if (head.mask->hides_all) {
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

void finish_probs(const float* row, int n_columns, const float* row_max, const softmax_sum& all,
                  float* to) {
    for (int first = 0; first < n_columns; first += attend_tile, ++row_max) {
        const bool is_seen = all.sum > 0.0f && *row_max != minus_infinity;
        const float factor = is_seen ? std::exp(*row_max - all.max) / all.sum : 0.0f;
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
