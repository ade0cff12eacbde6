// A slot that works for nobody, as the work of an order sees it (slot_orders.h). Engine thread
// only.
#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <vector>

#include "base/ids.h"
#include "sched/runner.h"

namespace kqview {

inline constexpr std::size_t all_exact = std::numeric_limits<std::size_t>::max();

struct idle_slot {
    slot_id id;
    runner& model;
    // Ids in the slot's cache. Whoever changes the cache writes here what it holds then and sets
    // the flag, also where the work ends with an error.
    std::vector<token_id> tokens;
    bool has_changed = false;
    // The tokens from here on keep what was computed for them while others, which are gone, stood
    // before them, or came out of a blob of which nobody says what it holds, or saw what followed
    // them: a request that wants exact reuse evaluates them again. all_exact: there are none, and
    // what is decoded next is exact too.
    std::size_t n_exact = all_exact;
};

// The mark of a cache of `n_tokens` whose first `n_exact` are exact.
constexpr std::size_t exact_mark(std::size_t n_exact, std::size_t n_tokens) {
    return n_exact < n_tokens ? n_exact : all_exact;
}

using slot_work = std::function<void(idle_slot&)>;

}  // namespace kqview
