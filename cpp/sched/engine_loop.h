// The loop of the engine thread: take commands, admit requests to slots, fill a step, decode it,
// sample, deliver; sleep when no slot can go on.
// Owner:   the scheduler, which calls run() on the engine thread.
// Threads: the engine thread; abandon(), counters() and the members of slots() that say so: any.
// Never:   lets an error escape: an error ends the request that caused it, or all running requests
//          if none did.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/heartbeat.h"
#include "base/ids.h"
#include "memory/block_pool.h"
#include "sched/batch.h"
#include "sched/batch_builder.h"
#include "sched/command_queue.h"
#include "sched/delivery.h"
#include "sched/forward_pass.h"
#include "sched/parking.h"
#include "sched/request.h"
#include "sched/runner.h"
#include "sched/sampler_lane.h"
#include "sched/slot_sampler.h"
#include "sched/slot_table.h"
#include "sched/step_costs.h"
#include "sched/wakeup.h"
#include "tap/step_result.h"

namespace kqview {

// How long requests wait for each other, and what is kept to go back to.
struct pace {
    // Of two consumers that take turns in a slot; see slot_table.
    std::chrono::milliseconds least_turn{10};
    // Of a text, for the prompts of others; see step_costs.
    step_costs::seconds max_gap{};
    checkpoint_options kept{};
};

class engine_loop {
public:
    using clock = std::chrono::steady_clock;

    engine_loop(runner& model, std::shared_ptr<block_pool> pool, std::shared_ptr<heartbeat> heart,
                std::shared_ptr<doorbell> bell, command_queue& queue, const pace& given);

    // Returns once the queue is closed and every request has ended.
    void run();

    // Any thread, when the engine thread is lost: ends all requests and leaves the slots as they
    // are. Callers whose work on a slot has begun keep waiting: the thread may still be running it.
    void abandon();

    const slot_table& slots() const { return slots_; }
    const parking& parked() const { return parked_; }
    const engine_counters& counters() const { return counters_; }
    engine_counters& counters() { return counters_; }

private:
    bool take_commands();
    void take_answer(const std::shared_ptr<request>& of, pass_answer answer);
    void admit();
    void start(const std::shared_ptr<request>& wanted);
    void go_on(parked_request one);
    bool step();
    void decode();
    void hand_out(const batch_part& part, const step_result& result);
    bool may_displace(const request& queued) const;
    bool make_way();
    void park(slot& target);
    bool tell_stalled();
    std::optional<clock::time_point> next_deadline() const;
    void end_queued();
    void fail(const request& wanted, const error& failure);

    runner& model_;
    const std::shared_ptr<block_pool> pool_;
    const std::shared_ptr<heartbeat> heart_;
    const std::shared_ptr<doorbell> bell_;
    command_queue& queue_;
    engine_counters counters_;
    slot_table slots_;
    parking parked_;
    clock::time_point looked_for_way_;  // when make_way() last began
    sampler_lane lane_;
    delivery out_;
    slot_sampler sampling_;
    batch_builder batch_;
    clock::duration last_decode_{};
};

}  // namespace kqview
