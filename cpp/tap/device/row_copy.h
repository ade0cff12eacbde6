// Copies of rows from a device to the host, merged into as few calls as possible. One copy has rows
// at a constant stride on either side, which is all that ggml's 2D copy supports.
// Number of copies per step and device: one if all rows are adjacent, as with one slot. With
// several slots, each slot has its own block, whose rows are as long as its own text, so no copy
// serves two slots. On the device, the heads of all slots of one layer lie together, because the
// product has that layout. This gives one copy per slot and layer, or per slot and head if a layer
// keeps fewer heads than there are layers: at most n_slots * min(n_layers, n_heads)
// (EngineStats.device_copies counts them). Fewer copies would need another pass over all rows on
// the device, to group them by slot.
// Pure values; no ggml, no threads.
#pragma once

#include <cstddef>
#include <vector>

namespace kqview {

// Rows at a constant stride on the device and a constant stride on the host.
struct row_copy {
    std::size_t from;  // offset in the device's buffer
    std::byte* to;
    std::size_t n_rows;
    std::size_t row_bytes;
    std::size_t from_stride;
    std::size_t to_stride;

    bool is_followed_by(const row_copy& next) const {
        return next.row_bytes == row_bytes && next.from_stride == from_stride &&
               next.to_stride == to_stride && next.from == from + n_rows * from_stride &&
               next.to == to + n_rows * to_stride;
    }
};

// Adds a copy; merges it into the last one if it continues that.
void add_copy(std::vector<row_copy>& copies, const row_copy& next);

// Merges copies if a pattern of copies repeats at a constant distance, as layers do: the first row
// of each repetition then forms one copy, the second row another, and so on.
void pack_copies(std::vector<row_copy>& copies);

}  // namespace kqview
