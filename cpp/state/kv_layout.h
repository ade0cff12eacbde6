// What one sequence's part of a KV cache looks like in llama.cpp's own bytes, as plain numbers: the
// live context is described by them, and a blob from outside must equal them. And which values such
// a cache may hold.
//
// A NaN would reach every later token of its slot and, through masked columns (0 * NaN), whoever
// uses the cells or a shared cache after it. So would a number whose product with a query
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

// The numbers of ggml's types that a KV cache can have; llama_runner checks that they are ggml's.
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

// Keys, or values, of one layer. Rows: `unit_bytes` is a row, one a cell. Columns (transposed
// values): `unit_bytes` is an element, `n_columns` runs of one element a cell.
struct kv_block {
    kv_type type = kv_type::f32;
    std::uint64_t unit_bytes = 0;
    std::uint32_t n_columns = 0;  // 0: rows

    std::uint64_t bytes_of(std::uint64_t n_cells) const {
        return n_cells * unit_bytes * (n_columns == 0 ? 1 : n_columns);
    }
    bool operator==(const kv_block&) const = default;
};

// What does not depend on the layers.
struct kv_shape {
    std::uint32_t n_stream = 1;  // of this context: one a slot
    bool has_extra = false;      // cells carry (x, y, token): M-RoPE, or n-gram embeddings
    std::uint32_t n_vocab = 0;   // ids are below it
    std::uint32_t n_ctx = 0;     // tokens of a slot
};

struct kv_layout {
    kv_shape shape;
    bool is_transposed = false;  // values; so it is without flash attention
    std::vector<kv_block> keys;  // a layer each
    // Of the layers that keep any: not those whose values are their keys.
    std::vector<kv_block> values;
};

// As Engine's option kv_type names it; the number if it has no name.
std::string name_of(kv_type type);

// Is the type one whose numbers can be checked?
bool is_known(kv_type type);

// Offset of the first number that is not finite or beyond the limit, or of the first quantised
// block that has such a number once it is multiplied out. `data` is a whole number of elements or
// blocks; any alignment.
std::optional<std::size_t> find_unsound(kv_type type, std::span<const std::byte> data);

}  // namespace kqview
