#include "tap/device/cuda/rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace kqview::cuda {

namespace {

// ---- types of keys, numbered as ggml's

enum key_type {
    key_f32 = 0,
    key_f16 = 1,
    key_q4_0 = 2,
    key_q4_1 = 3,
    key_q5_0 = 6,
    key_q5_1 = 7,
    key_q8_0 = 8,
    key_iq4_nl = 20,
    key_bf16 = 30,
};

constexpr int chunk = 32;  // dimensions that a warp reads at once: 8 for each of 4 threads
constexpr int n_warps = 4;
constexpr int n_columns_of_mma = 8;  // heads
constexpr int pad = 4;               // floats, against bank conflicts

// How many 16-bit parts a key and a query are split into so that the product is exact to about
// 2^-22, and the pairs of parts that count.
template <int type>
struct parts_of {  // quantised keys are exact as halves, but for their scale
    static constexpr int n_key = 1, n_query = 2, n_chunks = 4;
};
template <>
struct parts_of<key_bf16> {
    static constexpr int n_key = 1, n_query = 3, n_chunks = 4;
};
template <>
struct parts_of<key_f32> {
    static constexpr int n_key = 3, n_query = 3, n_chunks = 2;
};
template <int type>
constexpr bool is_bf16 = type == key_bf16 || type == key_f32;
constexpr int key_quantised = -1;  // any: the type is known at run time

// Chunks of a head, with room for the last group.
template <int type>
constexpr __host__ __device__ int n_chunks_of(int n_dim) {
    constexpr int n = parts_of<type>::n_chunks;
    return (n_dim + chunk * n - 1) / (chunk * n) * n;
}

struct tables {
    const row_layer* layers;
    const row_item* items;
    const std::int32_t* numbers;
    const row_job* jobs;  // of one form
    const std::byte* saved;
    std::byte* memory;
    row_form form;
    std::int32_t type;
    bool needs_values;  // of the form
};

__device__ float* values_of(const tables& all, const row_job& job) {
    return reinterpret_cast<float*>(all.memory + job.values);
}
__device__ float2* parts_of_rows(const tables& all, const row_job& job) {
    return reinterpret_cast<float2*>(all.memory + job.parts);
}
__device__ float2* joined_of(const tables& all, const row_job& job) {
    return reinterpret_cast<float2*>(all.memory + job.joined);
}
__device__ float* reduced_of(const tables& all, const row_job& job) {
    return reinterpret_cast<float*>(all.memory + job.reduced);
}
__device__ std::byte* out_of(const tables& all, const row_job& job) {
    return job.block_out ? job.block_out : all.memory + job.out;
}

// Saturated: beyond +-65504 a float16 would be infinite, and -inf means masked.
__device__ __half half_of(float x) {
    constexpr float largest = 65504.0f;
    if (x < -largest && x != -INFINITY) x = -largest;
    return __float2half_rn(x > largest ? largest : x);
}
__device__ void store(std::byte* out, std::size_t i, float x, int is_half) {
    if (is_half) {
        reinterpret_cast<__half*>(out)[i] = half_of(x);
    } else {
        reinterpret_cast<float*>(out)[i] = x;
    }
}

__device__ std::uint32_t bits(__half2 x) { return *reinterpret_cast<std::uint32_t*>(&x); }
__device__ std::uint32_t bits(__nv_bfloat162 x) { return *reinterpret_cast<std::uint32_t*>(&x); }

// ---- keys in registers

// 8 dimensions of a key, as pairs of 16-bit values; of a quantised one with what these are
// multiplied with, and what is added.
template <int n_parts>
struct fragment {
    uint4 part[n_parts];
};
struct block_scale {
    float scale, least;
};

// Dimensions of a chunk that thread t of four holds, in the order in which loads bring them.
__device__ int dim_of(int type, int t, int i) {
    const bool is_nibbles = type == key_q4_0 || type == key_q4_1 || type == key_q5_0 ||
                            type == key_q5_1 || type == key_iq4_nl;
    return is_nibbles ? (i < 4 ? t * 4 + i : 12 + t * 4 + i) : t * 8 + i;
}

template <int n_parts>
__device__ void split(float x, float y, std::uint32_t (&to)[n_parts]) {
#pragma unroll
    for (int i = 0; i < n_parts; ++i) {
        const __nv_bfloat162 here = __floats2bfloat162_rn(x, y);
        to[i] = bits(here);
        x -= __low2float(here);
        y -= __high2float(here);
    }
}

template <int type>
__device__ void load(fragment<parts_of<type>::n_key>& to, block_scale&, const std::byte* cell,
                     int c, int t, int n_dim, int) {
    const int first = c * chunk + t * 8;
    if constexpr (type == key_f32) {
        float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
        if (first < n_dim) {
            const auto* const from = reinterpret_cast<const float4*>(cell) + first / 4;
            a = __ldcs(from), b = __ldcs(from + 1);
        }
        std::uint32_t pairs[4][3];
        split(a.x, a.y, pairs[0]), split(a.z, a.w, pairs[1]);
        split(b.x, b.y, pairs[2]), split(b.z, b.w, pairs[3]);
#pragma unroll
        for (int i = 0; i < 3; ++i)
            to.part[i] = make_uint4(pairs[0][i], pairs[1][i], pairs[2][i], pairs[3][i]);
    } else {
        to.part[0] = first < n_dim ? __ldcs(reinterpret_cast<const uint4*>(cell) + first / 8)
                                   : make_uint4(0, 0, 0, 0);
    }
}

__constant__ std::int8_t iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                              1,    13,   25,  38,  53,  69,  89,  113};

__device__ float half_at(const std::byte* from) {
    return __half2float(*reinterpret_cast<const __half*>(from));
}
// Blocks of quantised keys are aligned to two bytes.
__device__ std::uint32_t word_at(const std::byte* from) {
    const auto* const two = reinterpret_cast<const std::uint16_t*>(from);
    return two[0] | std::uint32_t{two[1]} << 16;
}
__device__ int signed_byte(std::uint32_t word, int i) {
    return static_cast<std::int8_t>(word >> (8 * i));
}

template <>
__device__ void load<key_quantised>(fragment<1>& to, block_scale& scale, const std::byte* cell,
                                    int c, int t, int n_dim, int type) {
    int values[8] = {};
    scale = {0.f, 0.f};
    if (c * chunk < n_dim) {
        if (type == key_q8_0) {
            const auto* const block = cell + c * 34;
            const auto low = word_at(block + 2 + t * 8), high = word_at(block + 6 + t * 8);
            scale.scale = half_at(block);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                values[i] = signed_byte(low, i), values[4 + i] = signed_byte(high, i);
        } else {
            const bool has_least = type == key_q4_1 || type == key_q5_1;
            const bool has_fifth = type == key_q5_0 || type == key_q5_1;
            const int header = has_least ? 4 : 2, n_bytes = header + (has_fifth ? 4 : 0) + 16;
            const auto* const block = cell + c * n_bytes;
            const auto nibbles = word_at(block + n_bytes - 16 + t * 4);
            const auto fifth = has_fifth ? word_at(block + header) : 0u;
            scale.scale = half_at(block);
            if (has_least) scale.least = half_at(block + 2);
            const int offset = type == key_q4_0 ? 8 : type == key_q5_0 ? 16 : 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                int v = nibbles >> (i < 4 ? 8 * i : 8 * (i - 4) + 4) & 15;
                if (type == key_iq4_nl) v = iq4_nl_values[v];
                v |= (fifth >> dim_of(type, t, i) & 1) << 4;
                values[i] = v - offset;
            }
        }
    }
    const auto pair = [&](int i) {
        return bits(__halves2half2(__int2half_rn(values[i]), __int2half_rn(values[i + 1])));
    };
    to.part[0] = make_uint4(pair(0), pair(2), pair(4), pair(6));
}

template <int type>
__device__ void mma(float (&sum)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                    std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (is_bf16<type>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
#endif
}

// 16 cells (upper: rows g, lower: rows g + 8) times 8 heads: the smallest products first.
template <int type>
__device__ void multiply(float (&sum)[4], const fragment<parts_of<type>::n_key>& upper,
                         const fragment<parts_of<type>::n_key>& lower, const uint4* query,
                         int stride) {
    constexpr int n_key = parts_of<type>::n_key, n_query = parts_of<type>::n_query;
#pragma unroll
    for (int order = n_query - 1; order >= 0; --order) {
#pragma unroll
        for (int k = 0; k < n_key; ++k) {
            const int q = order - k;
            if (q < 0 || q >= n_query) continue;
            const uint4 b = query[q * stride];
            const uint4 u = upper.part[k], l = lower.part[k];
            mma<type>(sum, u.x, l.x, u.y, l.y, b.x, b.y);
            mma<type>(sum, u.z, l.z, u.w, l.w, b.z, b.w);
        }
    }
}

// ---- K·q

// As llama.cpp defines it, of the model's max_bias (ALiBi): a power of a float32 base. In double,
// because powers of many heads add up what a fast exponential is off by.
__device__ float alibi_slope(const row_layer& layer, int head) {
    if (layer.max_bias <= 0.f) return 1.f;
    const int n = 1 << (31 - __clz(layer.n_head));
    const double bias = head < n ? layer.max_bias : layer.max_bias / 2.f;
    const double base = static_cast<float>(exp2(-bias / n));
    return static_cast<float>(pow(base, head < n ? head + 1 : 2 * (head - n) + 1));
}

// A block has row_tile cells and all heads of an item; grid (tiles, items, jobs).
// Shared memory: queries, then their sums over chunks if keys are quantised, then the tile.
template <int type, int n_blocks>
__global__ void __launch_bounds__(n_warps * 32) rows_of_keys(const tables all) {
    constexpr int n_key = parts_of<type>::n_key, n_query = parts_of<type>::n_query;
    constexpr int n_at_once = parts_of<type>::n_chunks, n_heads_most = n_blocks * n_columns_of_mma;
    extern __shared__ uint4 shared[];
    const row_job& job = all.jobs[blockIdx.z];
    const int first = blockIdx.x * row_tile;
    if (static_cast<int>(blockIdx.y) >= job.n_items || first >= job.n_columns) return;
    const row_item item = all.items[job.first_item + blockIdx.y];
    const row_layer& layer = all.layers[item.layer];
    const int n_dim = layer.n_dim, n_chunks = n_chunks_of<type>(n_dim);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int key_type_here = type == key_quantised ? all.type : type;
    const int part_stride = n_blocks * n_chunks * 32;
    auto* const query_sums = reinterpret_cast<float*>(shared + n_query * part_stride);
    auto* const tile = query_sums + (type == key_quantised ? n_chunks * n_heads_most : 0);
    constexpr int tile_stride = row_tile + pad;

    // Queries as parts, in the order in which a warp reads them; heads that are missing are zero.
    // Halves have few exponents: each query is brought near 1 by a power of two, which its sums are
    // divided by.
    __shared__ float factors[n_heads_most];
    const auto* const queries = all.saved + layer.query + job.stream * layer.query_stream_stride;
    const auto query_of = [&](int head) {
        return reinterpret_cast<const float*>(queries +
                                              (item.first_head + head) * layer.query_head_stride);
    };
    if constexpr (!is_bf16<type>) {
        for (int head = warp; head < n_heads_most; head += n_warps) {
            float most = 0.f;
            if (head < item.n_heads)
                for (int d = lane; d < n_dim; d += 32) most = fmaxf(most, fabsf(query_of(head)[d]));
            for (int s = 16; s; s /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, s));
            const bool has_size = most > 1e-30f && most < 1e30f;
            if (lane == 0) factors[head] = has_size ? exp2f(-floorf(log2f(most))) : 1.f;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < part_stride; i += n_warps * 32) {
        const int l = i % 32, c = i / 32 % n_chunks, b = i / 32 / n_chunks;
        const int head = b * n_columns_of_mma + l / 4;
        const float* const own = query_of(head);
        const float factor = is_bf16<type> ? 1.f : factors[head];
        std::uint32_t pairs[4][n_query];
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int d = c * chunk + dim_of(key_type_here, l % 4, 2 * j);
            float x = head < item.n_heads && d < n_dim ? own[d] * factor : 0.f;
            float y = head < item.n_heads && d + 1 < n_dim ? own[d + 1] * factor : 0.f;
            sum += x + y;
            if constexpr (is_bf16<type>) {
                split(x, y, pairs[j]);
            } else {
#pragma unroll
                for (int q = 0; q < n_query; ++q) {
                    const __half2 here = __floats2half2_rn(x, y);
                    pairs[j][q] = bits(here);
                    x -= __low2float(here), y -= __high2float(here);
                }
            }
        }
#pragma unroll
        for (int q = 0; q < n_query; ++q)
            shared[q * part_stride + i] =
                make_uint4(pairs[0][q], pairs[1][q], pairs[2][q], pairs[3][q]);
        if constexpr (type == key_quantised) {
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (l % 4 == 0) query_sums[c * n_heads_most + head] = sum;
        }
    }
    __syncthreads();

    const int kv = item.first_head / (layer.n_head / layer.n_head_kv);
    const auto* const keys =
        layer.keys + kv * layer.key_head_stride + job.stream * layer.key_stream_stride;
    const int n_seen = min(job.n_columns, layer.n_cells);  // cells that the graph has
    constexpr int n_of_warp = row_tile / n_warps;
    for (int m = 0; m < n_of_warp / 16; ++m) {
        const int at = warp * n_of_warp + m * 16, cell = first + at;
        if (cell >= n_seen) break;
        // Cells beyond the row are read from its last one.
        const auto* const above = keys + min(cell + g, n_seen - 1) * layer.key_cell_stride;
        const auto* const below = keys + min(cell + g + 8, n_seen - 1) * layer.key_cell_stride;
        float sum[n_blocks][4] = {};
        for (int c0 = 0; c0 < n_chunks; c0 += n_at_once) {
            fragment<n_key> upper[n_at_once], lower[n_at_once];
            block_scale scale_above[n_at_once], scale_below[n_at_once];
#pragma unroll
            for (int c = 0; c < n_at_once; ++c) {
                load<type>(upper[c], scale_above[c], above, c0 + c, t, n_dim, all.type);
                load<type>(lower[c], scale_below[c], below, c0 + c, t, n_dim, all.type);
            }
#pragma unroll
            for (int c = 0; c < n_at_once; ++c) {
#pragma unroll
                for (int b = 0; b < n_blocks; ++b) {
                    const uint4* const query = shared + (b * n_chunks + c0 + c) * 32 + lane;
                    // Tensor cores cut off what they add: sums over chunks are rounded instead.
                    float of_chunk[4] = {};
                    multiply<type>(of_chunk, upper[c], lower[c], query, part_stride);
                    if constexpr (type == key_quantised) {
                        const float* const sums =
                            query_sums + (c0 + c) * n_heads_most + b * n_columns_of_mma + t * 2;
                        sum[b][0] +=
                            scale_above[c].scale * of_chunk[0] + scale_above[c].least * sums[0];
                        sum[b][1] +=
                            scale_above[c].scale * of_chunk[1] + scale_above[c].least * sums[1];
                        sum[b][2] +=
                            scale_below[c].scale * of_chunk[2] + scale_below[c].least * sums[0];
                        sum[b][3] +=
                            scale_below[c].scale * of_chunk[3] + scale_below[c].least * sums[1];
                    } else {
#pragma unroll
                        for (int i = 0; i < 4; ++i) sum[b][i] += of_chunk[i];
                    }
                }
            }
        }
#pragma unroll
        for (int b = 0; b < n_blocks; ++b) {
            float* const to = tile + (b * n_columns_of_mma + t * 2) * tile_stride + at + g;
            to[0] = sum[b][0], to[8] = sum[b][2];
            to[tile_stride] = sum[b][1], to[tile_stride + 8] = sum[b][3];
        }
    }
    __syncthreads();

    const int n_here = min(row_tile, job.n_columns - first);
    const bool has_mask = layer.mask != row_layer::nothing;
    const auto* const mask = all.saved + layer.mask + job.stream * layer.mask_stream_stride;
    const bool is_last = !all.needs_values;
    for (int head = warp; head < item.n_heads; head += n_warps) {
        const int row = all.numbers[item.rows + head];
        if (row < 0) continue;
        const float slope = alibi_slope(layer, item.first_head + head);
        const float unscaled = is_bf16<type> ? 1.f : 1.f / factors[head];
        float* const own = tile + head * tile_stride;
        const std::size_t begin = static_cast<std::size_t>(row) * job.n_columns + first;
        float most = -INFINITY;
        for (int i = lane; i < n_here; i += 32) {
            float x = own[i] * unscaled, bias = 0.f;
            const int cell = first + i;
            if (cell >= n_seen) {
                bias = -INFINITY;  // not decoded yet: the graph has no cell for it
            } else if (has_mask) {
                bias = layer.mask_is_half
                           ? __half2float(reinterpret_cast<const __half*>(mask)[cell])
                           : reinterpret_cast<const float*>(mask)[cell];
            }
            if (all.form.kind != row_form::logits) {
                x *= layer.scale;
                if (layer.softcap != 0.f) x = layer.softcap * tanhf(x / layer.softcap);
                x += slope * bias;
            }
            if (bias == -INFINITY) x = -INFINITY;
            if (is_last) {
                store(out_of(all, job), begin + i, x, all.form.is_half);
            } else {
                values_of(all, job)[begin + i] = x;
            }
            own[i] = x;
            most = fmaxf(most, x);
        }
        if (all.form.kind != row_form::probs) continue;
        for (int s = 16; s; s /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, s));
        const bool has_sink = layer.sinks && first == 0;  // part of the softmax, of no column
        const float sink = has_sink ? layer.sinks[item.first_head + head] : -INFINITY;
        most = fmaxf(most, sink);
        float sum = 0.f;
        if (most != -INFINITY) {
            for (int i = lane; i < n_here; i += 32) sum += __expf(own[i] - most);
        }
        for (int s = 16; s; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
        if (has_sink && most != -INFINITY) sum += __expf(sink - most);
        if (lane == 0)
            parts_of_rows(all, job)[static_cast<std::size_t>(row) * job.n_tiles + blockIdx.x] =
                make_float2(most, sum);
    }
}

// ---- what follows K·q

// Of each row the largest value and 1 / the sum of exponentials, out of those of its tiles; a warp
// a row, grid (rows / n_warps, jobs).
__global__ void __launch_bounds__(n_warps * 32) join_parts(const tables all) {
    const row_job& job = all.jobs[blockIdx.y];
    const int row = blockIdx.x * n_warps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= job.n_rows) return;
    const float2* const parts =
        parts_of_rows(all, job) + static_cast<std::size_t>(row) * job.n_tiles;
    float most = -INFINITY, sum = 0.f;
    for (int i = lane; i < job.n_tiles; i += 32) most = fmaxf(most, parts[i].x);
    for (int s = 16; s; s /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, s));
    for (int i = lane; i < job.n_tiles; i += 32) {
        if (parts[i].x != -INFINITY) sum += parts[i].y * __expf(parts[i].x - most);
    }
    for (int s = 16; s; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
    // Of a row that sees nothing, all are 0.
    if (lane == 0)
        joined_of(all, job)[row] = sum > 0.f ? make_float2(most, 1.f / sum) : make_float2(0.f, 0.f);
}

// A row as what follows reads it: the softmax is applied as it is read.
struct row_reader {
    const float* values;
    float most, factor;
    bool is_softmax;

    __device__ float operator()(int i) const {
        return is_softmax ? __expf(values[i] - most) * factor : values[i];
    }
};
__device__ row_reader reader_of(const tables& all, const row_job& job, int row) {
    row_reader reader{values_of(all, job) + static_cast<std::size_t>(row) * job.n_columns, 0.f, 1.f,
                      all.form.kind == row_form::probs};
    if (reader.is_softmax) {
        const float2 joined = joined_of(all, job)[row];
        reader.most = joined.x, reader.factor = joined.y;
    }
    return reader;
}
// After a reduction, if there is one.
__device__ row_reader finished_reader(const tables& all, const row_job& job, int row) {
    if (all.form.reduce == row_form::none) return reader_of(all, job, row);
    return {reduced_of(all, job) + static_cast<std::size_t>(row) * job.n_columns, 0.f, 1.f, false};
}
__device__ int n_rows_out(const tables& all, const row_job& job) {
    return all.form.reduce == row_form::none ? job.n_rows : job.n_groups;
}

// Whole rows of probabilities; grid (columns / 1024, rows, jobs).
constexpr int n_threads_of_row = 256;
constexpr int n_each = 4;
__global__ void __launch_bounds__(n_threads_of_row) whole_rows(const tables all) {
    const row_job& job = all.jobs[blockIdx.z];
    const int row = blockIdx.y;
    if (row >= job.n_rows) return;
    const auto read = reader_of(all, job, row);
    std::byte* const out = out_of(all, job);
#pragma unroll
    for (int j = 0; j < n_each; ++j) {
        const int i = (blockIdx.x * n_each + j) * n_threads_of_row + threadIdx.x;
        if (i < job.n_columns)
            store(out, static_cast<std::size_t>(row) * job.n_columns + i, read(i),
                  all.form.is_half);
    }
}

// The mean or maximum of each group's rows; grid (columns / threads, groups, jobs).
constexpr int n_threads_of_group = 128;
__global__ void __launch_bounds__(n_threads_of_group) reduce_rows(const tables all) {
    const row_job& job = all.jobs[blockIdx.z];
    const int group = blockIdx.y, i = blockIdx.x * n_threads_of_group + threadIdx.x;
    if (group >= job.n_groups || i >= job.n_columns) return;
    const int begin = all.numbers[job.first_group + group],
              end = all.numbers[job.first_group + group + 1];
    const bool is_mean = all.form.reduce == row_form::mean;
    float total = is_mean ? 0.f : -INFINITY;
#pragma unroll 8
    for (int row = begin; row < end; ++row) {
        const float x = reader_of(all, job, row)(i);
        total = is_mean ? total + x : fmaxf(total, x);
    }
    if (is_mean) total *= 1.f / static_cast<float>(end - begin);
    const std::size_t at = static_cast<std::size_t>(group) * job.n_columns + i;
    if (all.form.finish == row_form::whole) {
        store(out_of(all, job), at, total, all.form.is_half);
    } else {
        reduced_of(all, job)[at] = total;
    }
}

// Values in the order in which they are handed out, best first: the larger one, then the earlier
// column. No two are equal.
__device__ unsigned long long rank_of(float x, int column) {
    const auto u = __float_as_uint(x + 0.f);  // -0 equals 0
    const auto ordered = u & 0x80000000u ? ~u : u | 0x80000000u;
    return static_cast<unsigned long long>(ordered) << 32 |
           (0xffffffffu - static_cast<unsigned>(column));
}
__device__ float value_of(unsigned long long rank) {
    const auto ordered = static_cast<std::uint32_t>(rank >> 32);
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}
__device__ int column_of(unsigned long long rank) {
    return static_cast<int>(0xffffffffu - static_cast<std::uint32_t>(rank));
}

// Descending; n is a power of two, all threads take part.
__device__ void sort_ranks(unsigned long long* ranks, int n) {
    for (int size = 2; size <= n; size *= 2) {
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += blockDim.x) {
                const int j = i ^ step;
                if (j <= i) continue;
                const bool is_descending = (i & size) == 0;
                const auto a = ranks[i], b = ranks[j];
                if ((a < b) == is_descending) ranks[i] = b, ranks[j] = a;
            }
        }
    }
    __syncthreads();
}

// The k largest values of each row; a block a row, grid (rows, jobs). The k-th largest of what each
// thread has seen as its largest bounds the k-th of all: what is not below it is few, and sorted.
// Where it is not few, as with many equal values or a large k, the k-th is found byte by byte.
constexpr int n_threads_of_top = 256;
__global__ void __launch_bounds__(n_threads_of_top) top_of_rows(const tables all) {
    __shared__ unsigned long long ranks[max_top_k];
    __shared__ int n_found, counts[256], digit;
    const row_job& job = all.jobs[blockIdx.y];
    const int row = blockIdx.x, n = job.n_columns, k = job.n_values;
    if (row >= n_rows_out(all, job)) return;
    const auto read = finished_reader(all, job, row);
    unsigned long long best = 0, bound = 0;
    for (int i = threadIdx.x; i < n; i += n_threads_of_top) best = max(best, rank_of(read(i), i));
    if (threadIdx.x == 0) n_found = 0;
    if (k <= n_threads_of_top) {
        ranks[threadIdx.x] = best;
        sort_ranks(ranks, n_threads_of_top);
        bound = ranks[k - 1];
    }
    __syncthreads();
    const auto collect = [&] {
        for (int i = threadIdx.x; i < n; i += n_threads_of_top) {
            const auto rank = rank_of(read(i), i);
            if (rank < bound) continue;
            const int at = atomicAdd(&n_found, 1);
            if (at < max_top_k) ranks[at] = rank;
        }
        __syncthreads();
    };
    // Otherwise it would be too many.
    const bool may_be_few = k <= n_threads_of_top || n <= max_top_k;
    if (may_be_few) collect();
    if (!may_be_few || n_found > max_top_k) {
        unsigned long long prefix = 0;
        int n_wanted = k;
        for (int shift = 56; shift >= 0; shift -= 8) {
            for (int i = threadIdx.x; i < 256; i += n_threads_of_top) counts[i] = 0;
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += n_threads_of_top) {
                const auto rank = rank_of(read(i), i);
                const bool is_here = shift == 56 || rank >> (shift + 8) == prefix >> (shift + 8);
                if (is_here) atomicAdd(&counts[rank >> shift & 255], 1);
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                int above = 0, d = 255;
                while (d > 0 && above + counts[d] < n_wanted) above += counts[d--];
                digit = d;
                n_found = above;
            }
            __syncthreads();
            prefix |= static_cast<unsigned long long>(digit) << shift;
            n_wanted -= n_found;
            const bool is_exact = counts[digit] == n_wanted;
            __syncthreads();
            if (is_exact) break;  // all with this prefix belong to the k largest
        }
        bound = prefix;
        if (threadIdx.x == 0) n_found = 0;
        __syncthreads();
        collect();
    }
    int n_sorted = 1;
    while (n_sorted < n_found) n_sorted *= 2;
    for (int i = n_found + threadIdx.x; i < n_sorted; i += n_threads_of_top) ranks[i] = 0;
    sort_ranks(ranks, n_sorted);
    std::byte* const out = out_of(all, job);
    auto* const positions = reinterpret_cast<std::int32_t*>(
        job.block_positions ? job.block_positions : all.memory + job.positions);
    for (int i = threadIdx.x; i < k; i += n_threads_of_top) {
        const std::size_t at = static_cast<std::size_t>(row) * k + i;
        store(out, at, value_of(ranks[i]), all.form.is_half);
        positions[at] = column_of(ranks[i]);
    }
}

// Sums over spans; a block a row, grid (rows, jobs). In double, so that thousands of columns lose
// nothing; columns are read once, however much spans overlap (cut_ranges).
__global__ void __launch_bounds__(n_warps * 32) sums_of_rows(const tables all) {
    __shared__ double sums[max_row_cuts];
    const row_job& job = all.jobs[blockIdx.y];
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= n_rows_out(all, job)) return;
    const auto read = finished_reader(all, job, row);
    const std::int32_t* const cuts = all.numbers + job.first_cut;
    for (int s = warp; s + 1 < job.n_cuts; s += n_warps) {
        const int stop = min(cuts[s + 1], job.n_columns);
        double sum = 0.;
        for (int i = min(cuts[s], job.n_columns) + lane; i < stop; i += 32) sum += read(i);
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) sums[s] = sum;
    }
    __syncthreads();
    const std::int32_t* const spans = cuts + job.n_cuts;
    for (int i = threadIdx.x; i < job.n_spans; i += n_warps * 32) {
        double sum = 0.;
        for (int s = spans[2 * i]; s < spans[2 * i + 1]; ++s) sum += sums[s];
        store(out_of(all, job), static_cast<std::size_t>(row) * job.n_spans + i,
              static_cast<float>(sum), all.form.is_half);
    }
}

// ---- launches

template <int type>
std::size_t shared_bytes(int n_dim, int n_blocks) {
    const int n_chunks = n_chunks_of<type>(n_dim), n_heads = n_blocks * n_columns_of_mma;
    std::size_t n = static_cast<std::size_t>(parts_of<type>::n_query) * n_blocks * n_chunks * 32 *
                    sizeof(uint4);
    if (type == key_quantised) n += static_cast<std::size_t>(n_chunks) * n_heads * sizeof(float);
    return n + static_cast<std::size_t>(n_heads) * (row_tile + pad) * sizeof(float);
}

using kernel = void (*)(tables);
struct key_kernel {
    kernel run;
    std::size_t n_shared;
};

template <int type>
key_kernel kernel_of(int n_dim, int n_heads) {
    if (n_heads <= 8) return {rows_of_keys<type, 1>, shared_bytes<type>(n_dim, 1)};
    if (n_heads <= 16) return {rows_of_keys<type, 2>, shared_bytes<type>(n_dim, 2)};
    return {rows_of_keys<type, 4>, shared_bytes<type>(n_dim, 4)};
}
key_kernel kernel_of(int type, int n_dim, int n_heads) {
    switch (type) {
        case key_f32: return kernel_of<key_f32>(n_dim, n_heads);
        case key_f16: return kernel_of<key_f16>(n_dim, n_heads);
        case key_bf16: return kernel_of<key_bf16>(n_dim, n_heads);
        default: return kernel_of<key_quantised>(n_dim, n_heads);
    }
}

template <class T>
std::size_t bytes_of(const std::vector<T>& all) {
    return (all.size() * sizeof(T) + 15) / 16 * 16;
}

}  // namespace

bool can_read_keys(int type, int n_dim, int n_head, int n_head_kv) {
    constexpr int types[] = {key_f32,  key_f16,  key_bf16, key_q8_0,  key_q4_0,
                             key_q4_1, key_q5_0, key_q5_1, key_iq4_nl};
    constexpr int most_dims = 576;
    if (std::find(std::begin(types), std::end(types), type) == std::end(types)) return false;
    const bool is_quantised = type != key_f32 && type != key_f16 && type != key_bf16;
    return n_dim % (is_quantised ? chunk : 8) == 0 && n_dim <= most_dims && n_head % n_head_kv == 0;
}

std::size_t table_bytes(const row_step& step) {
    return bytes_of(step.layers) + bytes_of(step.items) + bytes_of(step.numbers) +
           bytes_of(step.jobs);
}

bool can_run(std::string& why) {
    int device = 0, major = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
        why = cudaGetErrorString(cudaGetLastError());
        return false;
    }
    if (major < 8) {
        why = "its compute capability is below 8.0";
        return false;
    }
    cudaFuncAttributes attributes;
    const auto status = cudaFuncGetAttributes(&attributes, rows_of_keys<key_f16, 1>);
    if (status != cudaSuccess) {
        cudaGetLastError();
        why = cudaGetErrorString(status);
        return false;
    }
    // Above 48 KiB a kernel must be told before it is launched.
    constexpr int most = 99 * 1024;  // of every device from 8.6 on
    for (const int type : {static_cast<int>(key_f32), static_cast<int>(key_f16),
                           static_cast<int>(key_bf16), static_cast<int>(key_q8_0)}) {
        for (const int n_heads : {8, 16, 32}) {
            const auto status_of =
                cudaFuncSetAttribute(kernel_of(type, chunk, n_heads).run,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, most);
            if (status_of != cudaSuccess) {
                cudaGetLastError();
                why = cudaGetErrorString(status_of);
                return false;
            }
        }
    }
    return true;
}

int launch_rows(const row_step& step, const row_tables& to, const std::byte* saved,
                std::byte* memory, void* on) {
    if (step.jobs.empty()) return cudaSuccess;
    const auto stream = static_cast<cudaStream_t>(on);
    std::size_t n = 0;
    const auto put = [&](const auto& all) {
        const auto at = n;
        std::memcpy(to.host + at, all.data(), all.size() * sizeof(all[0]));
        n += bytes_of(all);
        return to.device + at;
    };
    const auto* const layers = put(step.layers);
    const auto* const items = put(step.items);
    const auto* const numbers = put(step.numbers);
    const auto* const jobs = put(step.jobs);
    auto status = cudaMemcpyAsync(to.device, to.host, n, cudaMemcpyHostToDevice, stream);
    for (const auto& one : step.launches) {
        if (status != cudaSuccess) return status;
        const auto n_jobs = static_cast<unsigned>(one.n_jobs);
        unsigned n_tiles = 0, n_items = 0, n_rows = 0, n_groups = 0, n_columns = 0;
        int n_heads = 0, n_dim = 0;
        for (auto j = one.first_job; j < one.first_job + one.n_jobs; ++j) {
            const auto& job = step.jobs[j];
            n_tiles = std::max(n_tiles, static_cast<unsigned>(job.n_tiles));
            n_items = std::max(n_items, static_cast<unsigned>(job.n_items));
            n_rows = std::max(n_rows, static_cast<unsigned>(job.n_rows));
            n_groups = std::max(n_groups, static_cast<unsigned>(job.n_groups));
            n_columns = std::max(n_columns, static_cast<unsigned>(job.n_columns));
            for (int i = job.first_item; i < job.first_item + job.n_items; ++i) {
                const auto& item = step.items[static_cast<std::size_t>(i)];
                n_heads = std::max(n_heads, item.n_heads);
                n_dim = std::max(n_dim, step.layers[static_cast<std::size_t>(item.layer)].n_dim);
            }
        }
        if (n_jobs * n_tiles * n_items == 0 || n_heads > heads_at_once(n_dim))
            return cudaErrorInvalidValue;
        const tables all{reinterpret_cast<const row_layer*>(layers),
                         reinterpret_cast<const row_item*>(items),
                         reinterpret_cast<const std::int32_t*>(numbers),
                         reinterpret_cast<const row_job*>(jobs) + one.first_job,
                         saved,
                         memory,
                         one.form,
                         step.key_type,
                         one.form.needs_values()};
        const auto keys = kernel_of(step.key_type, n_dim, n_heads);
        keys.run<<<dim3(n_tiles, n_items, n_jobs), n_warps * 32, keys.n_shared, stream>>>(all);
        if (one.form.kind == row_form::probs)
            join_parts<<<dim3((n_rows + n_warps - 1) / n_warps, n_jobs), n_warps * 32, 0, stream>>>(
                all);
        unsigned n_out = n_rows;
        if (one.form.reduce != row_form::none) {
            n_out = n_groups;
            reduce_rows<<<dim3((n_columns + n_threads_of_group - 1) / n_threads_of_group, n_groups,
                               n_jobs),
                          n_threads_of_group, 0, stream>>>(all);
        } else if (one.form.finish == row_form::whole && one.form.kind == row_form::probs) {
            whole_rows<<<dim3((n_columns + n_threads_of_row * n_each - 1) /
                                  (n_threads_of_row * n_each),
                              n_rows, n_jobs),
                         n_threads_of_row, 0, stream>>>(all);
        }
        if (one.form.finish == row_form::top)
            top_of_rows<<<dim3(n_out, n_jobs), n_threads_of_top, 0, stream>>>(all);
        if (one.form.finish == row_form::sums)
            sums_of_rows<<<dim3(n_out, n_jobs), n_warps * 32, 0, stream>>>(all);
        status = cudaGetLastError();  // ggml must not find it
    }
    return status;
}

}  // namespace kqview::cuda
