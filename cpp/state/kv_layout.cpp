#include "state/kv_layout.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>

namespace kqview {

namespace {

// Without the sign, the bit patterns grow with the number; infinity and NaN are above all others.
constexpr std::uint16_t f16_largest = 0x7bff;   // 65504
constexpr std::uint16_t bf16_largest = 0x477f;  // 65280; the next one is 65536

template <class word>
word load(const std::byte* at) {
    word value;
    std::memcpy(&value, at, sizeof(value));
    return value;
}

// Runs of this many numbers are checked without a branch, which compilers can vectorise.
constexpr std::size_t n_run = 1024;

template <class word>
constexpr word without_sign = static_cast<word>(static_cast<word>(~word{0}) >> 1);

template <class word>
bool is_beyond(const std::byte* at, word largest) {
    return static_cast<word>(load<word>(at) & without_sign<word>) > largest;
}

template <class word>
bool has_beyond(const std::byte* data, std::size_t n, word largest) {
    word found = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const auto is_found = static_cast<word>(is_beyond<word>(data + i * sizeof(word), largest));
        found = static_cast<word>(found | is_found);
    }
    return found != 0;
}

template <class word>
std::optional<std::size_t> find_number(std::span<const std::byte> data, word largest) {
    const std::size_t n = data.size() / sizeof(word);
    for (std::size_t first = 0; first < n; first += n_run) {
        const std::size_t n_here = std::min(n_run, n - first);
        const auto* const run = data.data() + first * sizeof(word);
        if (!has_beyond<word>(run, n_here, largest)) continue;
        for (std::size_t i = 0; i < n_here; ++i) {
            if (is_beyond<word>(run + i * sizeof(word), largest)) return (first + i) * sizeof(word);
        }
    }
    return {};
}

// A block of n_quant numbers: an F16 scale, for some types an F16 minimum, then integers. A number
// is scale * level + minimum, computed in F32 as ggml does.
constexpr std::size_t n_quant = 32;

// The level of each of the integers 0..15 of iq4_nl.
constexpr std::array<std::int8_t, 16> nl_levels{-127, -104, -83, -65, -49, -35, -22, -10,
                                                1,    13,   25,  38,  53,  69,  89,  113};

struct quant_block {
    bool has_min;
    std::size_t n_high;   // bytes of the fifth bits, after the scales
    std::size_t n_low;    // bytes of the other bits: two numbers per byte, or one
    std::int32_t offset;  // subtracted from an integer to get its level
    bool has_nl_levels = false;

    std::size_t levels_at() const { return has_min ? 4 : 2; }
    std::size_t n_bytes() const { return levels_at() + n_high + n_low; }
};

struct type_facts {
    kv_type type;
    const char* name;  // as in Engine's option kv_type
    std::optional<quant_block> block{};
};
constexpr type_facts known_types[] = {
    {kv_type::f32, "f32"},
    {kv_type::f16, "f16"},
    {kv_type::bf16, "bf16"},
    {kv_type::q4_0, "q4_0", {{false, 0, n_quant / 2, 8}}},
    {kv_type::q4_1, "q4_1", {{true, 0, n_quant / 2, 0}}},
    {kv_type::q5_0, "q5_0", {{false, 4, n_quant / 2, 16}}},
    {kv_type::q5_1, "q5_1", {{true, 4, n_quant / 2, 0}}},
    {kv_type::q8_0, "q8_0", {{false, 0, n_quant, 0}}},
    {kv_type::iq4_nl, "iq4_nl", {{false, 0, n_quant / 2, 0, true}}},
};

// Null: no such type.
const type_facts* find_type(kv_type type) {
    const auto* const found = std::ranges::find(known_types, type, &type_facts::type);
    return found == std::end(known_types) ? nullptr : found;
}

float f16_to_f32(std::uint16_t bits) {
    const std::uint32_t sign = (bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fu;
    const std::uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    const std::uint32_t wide = exponent == 0x1f ? 0xffu : exponent + 112;
    return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

// Level of number `i` of a block: the integer that the scale multiplies.
std::int32_t level_of(const quant_block& block, const std::byte* at, std::size_t i) {
    const auto* const low = at + block.levels_at() + block.n_high;
    if (block.n_low == n_quant) return load<std::int8_t>(low + i);
    const auto pair = std::to_integer<std::uint32_t>(low[i % (n_quant / 2)]);
    std::uint32_t integer = i < n_quant / 2 ? pair & 0xfu : pair >> 4;
    if (block.has_nl_levels) return nl_levels[integer];
    if (block.n_high > 0) {
        integer |= (load<std::uint32_t>(at + block.levels_at()) >> i & 1u) << 4;
    }
    return static_cast<std::int32_t>(integer) - block.offset;
}

bool are_numbers_sound(const quant_block& block, const std::byte* at) {
    const float scale = f16_to_f32(load<std::uint16_t>(at));
    const float minimum = block.has_min ? f16_to_f32(load<std::uint16_t>(at + 2)) : 0.0f;
    for (std::size_t i = 0; i < n_quant; ++i) {
        const float number = scale * static_cast<float>(level_of(block, at, i)) + minimum;
        if (!(std::abs(number) <= 65504.0f)) return false;  // false for NaN
    }
    return true;
}

// No level exceeds 128, and none exceeds 31 in types with a minimum. Below these scales no number
// exceeds 65504, and the integers need no check. Scales of real caches are far below.
constexpr std::uint16_t f16_safe_scale = 0x5c00;    // 256
constexpr std::uint16_t f16_safe_minimum = 0x77ff;  // 32752

std::optional<std::size_t> find_block(std::span<const std::byte> data, const quant_block& block) {
    const auto n_bytes = block.n_bytes();
    for (std::size_t first = 0; first + n_bytes <= data.size(); first += n_bytes) {
        const auto* const at = data.data() + first;
        const bool is_safe = !is_beyond<std::uint16_t>(at, f16_safe_scale) &&
                             !(block.has_min && is_beyond<std::uint16_t>(at + 2, f16_safe_minimum));
        if (!is_safe && !are_numbers_sound(block, at)) return first;
    }
    return {};
}

}  // namespace

std::string name_of(kv_type type) {
    const auto* const known = find_type(type);
    return known ? known->name : std::to_string(static_cast<std::int32_t>(type));
}

bool is_known(kv_type type) { return find_type(type) != nullptr; }

std::optional<std::size_t> find_unsound(kv_type type, std::span<const std::byte> data,
                                        float largest) {
    if (type == kv_type::f32) {
        return find_number<std::uint32_t>(data, std::bit_cast<std::uint32_t>(largest));
    }
    if (type == kv_type::f16) return find_number<std::uint16_t>(data, f16_largest);
    if (type == kv_type::bf16) return find_number<std::uint16_t>(data, bf16_largest);
    const auto* const known = find_type(type);
    return known && known->block ? find_block(data, *known->block) : std::nullopt;
}

}  // namespace kqview
