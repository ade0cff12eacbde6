// The interface to the engine thread: submit, cancel, work on a slot, close.
// Owner:   owns the runner (and so the llama_context), the engine loop and its thread; one per
//          Engine. Held by a scheduler_handle: if the thread hangs for good, everything it uses
//          stays alive.
// Threads: any; call members that wait without the GIL. The engine thread blocks every signal and
//          never takes the GIL.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fork_guard.h"
#include "base/heartbeat.h"
#include "base/ids.h"
#include "memory/block_pool.h"
#include "sched/command_queue.h"
#include "sched/delivery.h"
#include "sched/engine_loop.h"
#include "sched/forward_pass.h"
#include "sched/mailbox.h"
#include "sched/request.h"
#include "sched/runner.h"
#include "sched/slot_cache.h"
#include "sched/slot_table.h"
#include "sched/wakeup.h"

namespace kqview {

class scheduler {
public:
    // At most `n_queue_max` requests wait for a slot.
    scheduler(std::unique_ptr<runner> model, std::shared_ptr<block_pool> pool,
              int n_queue_max = 1024, const pace& given = {});
    ~scheduler();

    // Assigns the request's id and mailbox, and queues it. Raises queue_full, closed.
    void submit(const std::shared_ptr<request>& wanted);

    // Ends a request at the next step and rolls its slot back to the last token taken. Returns at
    // once; mailbox::arm_settled tells when it is complete.
    void cancel(const std::shared_ptr<request>& wanted);

    // Answers a forward pass of a steered request, with which the engine goes on. Returns at once;
    // what follows comes through the mailbox. Raises what forward_pass::answer raises, and closed.
    void answer(const std::shared_ptr<request>& wanted, forward_pass& pass, pass_answer given);

    // Runs `work` on the engine thread between two steps, while the caller waits; raises what it
    // raises, and busy if the slot is in use. `goes_on` as in command_queue::run_on_slots. False:
    // the caller gave up.
    bool run_on_slot(
        slot_id id, const slot_work& work,
        const std::function<bool()>& goes_on = [] { return true; });

    // As slot_table::branch, between two steps; raises what that raises, and request if there are
    // not that many other slots. `goes_on`, False: as of run_on_slot.
    bool branch(
        slot_id from, int n, std::vector<slot_id>& branches,
        const std::function<bool()>& goes_on = [] { return true; });

    // Ends the thread, even in the middle of a decode; running and queued requests end with
    // errc::closed. A thread that does not end within the limit is lost: its requests end all the
    // same, and everything it uses (this object, the runner, the blocks) stays alive until a later
    // close() finds that it has ended. Idempotent.
    void close(std::chrono::duration<double> limit = close_limit);
    static constexpr std::chrono::seconds close_limit{30};

    // True if close() gave up on the engine thread.
    bool is_lost() const { return is_lost_.load(); }

    // What the engine thread is doing; takes no lock.
    heartbeat::reading health() const { return heart_->read(); }

    // Closes, and frees everything unless the thread is lost.
    struct deleter {
        void operator()(scheduler* one) const;
    };

    // Raises closed after close() and in a forked child.
    void check_open() const;
    void check_not_forked() const;
    bool is_forked() const { return fork_.is_forked(); }
    bool is_closed() const { return fork_.is_forked() || queue_->is_closed(); }

    int n_slots() const { return n_slots_; }
    int n_queued() const { return static_cast<int>(queue_->n_waiting()); }
    int n_parked() const { return static_cast<int>(loop_->parked().size()); }
    std::vector<token_id> tokens_of(slot_id id) const;
    std::vector<std::size_t> checkpoints_of(slot_id id) const;
    // One view per slot; also after close().
    std::vector<slot_view> slots() const { return loop_->slots().views(); }
    double uptime_s() const;
    const engine_counters& counters() const { return loop_->counters(); }
    const std::shared_ptr<block_pool>& pool() const { return pool_; }

private:
    void check_slot(slot_id id) const;

    const fork_guard fork_;
    const std::shared_ptr<doorbell> bell_ = std::make_shared<doorbell>();
    const std::shared_ptr<block_pool> pool_;
    std::unique_ptr<runner> runner_;
    const std::shared_ptr<heartbeat> heart_ = std::make_shared<heartbeat>();
    std::unique_ptr<command_queue> queue_;
    std::unique_ptr<engine_loop> loop_;
    const int n_slots_;
    const engine_loop::clock::time_point opened_ = engine_loop::clock::now();

    std::mutex close_mutex_;  // one caller joins at a time
    std::unique_ptr<std::thread> thread_;
    std::future<void> ended_;  // ready when the thread has nothing left to do
    std::atomic<bool> is_lost_{false};
};

using scheduler_handle = std::unique_ptr<scheduler, scheduler::deleter>;

}  // namespace kqview
