// The layout of one sequence's part of a context's memory in llama.cpp's own bytes, as plain
// numbers: they describe the live context, and a blob from outside must match them. Also defines
// the values that such a memory may hold.
//
// A NaN would reach every later token of its slot and, through masked columns (0 * NaN), every
// later user of the cells or of a shared cache. So would a number whose product with a query
// overflows; flash attention casts an F32 cache to F16. Hence one limit for every type: 65504, the
// largest number that an F16 cache, the usual one, can hold. A recurrent state is F32 and computed
// with as F32: its sums may be larger.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kqview {

constexpr float kv_largest = 65504.0f;

// ggml's numbers of the types that a KV cache can have; llama_runner checks that they match.
enum class kv_type : std::int32_t {
    f32 = 0,
    f16 = 1,
    q4_0 = 2,
    q4_1 = 3,
    q5_0 = 6,
    q5_1 = 7,
    q8_0 = 8,
    iq4_nl = 20,
    bf16 = 30,
};

// Keys, or values, of one layer. Stored as rows: `unit_bytes` is the size of a row, one per cell.
// Stored as columns (transposed values): `unit_bytes` is the size of an element, and each of the
// `n_columns` runs has one element per cell.
struct kv_block {
    kv_type type = kv_type::f32;
    std::uint64_t unit_bytes = 0;
    std::uint32_t n_columns = 0;  // 0: rows
    bool has_type = true;         // it says its type; else it has that of the block before

    std::uint64_t bytes_of(std::uint64_t n_cells) const {
        return n_cells * unit_bytes * (n_columns == 0 ? 1 : n_columns);
    }
    bool operator==(const kv_block&) const = default;
};

// One of the memories of a context, whose bytes follow each other: a model with sliding windows has
// two caches, a hybrid model a cache and a recurrent state.
struct kv_part {
    bool is_recurrent = false;  // one row for the whole sequence; else one per token
    bool has_extra = false;     // cells carry (x, y, token): M-RoPE, or n-gram embeddings
    bool has_window = false;    // a cache of layers with a sliding window
    // Of a ring, which keeps only what windows see: its cells, and how many of a longer sequence
    // it cannot do without. 0: a cache with a cell for each token.
    std::uint32_t n_ring_cells = 0;
    std::uint32_t n_ring_least = 0;
    std::vector<std::size_t> untyped{};  // of a recurrent state: its blocks that do not say theirs
    // Learned from bytes (learn_layout):
    bool is_transposed = false;  // of the values; true without flash attention
    std::uint32_t n_layer = 0;
    // One per layer; of a recurrent state, its R and then its S, of the layers that have them.
    std::vector<kv_block> keys;
    // One per layer that stores values; layers whose values are their keys store none.
    std::vector<kv_block> values;

    // Checkpoints have the parts that cannot drop a tail.
    bool has_checkpoints() const { return is_recurrent || n_ring_cells > 0; }
};

struct kv_layout {
    std::uint32_t n_vocab = 0;  // ids are below this
    std::uint32_t n_ctx = 0;    // tokens per slot
    std::vector<kv_part> parts;
};

// The name as in Engine's option kv_type; the number if the type has none.
std::string name_of(kv_type type);

// True for types whose numbers can be checked.
bool is_known(kv_type type);

// Offset of the first number that is not finite or exceeds `largest` (F32 alone can), or of the
// first quantised block that dequantises to such a number. `data` is a whole number of elements or
// blocks, with any alignment.
std::optional<std::size_t> find_unsound(kv_type type, std::span<const std::byte> data,
                                        float largest = kv_largest);

}  // namespace kqview
