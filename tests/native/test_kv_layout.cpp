// kv_layout: which numbers of a cache are taken, for every type. Blocks are packed by hand.
#include "state/kv_layout.h"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

using namespace kqview;

namespace {

float half(std::uint16_t bits) {
    const int exponent = bits >> 10 & 0x1f;
    const int fraction = bits & 0x3ff;
    double value = std::ldexp(fraction, -24);
    if (exponent > 0) value = std::ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) {
        value = fraction == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
    }
    return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
}

// A block of a type: its integers are 0..n_integer-1, each with a level.
struct packed_block {
    kv_type type;
    bool has_min = false;
    unsigned n_integer = 16;
    std::vector<std::byte> bytes;

    explicit packed_block(kv_type the_type) : type(the_type) {
        has_min = type == kv_type::q4_1 || type == kv_type::q5_1;
        if (type == kv_type::q8_0) n_integer = 256;
        if (is_five()) n_integer = 32;
        bytes.resize(front() + (is_five() ? 4 : 0) + (type == kv_type::q8_0 ? 32 : 16));
    }
    bool is_five() const { return type == kv_type::q5_0 || type == kv_type::q5_1; }
    std::size_t front() const { return has_min ? 4 : 2; }

    void set_scale(std::uint16_t bits) { std::memcpy(bytes.data(), &bits, 2); }
    void set_min(std::uint16_t bits) { std::memcpy(bytes.data() + 2, &bits, 2); }
    void set(unsigned i, unsigned integer) {
        if (type == kv_type::q8_0) {
            bytes[front() + i] = std::byte(integer);
            return;
        }
        auto at = front();
        if (is_five()) {
            const auto bit = std::byte(1u << i % 8);
            auto& high = bytes[at + i / 8];
            high = (integer & 16) != 0 ? high | bit : high & ~bit;
            at += 4;
        }
        auto& pair = bytes[at + i % 16];
        const auto low = std::byte(integer & 15);
        pair = i < 16 ? (pair & std::byte{0xf0}) | low : (pair & std::byte{0x0f}) | low << 4;
    }
    void fill(unsigned integer) {
        for (unsigned i = 0; i < 32; ++i) set(i, integer);
    }
    int level(unsigned integer) const {
        constexpr std::array nl{-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
        switch (type) {
            case kv_type::q4_0: return static_cast<int>(integer) - 8;
            case kv_type::q5_0: return static_cast<int>(integer) - 16;
            case kv_type::q8_0: return static_cast<std::int8_t>(integer);
            case kv_type::iq4_nl: return nl[integer];
            default: return static_cast<int>(integer);
        }
    }
    bool is_sound() const { return !find_unsound(type, bytes); }
};

const std::array quantised{kv_type::q4_0, kv_type::q4_1, kv_type::q5_0,
                           kv_type::q5_1, kv_type::q8_0, kv_type::iq4_nl};

bool is_in_range(float scale, int level, float minimum) {
    const float number = scale * static_cast<float>(level) + minimum;
    return std::isfinite(number) && std::abs(number) <= 65504.0f;
}

}  // namespace

TEST_CASE(
    "kv_layout: every F16, BF16 and its neighbours in F32 is taken if finite and up to 65504") {
    const auto is_sound = [](kv_type type, auto value) {
        return !find_unsound(type, std::as_bytes(std::span(&value, 1)));
    };
    unsigned n_wrong = 0;
    for (unsigned i = 0; i < 0x10000; ++i) {
        const auto bits = static_cast<std::uint16_t>(i);
        n_wrong += is_sound(kv_type::f16, bits) != std::isfinite(half(bits));
        float wide = 0;
        const std::uint32_t upper = i << 16;
        for (const std::uint32_t lower : {0x0000u, 0x0001u, 0xe000u, 0xe001u, 0xffffu}) {
            const std::uint32_t all = upper | lower;
            std::memcpy(&wide, &all, 4);
            const bool is_fine = std::isfinite(wide) && std::abs(wide) <= 65504.0f;
            n_wrong += is_sound(kv_type::f32, wide) != is_fine;
            if (lower == 0) n_wrong += is_sound(kv_type::bf16, bits) != is_fine;
        }
    }
    CHECK(n_wrong == 0);
}

TEST_CASE("kv_layout: a quantised block is taken if every number is, for every scale and integer") {
    for (const auto type : quantised) {
        CAPTURE(name_of(type));
        packed_block block(type);
        unsigned n_wrong = 0;
        unsigned n_refused = 0;
        for (unsigned integer = 0; integer < block.n_integer; ++integer) {
            block.fill(integer);
            for (unsigned i = 0; i < 0x10000; ++i) {
                // Of q8_0's 256 integers most share a scale's fate with their neighbours.
                if (type == kv_type::q8_0 && (i + integer) % 32 != 0 && integer % 64 > 1) continue;
                const auto scale = static_cast<std::uint16_t>(i);
                block.set_scale(scale);
                const bool is_fine = is_in_range(half(scale), block.level(integer), 0);
                n_wrong += block.is_sound() != is_fine;
                n_refused += !is_fine;
            }
        }
        CHECK(n_wrong == 0);
        CHECK(n_refused > 2048);  // more than the scales that are not finite
    }
}

TEST_CASE("kv_layout: a minimum counts, with every scale and as every number") {
    const std::array<std::uint16_t, 12> some{0x0000, 0x0001, 0x3c00, 0x5c00, 0x5c01, 0x77ff,
                                             0x7bff, 0x7c00, 0x7e00, 0xfbff, 0xf800, 0xfc00};
    for (const auto type : {kv_type::q4_1, kv_type::q5_1}) {
        CAPTURE(name_of(type));
        packed_block block(type);
        unsigned n_wrong = 0;
        for (unsigned integer = 0; integer < block.n_integer; ++integer) {
            block.fill(integer);
            for (const auto fixed : some) {
                for (unsigned i = 0; i < 0x10000; i += 3) {
                    const auto free = static_cast<std::uint16_t>(i);
                    block.set_scale(free);
                    block.set_min(fixed);
                    n_wrong += block.is_sound() !=
                               is_in_range(half(free), block.level(integer), half(fixed));
                    block.set_scale(fixed);
                    block.set_min(free);
                    n_wrong += block.is_sound() !=
                               is_in_range(half(fixed), block.level(integer), half(free));
                }
            }
        }
        CHECK(n_wrong == 0);
    }
}

TEST_CASE("kv_layout: one number beyond the limit is found at each place of a block") {
    for (const auto type : quantised) {
        CAPTURE(name_of(type));
        packed_block block(type);
        unsigned largest = 0;
        unsigned smallest = 0;
        for (unsigned integer = 0; integer < block.n_integer; ++integer) {
            if (std::abs(block.level(integer)) > std::abs(block.level(largest))) largest = integer;
            if (std::abs(block.level(integer)) < std::abs(block.level(smallest)))
                smallest = integer;
        }
        block.fill(smallest);
        block.set_scale(0x7b00);  // 57344
        CHECK(block.is_sound());
        for (unsigned i = 0; i < 32; ++i) {
            block.set(i, largest);
            CHECK_FALSE(block.is_sound());
            block.set(i, smallest);
            CHECK(block.is_sound());
        }
    }
}

TEST_CASE("kv_layout: the first number that is not finite is found, at any offset") {
    struct kind {
        kv_type type;
        std::size_t n_unit;          // bytes of a number or block
        std::vector<std::byte> nan;  // at the start of one
    };
    const std::byte zero{0};
    const std::vector<kind> kinds{
        {kv_type::f32, 4, {zero, zero, std::byte{0xc0}, std::byte{0x7f}}},
        {kv_type::f16, 2, {zero, std::byte{0x7c}}},
        {kv_type::bf16, 2, {std::byte{0x80}, std::byte{0xff}}},
        {kv_type::q8_0, 34, {zero, std::byte{0xfc}}},
        {kv_type::q4_0, 18, {zero, std::byte{0x7c}}},
        {kv_type::q4_1, 20, {zero, zero, zero, std::byte{0x7e}}},
        {kv_type::q5_0, 22, {zero, std::byte{0x7c}}},
        {kv_type::q5_1, 24, {zero, zero, zero, std::byte{0x7c}}},
        {kv_type::iq4_nl, 18, {zero, std::byte{0x7c}}},
    };
    for (const auto& one : kinds) {
        CAPTURE(name_of(one.type));
        CHECK(is_known(one.type));
        for (const std::size_t n : {1u, 7u, 1024u, 1025u, 3000u}) {
            std::vector<std::byte> bytes(n * one.n_unit + 1);
            // Not aligned, as rows in a blob are not.
            const auto data = std::span(bytes).subspan(1);
            CHECK_FALSE(find_unsound(one.type, data));
            for (const std::size_t i : {std::size_t{0}, n / 2, n - 1}) {
                auto broken = bytes;
                std::copy(one.nan.begin(), one.nan.end(),
                          broken.begin() + 1 + static_cast<std::ptrdiff_t>(i * one.n_unit));
                const auto found = find_unsound(one.type, std::span(broken).subspan(1));
                REQUIRE(found);
                CHECK(*found == i * one.n_unit);
            }
        }
    }
}
