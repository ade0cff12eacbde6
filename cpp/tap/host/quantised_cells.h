// Quantised cells of a cache as floats, in vectors. ggml's own conversions are compiled for any
// processor, and take longer than all the products of a cell. Blocks have 32 elements, laid out as
// in ggml's ggml-quants.c; tests compare with its conversions.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tap/host/vectors.h"

namespace kqview::vectors {

inline float f16_at(const std::byte* from) {
    ggml_fp16_t value;
    std::memcpy(&value, from, sizeof value);
    return ggml_fp16_to_fp32(value);
}

// `lanes` bytes as integers. gcc takes the bytes of __builtin_convertvector one by one.
template <class byte_type>
inline ivec load_small(const std::byte* from) {
    [[maybe_unused]] constexpr bool is_signed = std::is_signed_v<byte_type>;
#if defined(__AVX512F__)
    const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return reinterpret_cast<ivec>(is_signed ? _mm512_maskz_cvtepi8_epi32(0xFFFF, bytes)
                                            : _mm512_maskz_cvtepu8_epi32(0xFFFF, bytes));
#elif defined(__AVX2__)
    const auto bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return reinterpret_cast<ivec>(is_signed ? _mm256_cvtepi8_epi32(bytes)
                                            : _mm256_cvtepu8_epi32(bytes));
#else
    byte_type bytes[lanes];
    std::memcpy(bytes, from, sizeof bytes);
    ivec value;
    for (int i = 0; i < lanes; ++i) value[i] = bytes[i];
    return value;
#endif
}

template <int... i>
constexpr ivec count_up(std::integer_sequence<int, i...>) {
    return ivec{i...};
}

// One block of `type` into 32 floats.
template <ggml_type type>
inline void widen_block(const std::byte* block, float* to) {
    static_assert(type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q4_1 ||
                  type == GGML_TYPE_Q5_0 || type == GGML_TYPE_Q5_1);
    constexpr bool has_min = type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_1;
    constexpr bool has_fifth_bit = type == GGML_TYPE_Q5_0 || type == GGML_TYPE_Q5_1;
    constexpr int zero = has_min ? 0 : has_fifth_bit ? 16 : 8;
    const vec scale = vec{} + f16_at(block);
    if constexpr (type == GGML_TYPE_Q8_0) {
        for (int i = 0; i < 32; i += lanes)
            store(to + i,
                  __builtin_convertvector(load_small<std::int8_t>(block + 2 + i), vec) * scale);
        return;
    }
    const vec least = has_min ? vec{} + f16_at(block + 2) : vec{};
    const std::byte* quants = block + (has_min ? 4 : 2);
    std::uint32_t fifth_bits = 0;
    if constexpr (has_fifth_bit) {
        std::memcpy(&fifth_bits, quants, sizeof fifth_bits);
        quants += sizeof fifth_bits;
    }
    const auto finish = [&](ivec value, int first) {
        if constexpr (has_fifth_bit) {
            const ivec bits = ivec{} + static_cast<std::int32_t>(fifth_bits >> first);
            value |= (bits >> count_up(std::make_integer_sequence<int, lanes>{}) & 1) << 4;
        }
        vec result = __builtin_convertvector(value - zero, vec) * scale;
        if constexpr (has_min) result += least;
        store(to + first, result);
    };
    for (int i = 0; i < 16; i += lanes) {  // the low halves of the bytes come first
        const ivec both = load_small<std::uint8_t>(quants + i);
        finish(both & 15, i);
        finish(both >> 4, 16 + i);
    }
}

// A block of iq4_nl: its nibbles are indices of a table.
template <>
inline void widen_block<GGML_TYPE_IQ4_NL>(const std::byte* block, float* to) {
    alignas(sizeof(vec)) float table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                            1,    13,   25,  38,  53,  69,  89,  113};
    for (int i = 0; i < 16; i += lanes) store(table + i, load(table + i) * f16_at(block));
    for (int i = 0; i < 16; ++i) {
        const auto both = std::to_integer<unsigned>(block[2 + i]);
        to[i] = table[both & 15];
        to[16 + i] = table[both >> 4];
    }
}

// n_embd elements of one cell; false, and nothing done, for a type that has no vector code here.
inline bool widen_quantised(ggml_type type, const std::byte* cell, int n_embd, float* to) {
    const auto run = [&]<ggml_type known>() {
        const auto block_bytes = ggml_type_size(known);
        for (int i = 0; i < n_embd; i += 32, cell += block_bytes) widen_block<known>(cell, to + i);
        return true;
    };
    switch (type) {
        case GGML_TYPE_Q8_0: return run.template operator()<GGML_TYPE_Q8_0>();
        case GGML_TYPE_Q4_0: return run.template operator()<GGML_TYPE_Q4_0>();
        case GGML_TYPE_Q4_1: return run.template operator()<GGML_TYPE_Q4_1>();
        case GGML_TYPE_Q5_0: return run.template operator()<GGML_TYPE_Q5_0>();
        case GGML_TYPE_Q5_1: return run.template operator()<GGML_TYPE_Q5_1>();
        case GGML_TYPE_IQ4_NL: return run.template operator()<GGML_TYPE_IQ4_NL>();
        default: return false;
    }
}

}  // namespace kqview::vectors
