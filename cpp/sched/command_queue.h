// What callers ask of the engine thread, in one queue: run a request, cancel one, work on an idle
// slot, close. Commands are taken in order; a request that was submitted waits here, by priority,
// until a slot is free. Closing goes before everything else.
// Owner:   the scheduler. Threads: as the members say.
// Never:   runs a command; allocates where one is taken.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/error.h"
#include "sched/request.h"
#include "sched/slot_cache.h"
#include "sched/wakeup.h"

namespace kqview {

class command_queue {
public:
    // Work on a slot; on the stack of its caller, who waits because the work may write into the
    // caller's memory.
    struct order {
        slot_id slot;
        const slot_work& work;
        wake_handle done{};
        // Guarded by the queue.
        bool is_done = false;
        std::optional<error> failure{};
    };
    struct command {
        enum class kind { none, cancel, work, close } what = kind::none;
        std::shared_ptr<request> cancelled{};
        order* work = nullptr;
    };
    enum class cancelling {
        withdrawn,  // the request was still waiting for a slot, and is gone
        ordered,    // the engine thread carries it out
        closed,     // no thread does: everything ends
    };

    // At most `n_waiting_max` requests wait for a slot.
    command_queue(std::shared_ptr<doorbell> engine, std::size_t n_waiting_max)
        : engine_(std::move(engine)), n_waiting_max_(n_waiting_max) {}

    // ---- any thread

    // Gives the request its id and queues it behind those of its priority. False: the queue is
    // full. Raises closed.
    bool submit(const std::shared_ptr<request>& wanted);

    cancelling cancel(const std::shared_ptr<request>& wanted);

    // Queues the work and blocks until it was done; raises what it raised. Raises closed. Call it
    // without the GIL. `goes_on` is asked each time a signal handler ran on the waiting thread.
    // Once it says no, false is returned: the work was not begun, or it was and is done now,
    // whatever came of it.
    bool run_on_slot(slot_id slot, const slot_work& work, const std::function<bool()>& goes_on);

    // Every later command is refused, and take() says `close`.
    void close();
    bool is_closed() const;
    std::size_t n_waiting() const;
    std::size_t n_waiting_max() const { return n_waiting_max_; }

    // ---- engine thread

    // The next cancellation or work.
    command take();
    void finish(order& one, std::optional<error> failure);
    // The first waiting request that `may_run` accepts: one that waits for a certain slot does not
    // hold up those behind it.
    std::shared_ptr<request> take_waiting(const std::function<bool(const request&)>& may_run);
    std::vector<std::shared_ptr<request>> waiting() const;

    // ---- whoever ends what was left when it closed

    command take_left();

private:
    void check_open() const;
    command take_first();

    const std::shared_ptr<doorbell> engine_;
    const std::size_t n_waiting_max_;

    mutable std::mutex mutex_;                      // guards what follows and every order's end
    std::deque<std::shared_ptr<request>> waiting_;  // by priority, then arrival
    std::deque<command> commands_;
    bool is_closed_ = false;
    request_id last_id_ = 0;
};

}  // namespace kqview
