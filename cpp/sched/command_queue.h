// One queue of commands from callers to the engine thread: run a request, cancel one, go on with a
// steered one, work on an idle slot, close. Commands run in order, except that closing goes first.
// A submitted request waits here until a slot is free; owners take turns.
// Owner:   the scheduler.
// Threads: see the sections of the class.
// Never:   runs a command; allocates while handing one to the engine thread.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "sched/forward_pass.h"
#include "sched/request.h"
#include "sched/wakeup.h"

namespace kqview {

class slot_table;

// A caller's work on the slots.
using table_work = std::function<void(slot_table&)>;

class command_queue {
public:
    // Work on slots. Lives on the stack of its caller, who blocks, because the work may write into
    // the caller's memory.
    struct order {
        const table_work& work;
        wake_handle done{};
        // Guarded by the queue.
        bool is_done = false;
        std::optional<error> failure{};
    };
    struct command {
        enum class kind { none, cancel, answer, work, close } what = kind::none;
        std::shared_ptr<request> of{};  // which is cancelled, or gets its answer
        pass_answer answer{};
        order* work = nullptr;
    };
    enum class cancelling {
        withdrawn,  // the request was still waiting for a slot, and is gone
        ordered,    // the engine thread carries it out
        closed,     // the engine is closed: everything ends
    };

    // At most `n_waiting_max` requests of an owner wait for a slot.
    command_queue(std::shared_ptr<doorbell> engine, std::size_t n_waiting_max)
        : engine_(std::move(engine)), n_waiting_max_(n_waiting_max) {}

    // ---- any thread

    // Assigns the request's id and its owner's share, and queues it. Returns false if too many of
    // that owner wait. Raises closed.
    bool submit(const std::shared_ptr<request>& wanted);

    cancelling cancel(const std::shared_ptr<request>& wanted);

    // What a steered request goes on with. Raises closed.
    void answer(const std::shared_ptr<request>& wanted, pass_answer given);

    // Queues the work and blocks until it is done; raises what the work raised. Raises closed. Call
    // without the GIL. `goes_on` is called each time a signal handler has run on the waiting
    // thread. If it returns false, run_on_slots returns false: either the work never began, or it
    // has begun and is done, and its result or error is dropped.
    bool run_on_slots(const table_work& work, const std::function<bool()>& goes_on);

    // Refuses every later command; take() then returns `close`.
    void close();
    bool is_closed() const;
    std::size_t n_waiting() const;
    std::size_t n_waiting_max() const { return n_waiting_max_; }

    // ---- engine thread

    // The next cancellation, answer or work, or `close`.
    command take();
    void finish(order& one, std::optional<error> failure);
    // Of the waiting requests that `may_run` accepts, the one that comes before the others. A
    // request that waits for a certain slot does not hold up those behind it.
    std::shared_ptr<request> take_waiting(const std::function<bool(const request&)>& may_run);
    // The same without removing it; take() then does, unless it was cancelled meanwhile.
    std::shared_ptr<request> first_waiting(
        const std::function<bool(const request&)>& is_wanted) const;
    bool take(const std::shared_ptr<request>& wanted);
    std::vector<std::shared_ptr<request>> waiting() const;
    // Whether there may be requests of several owners, anywhere in the engine.
    bool has_owners() const;

    // ---- the thread that ends the commands left over after close

    command take_left();

private:
    using waiting_list = std::deque<std::shared_ptr<request>>;

    void check_open() const;
    void push(command one);
    std::shared_ptr<owner_share> share_of(const std::string& owner);
    waiting_list::const_iterator next_of(
        const std::function<bool(const request&)>& is_wanted) const;
    command take_first();

    const std::shared_ptr<doorbell> engine_;
    const std::size_t n_waiting_max_;

    mutable std::mutex mutex_;  // guards what follows and every order's end
    waiting_list waiting_;      // in the order of arrival
    std::vector<std::pair<std::string, std::weak_ptr<owner_share>>> shares_;  // while in use
    std::deque<command> commands_;
    bool is_closed_ = false;
    request_id last_id_ = 0;
};

}  // namespace kqview
