// The layout of one sequence's part of a KV cache in llama.cpp's own bytes, as plain numbers: they
// describe the live context, and a blob from outside must match them. Also defines the values that
// such a cache may hold.
//
// A NaN would reach every later token of its slot and, through masked columns (0 * NaN), every
// later user of the cells or of a shared cache. So would a number whose product with a query
// overflows; flash attention casts an F32 cache to F16. Hence one limit for every type: 65504, the
// largest number that an F16 cache, the usual one, can hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kqview {

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

    std::uint64_t bytes_of(std::uint64_t n_cells) const {
        return n_cells * unit_bytes * (n_columns == 0 ? 1 : n_columns);
    }
    bool operator==(const kv_block&) const = default;
};

// The part that does not depend on the layers.
struct kv_shape {
    std::uint32_t n_stream = 1;  // of this context: one per slot
    bool has_extra = false;      // cells carry (x, y, token): M-RoPE, or n-gram embeddings
    std::uint32_t n_vocab = 0;   // ids are below this
    std::uint32_t n_ctx = 0;     // tokens per slot
};

struct kv_layout {
    kv_shape shape;
    bool is_transposed = false;  // of the values; true without flash attention
    std::vector<kv_block> keys;  // one per layer
    // One per layer that stores values; layers whose values are their keys store none.
    std::vector<kv_block> values;
};

// The name as in Engine's option kv_type; the number if the type has none.
std::string name_of(kv_type type);

// True for types whose numbers can be checked.
bool is_known(kv_type type);

// Offset of the first number that is not finite or exceeds the limit, or of the first quantised
// block that dequantises to such a number. `data` is a whole number of elements or blocks, with any
// alignment.
std::optional<std::size_t> find_unsound(kv_type type, std::span<const std::byte> data);

}  // namespace kqview
