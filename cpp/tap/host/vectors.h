// Vectors of floats for the kernels of attention: 16, 8 or 4 lanes, depending on the compiler's
// target, and how cells of a cache are read into them. Only files that are compiled for the
// instruction set of ggml's CPU backend include it (cpp/CMakeLists.txt).
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

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

inline void store(float* to, vec value) { std::memcpy(to, &value, sizeof value); }

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

// How cells of a type are read: `lanes` elements, or one.
struct f32_cells {
    static constexpr int bytes = 4;
    static vec get(const std::byte* from) { return load(reinterpret_cast<const float*>(from)); }
    static float one(const std::byte* from) {
        float value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
};
struct f16_cells {
    static constexpr int bytes = 2;
    static vec get(const std::byte* from) { return load_f16(from); }
    static float one(const std::byte* from) {
        ggml_fp16_t value;
        std::memcpy(&value, from, sizeof value);
        return ggml_fp16_to_fp32(value);
    }
};
struct bf16_cells {
    static constexpr int bytes = 2;
    static vec get(const std::byte* from) { return load_bf16(from); }
    static float one(const std::byte* from) {
        ggml_bf16_t value;
        std::memcpy(&value, from, sizeof value);
        return ggml_bf16_to_fp32(value);
    }
};

// Four floats, repeated in every group of four lanes.
inline vec repeat_quad(const float* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<vec>(_mm512_maskz_broadcast_f32x4(0xFFFF, _mm_loadu_ps(from)));
#elif defined(__AVX__)
    return reinterpret_cast<vec>(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from)));
#else
    return load(from);
#endif
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
        for (int j = 0; j < line; j += 4) _mm_stream_ps(to + i + j, _mm_loadu_ps(from + i + j));
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
