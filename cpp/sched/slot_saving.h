// What the orders of state do with an idle slot: save, restore, truncate, clear. Engine thread
// only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sched/idle_slot.h"

namespace kqview {

// Writes the slot as a SES1 blob to the front of `out` and returns the blob's size. Where `out` is
// too small nothing is written and more than its size is returned: the room that is needed, a
// little more than the blob. Raises unsupported_model.
std::size_t save_slot(idle_slot& slot, std::span<std::byte> out);

// Makes the slot hold what the blob holds, of which the first `n_exact` tokens are known to be
// exact. Raises state_format, state_mismatch and unsupported_model, and has changed nothing then;
// an internal error leaves the slot empty.
void restore_slot(idle_slot& slot, std::span<const std::byte> blob, std::size_t n_exact);

// Keeps the first `n_keep` tokens, of which there are as many at least; fewer (none) where the
// cache cannot drop that tail. Raises request.
void truncate_slot(idle_slot& slot, std::size_t n_keep);

void clear_slot(idle_slot& slot);

}  // namespace kqview
