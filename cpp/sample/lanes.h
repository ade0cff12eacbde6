// The target's vector register as a type of gcc and clang: the same arithmetic on a few numbers at
// once. Plain loops are not turned into vector code on every target that wheels are built for, and
// wider types than the register's compile to slow code. Files may be compiled for different
// targets, hence `static`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kqview {

#if defined(__AVX__)
constexpr std::size_t n_lanes = 8;
#else
constexpr std::size_t n_lanes = 4;
#endif

using float_lanes = float __attribute__((vector_size(n_lanes * sizeof(float))));
using int_lanes = std::int32_t __attribute__((vector_size(n_lanes * sizeof(std::int32_t))));

static inline float_lanes load(const float* from) {
    float_lanes to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

static inline float_lanes larger(float_lanes a, float_lanes b) { return b > a ? b : a; }

}  // namespace kqview
