// Copies of rows from a device to the host, and how few of them do. A copy has rows at one distance
// on either side, which is all that ggml's 2D copy can say. How many a step needs: where all its
// rows follow each other, as with one slot, one of each device. With several slots each has a block
// of its own, with rows as long as its own text, so no copy serves two of them; and on the device
// the slots' heads of one layer lie together, because that is how a product comes out. So it is a
// copy for each slot and layer, or for each slot and head where a layer keeps fewer heads than
// there are layers: at most n_slots * min(n_layers, n_heads) of each device
// (EngineStats.device_copies counts them). Fewer would need another pass over all rows on the
// device, to lay them out by slot. Pure values; no ggml, no threads.
#pragma once

#include <cstddef>
#include <vector>

namespace kqview {

// Rows that lie at one distance on the device and at one on the host.
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

// Adds a copy, as a part of the last one where it follows that.
void add_copy(std::vector<row_copy>& copies, const row_copy& next);

// The same rows in fewer copies, where one pattern of copies comes again and again at the same
// distance, as layers do: the first row of each is then one copy, the second row of each another.
void pack_copies(std::vector<row_copy>& copies);

}  // namespace kqview
