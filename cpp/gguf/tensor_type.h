// The types that tensors have in GGUF files: their sizes, and what ggml can do with them.
#pragma once

#include <array>
#include <cstdint>

namespace kqview {

struct tensor_type {
    const char* name = nullptr;  // null: no such type
    std::uint32_t n_block = 0;   // values of a block; a row is whole blocks
    std::uint32_t block_bytes = 0;
    bool is_weight = false;  // ggml multiplies by it and looks rows up in it, on every device
};

constexpr std::uint32_t type_f32 = 0;
constexpr std::uint32_t type_i32 = 26;

// By ggml's number. Types that ggml removed are as unknown as those it never had.
// tests/engine/test_hostile_models.py compares it with the gguf package.
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

}  // namespace kqview
