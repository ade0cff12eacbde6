// Parked requests. When a consumer is behind and another one waits for a slot, the request of the
// first leaves its slot, and goes on in any slot once its consumer has taken half of what was
// computed ahead. What it needs for that is here; its cells are not: they are evaluated again, as
// far as no slot still holds them.
// Owner:   the engine loop.
// Threads: the engine thread; size() and take_any(): any.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "sched/request.h"
#include "sched/slot_table.h"

namespace kqview {

struct parked_request {
    std::shared_ptr<request> of;
    request_progress progress;
    int n_left_max;             // it goes on when its consumer has fewer items than this to take
    std::size_t n_bytes_ahead;  // of rows that its consumer had not taken when it was parked
};

class parking {
public:
    std::size_t size() const;
    // Bytes of rows ahead of all their consumers, as they were parked.
    std::size_t n_bytes_ahead() const;

    // Call before a request leaves its slot: add() then needs no memory.
    void make_place();
    void add(parked_request one);

    // Of the requests that `is_wanted` accepts the one with the highest priority, then the one that
    // was parked first; null: there is none.
    std::shared_ptr<request> first(
        const std::function<bool(const parked_request&)>& is_wanted) const;
    // Removes a request; empty if it is not parked.
    std::optional<parked_request> take(const std::shared_ptr<request>& wanted);
    std::optional<parked_request> take_any();

    std::vector<std::shared_ptr<request>> requests() const;

private:
    mutable std::mutex mutex_;
    std::vector<parked_request> parked_;  // in the order in which they left their slots
};

}  // namespace kqview
