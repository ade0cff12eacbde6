// Work on idle slots (save, restore, truncate, shift) that Python threads order and the engine thread does
// between two steps. A slot in use is not waited for: the caller gets errc::busy.
// Owner:   the scheduler. Threads: run() and close() on any thread, carry_out() on the engine thread.
// Why the caller waits to the end: the work may write into memory of the caller.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "sched/idle_slot.h"

namespace kqview {

class slot_orders {
public:
    // Queues the work, calls `ring` and blocks until it was done; raises what it raised. Raises closed after
    // close(), whose error it passes on. Call it without the GIL.
    void run(slot_id slot, const slot_work& work, const std::function<void()>& ring);

    // Does what is queued, in order. `do_work` gives an idle slot to the work, and may raise.
    void carry_out(const std::function<void(slot_id, const slot_work&)>& do_work);

    // Ends what is queued, and what comes later, with `failure`.
    void close(const error& failure);

private:
    struct order {
        slot_id slot;
        const slot_work& work;
        bool is_done = false;
        std::optional<error> failure;
    };

    void finish(order& one, std::optional<error> failure);

    std::mutex mutex_;  // guards what follows and every order's end
    std::condition_variable done_;
    std::deque<order*> queue_;  // on the stacks of the callers, who wait
    std::optional<error> closed_;
};

}  // namespace kqview
