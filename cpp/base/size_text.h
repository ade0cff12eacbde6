// Sizes of memory as messages say them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdio>
#include <string>

namespace kqview {

// "3.10 GiB", "12.5 MiB" below one GiB, "0.0 MiB" for next to nothing.
inline std::string size_text(double n_bytes) {
    constexpr double mib = 1 << 20;
    constexpr double gib = 1 << 30;
    std::array<char, 48> text;
    if (n_bytes < gib) {
        std::snprintf(text.data(), text.size(), "%.1f MiB", n_bytes / mib);
    } else {
        std::snprintf(text.data(), text.size(), "%.2f GiB", n_bytes / gib);
    }
    return text.data();
}

inline std::string size_text(std::size_t n_bytes) {
    return size_text(static_cast<double>(n_bytes));
}

}  // namespace kqview
