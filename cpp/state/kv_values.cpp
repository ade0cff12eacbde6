#include "state/kv_values.h"

#include <algorithm>
#include <cstring>

namespace kqview {

namespace {

// Bits without the sign grow with the number, and those of infinity and NaN are above all others.
constexpr std::uint32_t f32_largest = 0x477fe000;  // 65504
constexpr std::uint16_t f16_largest = 0x7bff;      // 65504
constexpr std::uint16_t bf16_largest = 0x477f;     // 65280; the next one is 65536

template <class word>
word load(const std::byte* at) {
    word value;
    std::memcpy(&value, at, sizeof(value));
    return value;
}

// Runs of this many numbers are checked without a branch, which is what a compiler can vectorise.
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

// A quantised block of 32 numbers: one or two F16 scales in front, then integers that are always finite.
struct quant_block {
    std::size_t n_bytes;
    std::size_t n_scales;
};

std::optional<std::size_t> find_scale(std::span<const std::byte> data, quant_block block) {
    const std::size_t n = data.size() / block.n_bytes;
    for (std::size_t i = 0; i < n; ++i) {
        const auto* const at = data.data() + i * block.n_bytes;
        for (std::size_t j = 0; j < block.n_scales; ++j) {
            if (is_beyond<std::uint16_t>(at + j * sizeof(std::uint16_t), f16_largest))
                return i * block.n_bytes;
        }
    }
    return {};
}

std::optional<quant_block> quant_block_of(kv_type type) {
    switch (type) {
        case kv_type::q4_0: return quant_block{2 + 16, 1};
        case kv_type::q4_1: return quant_block{4 + 16, 2};
        case kv_type::q5_0: return quant_block{2 + 4 + 16, 1};
        case kv_type::q5_1: return quant_block{4 + 4 + 16, 2};
        case kv_type::q8_0: return quant_block{2 + 32, 1};
        case kv_type::iq4_nl: return quant_block{2 + 16, 1};
        default: return {};
    }
}

}  // namespace

std::string name_of(kv_type type) {
    switch (type) {
        case kv_type::f32: return "f32";
        case kv_type::f16: return "f16";
        case kv_type::bf16: return "bf16";
        case kv_type::q4_0: return "q4_0";
        case kv_type::q4_1: return "q4_1";
        case kv_type::q5_0: return "q5_0";
        case kv_type::q5_1: return "q5_1";
        case kv_type::q8_0: return "q8_0";
        case kv_type::iq4_nl: return "iq4_nl";
    }
    return std::to_string(static_cast<std::int32_t>(type));
}

bool is_known(kv_type type) {
    return type == kv_type::f32 || type == kv_type::f16 || type == kv_type::bf16 ||
           quant_block_of(type).has_value();
}

std::optional<std::size_t> find_unsound(kv_type type, std::span<const std::byte> data) {
    if (type == kv_type::f32) return find_number<std::uint32_t>(data, f32_largest);
    if (type == kv_type::f16) return find_number<std::uint16_t>(data, f16_largest);
    if (type == kv_type::bf16) return find_number<std::uint16_t>(data, bf16_largest);
    if (const auto block = quant_block_of(type)) return find_scale(data, *block);
    return {};
}

}  // namespace kqview
