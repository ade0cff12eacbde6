// Takes little-endian numbers off a span of bytes and says where it was when one is not what it
// must be.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "base/error.h"

namespace kqview {

static_assert(std::endian::native == std::endian::little,
              "blobs are little endian, as llama.cpp's");

class byte_reader {
public:
    explicit byte_reader(std::span<const std::byte> bytes, std::size_t at = 0)
        : bytes_(bytes), at_(at) {}

    std::size_t at() const { return at_; }
    std::uint64_t n_left() const { return bytes_.size() - at_; }

    // The next number; raises state_format when the bytes end before it does.
    template <class number>
    number take(const char* field) {
        const auto taken = skip(sizeof(number), field);
        number value;
        std::memcpy(&value, taken.data(), sizeof(value));
        return value;
    }

    // The next `n` bytes, which may be more than a size_t of this machine holds.
    std::span<const std::byte> skip(std::uint64_t n, const char* field) {
        if (n > n_left()) {
            throw error(errc::state_format,
                        "slot.restore: " + std::string(field) + " at byte " + std::to_string(at_) +
                            " needs " + std::to_string(n) + " bytes, " + std::to_string(n_left()) +
                            " are left; the blob was cut short");
        }
        const auto taken = bytes_.subspan(at_, static_cast<std::size_t>(n));
        at_ += static_cast<std::size_t>(n);
        return taken;
    }

private:
    std::span<const std::byte> bytes_;
    std::size_t at_;
};

}  // namespace kqview
