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
#elif defined(__SSE4_1__)
    std::int32_t four;
    std::memcpy(&four, from, sizeof four);
    const auto bytes = _mm_cvtsi32_si128(four);
    return reinterpret_cast<ivec>(is_signed ? _mm_cvtepi8_epi32(bytes) : _mm_cvtepu8_epi32(bytes));
#else
    byte_type bytes[lanes];
    std::memcpy(bytes, from, sizeof bytes);
    ivec value;
    for (int i = 0; i < lanes; ++i) value[i] = bytes[i];
    return value;
#endif
}

// 0, 1, 2...
template <class vec_type>
constexpr vec_type count_up() {
    return []<int... i>(std::integer_sequence<int, i...>) {
        return vec_type{i...};
    }(std::make_integer_sequence<int, lanes>{});
}

// A block of 32 elements: a scale, for some a least value and the fifth bits, then the integers.
template <ggml_type type>
struct block_cells {
    static_assert(type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q4_1 ||
                  type == GGML_TYPE_Q5_0 || type == GGML_TYPE_Q5_1);
    static constexpr bool has_min = type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_1;
    static constexpr bool has_fifth_bit = type == GGML_TYPE_Q5_0 || type == GGML_TYPE_Q5_1;
    static constexpr float zero = has_min ? 0.0f : has_fifth_bit ? 16.0f : 8.0f;
    static constexpr int fifth_bits_at = has_min ? 4 : 2;
    static constexpr int quants_at = fifth_bits_at + (has_fifth_bit ? 4 : 0);
    static constexpr int vecs = 32 / lanes;
    static constexpr int bytes = quants_at + (type == GGML_TYPE_Q8_0 ? 32 : 16);

    template <int i_vec>
    [[gnu::always_inline]] static vec get(const std::byte* block) {
        constexpr int first = i_vec * lanes;
        const vec scale = spread_f16(block);
        const auto* const quants = block + quants_at;
        if constexpr (type == GGML_TYPE_Q8_0) {
            return __builtin_convertvector(load_small<std::int8_t>(quants + first), vec) * scale;
        } else {
            const vec least = has_min ? spread_f16(block + 2) : scale * -zero;
            // The low halves of the bytes come first.
            const ivec both = load_small<std::uint8_t>(quants + first % 16);
#if defined(__AVX512F__)
            if constexpr (!has_fifth_bit) {  // a table of the block's 16 values
                const vec values = scale * count_up<vec>() + least;
                const ivec index = first < 16 ? both : both >> 4;  // its low four bits count
                return reinterpret_cast<vec>(_mm512_maskz_permutexvar_ps(
                    0xFFFF, reinterpret_cast<__m512i>(index), reinterpret_cast<__m512>(values)));
            }
#endif
            ivec value = first < 16 ? both & 15 : both >> 4;
            if constexpr (has_fifth_bit) {
                std::uint32_t fifth_bits = 0;
                std::memcpy(&fifth_bits, block + fifth_bits_at, sizeof fifth_bits);
                const ivec bits = ivec{} + static_cast<std::int32_t>(fifth_bits >> first);
                value |= (bits >> count_up<ivec>() & 1) << 4;
            }
            return __builtin_convertvector(value, vec) * scale + least;
        }
    }
};

// One block of `type` into 32 floats.
template <ggml_type type>
inline void widen_block(const std::byte* block, float* to) {
    for_each<block_cells<type>::vecs>(
        [&]<int i>() { store(to + i * lanes, block_cells<type>::template get<i>(block)); });
}

// A block of iq4_nl: its nibbles are indices of a table.
template <>
inline void widen_block<GGML_TYPE_IQ4_NL>(const std::byte* block, float* to) {
    alignas(sizeof(vec)) float table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                            1,    13,   25,  38,  53,  69,  89,  113};
    for (int i = 0; i < 16; i += lanes) store(table + i, load(table + i) * one_f16(block));
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
