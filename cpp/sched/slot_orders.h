// Work on idle slots (save, restore, truncate, shift) that Python threads order and the engine
// thread does between two steps. A slot in use is not waited for: the caller gets errc::busy.
// Owner:   the scheduler. Threads: run() and close() on any thread, carry_out() on the engine
//          thread.
// Why the caller waits to the end: the work may write into memory of the caller.
#pragma once

#include <deque>
#include <functional>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "sched/idle_slot.h"
#include "sched/wakeup.h"

namespace kqview {

class slot_orders {
public:
    // Queues the work, calls `ring` and blocks until it was done; raises what it raised. Raises
    // closed after close(), whose error it passes on. Call it without the GIL. `goes_on` is asked
    // each time a signal handler ran on the waiting thread. Once it says no, false is returned: the
    // work was not begun, or it was and is done now, whatever came of it.
    bool run(slot_id slot, const slot_work& work, const std::function<void()>& ring,
             const std::function<bool()>& goes_on);

    // Does what is queued, in order. `do_work` gives an idle slot to the work, and may raise.
    void carry_out(const std::function<void(slot_id, const slot_work&)>& do_work);

    // Ends what is queued, and what comes later, with `failure`.
    void close(const error& failure);

private:
    struct order {
        slot_id slot;
        const slot_work& work;
        wake_handle done{};
        bool is_done = false;
        std::optional<error> failure{};
    };

    bool is_done(order& one);
    bool withdraw(order& one);
    void finish(order& one, std::optional<error> failure);

    std::mutex mutex_;          // guards what follows and every order's end
    std::deque<order*> queue_;  // on the stacks of the callers, who wait
    std::optional<error> closed_;
};

}  // namespace kqview
