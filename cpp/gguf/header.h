// GGUF, a model file:  "GGUF" | u32 version | u64 n_tensors | u64 n_values
//   each value:     string key | u32 type | value;  an array is u32 type | u64 n | n values
//   each tensor:    string name | u32 n_dims | n_dims x u64 | u32 type | u64 offset
//   padding to the alignment, then the data of all tensors in order, each padded to the alignment
// A string is u64 n | n bytes; everything is little endian. Offsets count from the start of the
// data.
// Threads: pure functions; uses nothing of llama.cpp.
// Never:   reads past a span, or trusts a number before checking it; memory use is at most a
//          multiple of the header's own bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/error.h"

namespace kqview {

enum class gguf_type : std::uint32_t {
    u8,
    i8,
    u16,
    i16,
    u32,
    i32,
    f32,
    boolean,
    string,
    array,
    u64,
    i64,
    f64,
};

// "u32", "string" and so on.
const char* name_of(gguf_type type);

// A value or an array of values; views into the file.
struct gguf_value {
    std::string_view key;
    gguf_type type = gguf_type::u8;  // of the elements; never gguf_type::array
    bool is_array = false;
    std::span<const std::byte> numbers;     // packed and unaligned; empty for strings
    std::vector<std::string_view> strings;  // one element unless it is an array

    std::size_t size() const;
    // Element `i` of an integer or boolean type; u64 values above the largest i64 saturate.
    std::int64_t integer(std::size_t i = 0) const;
    // Element `i` of f32 or f64.
    double real(std::size_t i = 0) const;
    bool is_integer() const;  // integers and booleans
    bool is_real() const { return type == gguf_type::f32 || type == gguf_type::f64; }
    // "u32", or "array of u32".
    std::string type_text() const;
};

// The tensor types: their sizes, and what ggml can do with them.
struct tensor_type {
    const char* name = nullptr;  // null: no such type
    std::uint32_t n_block = 0;   // values per block; a row is whole blocks
    std::uint32_t block_bytes = 0;
    bool is_weight = false;  // ggml can multiply by it and look up rows in it, on every device
};

constexpr std::uint32_t type_f32 = 0;
constexpr const char* convert_again = "; download or convert the file again";

// Indexed by ggml's type number. Types that ggml removed count as unknown.
constexpr std::array<tensor_type, 43> tensor_types{{
    {"F32", 1, 4, true},
    {"F16", 1, 2, true},
    {"Q4_0", 32, 18, true},
    {"Q4_1", 32, 20, true},
    {},
    {},
    {"Q5_0", 32, 22, true},
    {"Q5_1", 32, 24, true},
    {"Q8_0", 32, 34, true},
    {"Q8_1", 32, 36, false},
    {"Q2_K", 256, 84, true},
    {"Q3_K", 256, 110, true},
    {"Q4_K", 256, 144, true},
    {"Q5_K", 256, 176, true},
    {"Q6_K", 256, 210, true},
    {"Q8_K", 256, 292, false},
    {"IQ2_XXS", 256, 66, true},
    {"IQ2_XS", 256, 74, true},
    {"IQ3_XXS", 256, 98, true},
    {"IQ1_S", 256, 50, true},
    {"IQ4_NL", 32, 18, true},
    {"IQ3_S", 256, 110, true},
    {"IQ2_S", 256, 82, true},
    {"IQ4_XS", 256, 136, true},
    {"I8", 1, 1, false},
    {"I16", 1, 2, false},
    {"I32", 1, 4, false},
    {"I64", 1, 8, false},
    {"F64", 1, 8, false},
    {"IQ1_M", 256, 56, true},
    {"BF16", 1, 2, true},
    {},
    {},
    {},
    {"TQ1_0", 256, 54, true},
    {"TQ2_0", 256, 66, true},
    {},
    {},
    {},
    {"MXFP4", 32, 17, true},
    {"NVFP4", 64, 36, true},
    {"Q1_0", 128, 18, true},
    {"Q2_0", 64, 18, true},
}};

struct gguf_tensor {
    std::string_view name;
    std::uint32_t n_dims = 0;
    std::array<std::uint64_t, 4> shape{1, 1, 1, 1};  // fastest first, as ggml's ne
    std::uint32_t type = 0;                          // index of tensor_types
    std::uint64_t n_bytes = 0;
    std::span<const std::byte> data{};  // in the file

    // "[64, 320]"
    std::string shape_text() const;
};

struct gguf_header {
    std::string file;  // its path, for messages
    std::vector<gguf_value> values;
    std::vector<gguf_tensor> tensors;
    std::unordered_map<std::string_view, std::size_t> value_by_key;

    // Null if there is none.
    const gguf_value* find(std::string_view key) const;
    // As find(); raises `model_load` for a value that is not of this type, or no array of it.
    const gguf_value* find(std::string_view key, gguf_type type, bool is_array = false) const;
    const gguf_value& at(std::string_view key, gguf_type type, bool is_array = false) const;
    // Raises `model_load`: "<file>: <what>".
    template <typename... Parts>
    [[noreturn]] void fail(const Parts&... what) const {
        throw error(errc::model_load, file, ": ", what...);
    }
};

// Reads the header of a file from its bytes, and checks that its tensors lie within the file.
// Raises model_load for a malformed file; the message says where.
gguf_header read_gguf(std::span<const std::byte> bytes, std::string file);

// A text from a file, made safe for a message: shortened, without control characters.
std::string quoted(std::string_view text);

}  // namespace kqview
