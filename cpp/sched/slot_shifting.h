// Removing tokens from the middle of a slot: those that follow move up and keep what was computed
// for them. Engine thread only.
#pragma once

#include <cstdint>
#include <span>

#include "base/ids.h"
#include "sched/idle_slot.h"

namespace kqview {

// Removes ranges of the slot's tokens, which are not empty, in order, and apart. Raises
// unsupported_model and out_of_memory for its own memory, and has changed nothing then; any other
// error leaves the slot empty. Copies the slot's cache twice, however many ranges there are. What
// follows the first range is exact no more.
void discard_tokens(idle_slot& slot, std::span<const token_range> gone);

// As discard_tokens(), for `n_discard` tokens behind the first `n_keep`. Raises request for others
// than the slot has.
void shift_slot(idle_slot& slot, std::uint64_t n_keep, std::uint64_t n_discard);

}  // namespace kqview
