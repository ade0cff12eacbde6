// A slot that works for nobody, as the work of an order sees it (slot_orders.h). Engine thread only.
#pragma once

#include <functional>
#include <vector>

#include "base/ids.h"
#include "sched/runner.h"

namespace kqview {

struct idle_slot {
    slot_id id;
    runner& model;
    // Ids in the slot's cache. Whoever changes the cache writes here what it holds then and sets the flag, also
    // where the work ends with an error.
    std::vector<token_id> tokens;
    bool has_changed = false;
};

using slot_work = std::function<void(idle_slot&)>;

}  // namespace kqview
