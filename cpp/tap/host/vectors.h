// Vectors of floats for the kernels of attention: 16, 8 or 4 lanes, depending on the compiler's
// target, and how cells of a cache are read into them. Only files that are compiled for the
// instruction set of ggml's CPU backend include it (cpp/CMakeLists.txt).
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace kqview::vectors {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

// Registers that a loop may fill.
#if defined(__AVX512F__) || (defined(__ARM_NEON) && defined(__aarch64__))
constexpr int n_registers = 32;
#else
constexpr int n_registers = 16;
#endif

typedef float vec __attribute__((vector_size(lanes * sizeof(float))));
typedef std::int32_t ivec __attribute__((vector_size(lanes * sizeof(float))));

inline vec load(const float* from) {
    vec value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// In all lanes. Not vec{} + value, which is an addition: it would turn -0 into 0.
inline vec spread(float value) { return value - vec{}; }

// Has gcc load a value once that it would otherwise load again for each product.
inline void keep_in_register([[maybe_unused]] vec& value) {
#if defined(__x86_64__)
    asm("" : "+v"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
}

inline void store(float* to, vec value) { std::memcpy(to, &value, sizeof value); }

// Whether instructions convert half precision; without, each value takes a few.
#if defined(__F16C__) || (defined(__ARM_NEON) && defined(__aarch64__))
constexpr bool converts_f16 = true;
#else
constexpr bool converts_f16 = false;
#endif

inline vec load_f16(const std::byte* from) {
#if defined(__AVX512F__)
    // maskz: gcc 12 warns about the undefined register of the plain intrinsic.
    return reinterpret_cast<vec>(
        _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX__) && defined(__F16C__)
    return reinterpret_cast<vec>(
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return reinterpret_cast<vec>(vcvt_f32_f16(vld1_f16(reinterpret_cast<const __fp16*>(from))));
#else
    float values[lanes];
    ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(from), values, lanes);
    return load(values);
#endif
}

inline vec load_bf16(const std::byte* from) {
    std::uint16_t halves[lanes];
    std::memcpy(halves, from, sizeof halves);
    ivec bits;
    for (int i = 0; i < lanes; ++i)
        bits[i] = static_cast<std::int32_t>(std::uint32_t{halves[i]} << 16);
    return reinterpret_cast<vec>(bits);
}

inline float one_f16(const std::byte* from) {
    ggml_fp16_t value;
    std::memcpy(&value, from, sizeof value);
#if defined(__x86_64__) && defined(__F16C__)
    return _cvtsh_ss(value);
#else
    return ggml_fp16_to_fp32(value);
#endif
}

// In all lanes.
inline vec spread_f16(const std::byte* from) {
#if defined(__AVX512F__)
    std::int16_t value;
    std::memcpy(&value, from, sizeof value);
    return reinterpret_cast<vec>(_mm512_maskz_cvtph_ps(0xFFFF, _mm256_set1_epi16(value)));
#elif defined(__AVX__) && defined(__F16C__)
    std::int16_t value;
    std::memcpy(&value, from, sizeof value);
    return reinterpret_cast<vec>(_mm256_cvtph_ps(_mm_set1_epi16(value)));
#else
    return spread(one_f16(from));
#endif
}

// How cells of a type are read: in blocks of `bytes` bytes, of which each is `vecs` vectors. Cells
// of floats may end within a vector: `one` is their i-th element.
struct f32_cells {
    static constexpr int vecs = 1, bytes = lanes * 4;
    template <int>
    static vec get(const std::byte* block) {
        return load(reinterpret_cast<const float*>(block));
    }
    static float one(const std::byte* cell, int i) {
        float value;
        std::memcpy(&value, cell + i * 4, sizeof value);
        return value;
    }
};
struct f16_cells {
    static constexpr int vecs = 1, bytes = lanes * 2;
    template <int>
    static vec get(const std::byte* block) {
        return load_f16(block);
    }
    static float one(const std::byte* cell, int i) { return one_f16(cell + i * 2); }
};
struct bf16_cells {
    static constexpr int vecs = 1, bytes = lanes * 2;
    template <int>
    static vec get(const std::byte* block) {
        return load_bf16(block);
    }
    static float one(const std::byte* cell, int i) {
        ggml_bf16_t value;
        std::memcpy(&value, cell + i * 2, sizeof value);
        return ggml_bf16_to_fp32(value);
    }
};

// run.operator()<0>(), <1>() ... <n - 1>().
template <int n, class run_type>
[[gnu::always_inline]] inline void for_each(const run_type& run) {
    [&]<int... i>(std::integer_sequence<int, i...>) {
        (run.template operator()<i>(), ...);
    }(std::make_integer_sequence<int, n>{});
}

// Two vectors hold n_sums sums each, of which lanes / n_sums lanes are still to be added. Which
// lane of the two becomes the i-th of a vector with twice the sums, and, `is_upper`, of the one to
// add to it. Lanes are paired within groups of four first, where moving them costs least, then
// groups.
constexpr int index_of_addend(int i, int n_sums, bool is_upper) {
    const int group = i / 4, element = i % 4;
    const int upper = is_upper ? 1 : 0;
    if (n_sums == 1) return 4 * group + element / 2 + 2 * upper + element % 2 * lanes;
    if (n_sums == 2) return 4 * group + element % 2 + 2 * upper + element / 2 * lanes;
    constexpr int n_groups = lanes / 4, n_half = n_groups / 2;
    const int from = group / (n_groups > 1 ? n_half : 1) * lanes;
    const int rank = n_half > 0 ? group % n_half : 0;
    return from + 4 * (2 * n_sums < lanes ? rank + n_half * upper : 2 * rank + upper) + element;
}

template <int n_sums, int... i>
[[gnu::always_inline]] inline vec add_halves(vec a, vec b, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, index_of_addend(i, n_sums, false)...) +
           __builtin_shufflevector(a, b, index_of_addend(i, n_sums, true)...);
}

// Adds n vectors, in each of which n_sums sums are spread over lanes, into one in which n * n_sums
// are: with n * n_sums == lanes, lane i is the i-th sum. The order of addition is that of every i.
template <int n, int n_sums = 1>
[[gnu::always_inline]] inline vec sum_each(const vec* values) {
    if constexpr (n == 1) {
        return values[0];
    } else {
        vec halves[n / 2];
#pragma GCC unroll 8
        for (int i = 0; i < n / 2; ++i) {
            halves[i] = add_halves<n_sums>(values[2 * i], values[2 * i + 1],
                                           std::make_integer_sequence<int, lanes>{});
        }
        return sum_each<n / 2, 2 * n_sums>(halves);
    }
}

// All lanes joined into one: neighbours first at the distance of half a vector, then of a
// quarter...
template <int distance = lanes / 2, class join_type>
[[gnu::always_inline]] inline float fold(vec value, const join_type& join) {
    if constexpr (distance == 0) {
        return value[0];
    } else {
        const auto moved = [&]<int... i>(std::integer_sequence<int, i...>) {
            return __builtin_shufflevector(value, value, (i ^ distance)...);
        }(std::make_integer_sequence<int, lanes>{});
        return fold<distance / 2>(join(value, moved), join);
    }
}

inline float sum_of(vec value) {
    return fold(value, [](vec a, vec b) { return a + b; });
}
inline float largest_of(vec value) {
    return fold(value, [](vec a, vec b) { return a > b ? a : b; });
}

// Copies n floats past the processor's caches, whole lines at least: what is not read soon need not
// be fetched first, nor push out what is. Before another thread may read them: end_streaming().
inline void stream(float* to, const float* from, int n) {
#if defined(__x86_64__)
    constexpr int line = 64 / sizeof(float);
    const auto at = reinterpret_cast<std::uintptr_t>(to) / sizeof(float);
    const int n_before = static_cast<int>((line - at % line) % line);
    if (n_before + line > n) {
        std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
        return;
    }
    std::memcpy(to, from, static_cast<std::size_t>(n_before) * sizeof(float));
    int i = n_before;
    for (; i + line <= n; i += line) {
#if defined(__AVX512F__)
        _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
#else
        for (int j = 0; j < line; j += 4) _mm_stream_ps(to + i + j, _mm_loadu_ps(from + i + j));
#endif
    }
    std::memcpy(to + i, from + i, static_cast<std::size_t>(n - i) * sizeof(float));
#else
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
#endif
}

inline void end_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace kqview::vectors
