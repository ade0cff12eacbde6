#include "sched/slot_shifting.h"

#include <algorithm>
#include <memory>
#include <string>

#include "base/error.h"
#include "sched/slot_saving.h"

namespace kqview {

namespace {

void erase_tokens(idle_slot& slot, std::span<const token_range> gone) {
    const auto n_before = gone.front().start;
    std::size_t n_left = 0, at = 0;
    for (const auto& range : gone) {
        for (; at < range.start; ++at) slot.tokens[n_left++] = slot.tokens[at];
        at += range.n_tokens;
    }
    for (; at < slot.tokens.size(); ++at) slot.tokens[n_left++] = slot.tokens[at];
    slot.tokens.resize(n_left);
    slot.n_exact = exact_mark(std::min(slot.n_exact, n_before), n_left);
}

// A column is a cell: tokens must lie at their positions, or the next one would go into a gap.
void close_gaps(idle_slot& slot, std::span<std::byte> room) {
    const auto kv_data = room.first(slot.model.state_bytes(slot.id));
    slot.model.write_state(slot.id, kv_data);
    if (slot.model.read_state(slot.id, kv_data, static_cast<int>(slot.tokens.size()))) return;
    throw error(errc::internal,
                "slot.shift: llama.cpp refused its own bytes; the slot is empty now");
}

}  // namespace

void discard_tokens(idle_slot& slot, std::span<const token_range> gone) {
    // Before anything changes: a cache's worth of memory may not be there.
    const auto n_room_bytes = slot.model.state_bytes(slot.id);
    const auto room = std::make_unique_for_overwrite<std::byte[]>(n_room_bytes);
    bool is_done = false;
    try {
        is_done = slot.model.discard(slot.id, gone);
        if (is_done) {
            slot.has_changed = true;
            erase_tokens(slot, gone);
            // Where nothing follows the first range there is no gap.
            if (slot.tokens.size() > gone.front().start)
                close_gaps(slot, {room.get(), n_room_bytes});
        }
    } catch (...) {
        clear_slot(slot);
        throw;
    }
    if (is_done) return;
    throw error(errc::unsupported_model,
                "slot.shift: this model's positions cannot be moved; send the ids again");
}

void shift_slot(idle_slot& slot, std::uint64_t n_keep, std::uint64_t n_discard) {
    const auto n_tokens = slot.tokens.size();
    if (n_discard == 0 || n_keep > n_tokens || n_discard > n_tokens - n_keep) {
        throw error(errc::request,
                    "slot.shift: n_keep is " + std::to_string(n_keep) + " and n_discard " +
                        std::to_string(n_discard) + ", the slot has " + std::to_string(n_tokens) +
                        " tokens; discard at least 1 and no more than follow those kept");
    }
    const token_range gone{static_cast<std::size_t>(n_keep), static_cast<std::size_t>(n_discard)};
    discard_tokens(slot, {&gone, 1});
}

}  // namespace kqview
