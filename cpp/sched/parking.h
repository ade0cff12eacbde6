// Parked requests. When a consumer is behind and another one waits for a slot, the request of the
// first leaves its slot, and goes on in any slot once its consumer has taken half of what was
// computed ahead, or has answered its forward pass. What it needs for that is here. Its cells are
// evaluated again, as far as no slot still holds them, unless that would give other ones.
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
    struct tally {
        std::size_t n_requests = 0;
        std::size_t n_bytes_ahead = 0;  // of rows ahead of their consumers, as they were parked
    };
    // Of one owner's requests; null: of all.
    tally count(const owner_share* owner = nullptr) const;
    // Bytes that more cells may take.
    std::size_t n_bytes_left_for_cells() const;
    static constexpr std::size_t n_cell_bytes_max = std::size_t{2} << 30;

    // Call before a request leaves its slot: add() then needs no memory.
    void make_place();
    void add(parked_request one);

    // Of the requests that `is_wanted` accepts the one that comes before the others; null: there is
    // none.
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
