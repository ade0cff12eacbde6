#include "tap/device/row_copy.h"

#include <utility>

namespace kqview {

namespace {

bool has_shape_of(const row_copy& a, const row_copy& b) {
    return a.n_rows == b.n_rows && a.row_bytes == b.row_bytes && a.from_stride == b.from_stride &&
           a.to_stride == b.to_stride;
}

// True if each copy equals the one `period` before it, moved by constant distances.
bool repeats(const std::vector<row_copy>& copies, std::size_t period) {
    const auto& first = copies.front();
    const auto& second = copies[period];
    // A 2D copy's stride must be at least one row.
    if (second.from < first.from + first.row_bytes || second.to < first.to + first.row_bytes)
        return false;
    for (std::size_t i = 0; i + period < copies.size(); ++i) {
        const auto& one = copies[i];
        const auto& next = copies[i + period];
        if (!has_shape_of(one, next) || next.from - one.from != second.from - first.from ||
            next.to - one.to != second.to - first.to) {
            return false;
        }
    }
    return true;
}

}  // namespace

void add_copy(std::vector<row_copy>& copies, const row_copy& next) {
    if (!copies.empty() && copies.back().is_followed_by(next)) {
        copies.back().n_rows += next.n_rows;
    } else {
        copies.push_back(next);
    }
}

void pack_copies(std::vector<row_copy>& copies) {
    const auto n = copies.size();
    for (std::size_t period = 1; period <= n / 2; ++period) {
        if (n % period != 0 || !repeats(copies, period)) continue;
        const auto from_stride = copies[period].from - copies[0].from;
        const auto to_stride = static_cast<std::size_t>(copies[period].to - copies[0].to);
        std::vector<row_copy> packed;
        for (std::size_t i = 0; i < period; ++i) {
            const auto& one = copies[i];
            for (std::size_t row = 0; row < one.n_rows; ++row) {
                packed.push_back({one.from + row * one.from_stride, one.to + row * one.to_stride,
                                  n / period, one.row_bytes, from_stride, to_stride});
            }
        }
        if (packed.size() < n) copies = std::move(packed);
        return;
    }
}

}  // namespace kqview
