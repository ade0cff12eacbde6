// Picks tokens away from the engine thread when that can take long: under a grammar or a schema.
// The engine thread hands over a row of logits, goes on with other slots, and is rung when the
// token is there.
// Owner:   the engine loop. A ticket is one request's place in the lane; it owns the request's
//          picker, and is shared by its slot and the worker that picks, so that a request can leave
//          its slot while its picker works.
// Threads: the engine thread; the workers never touch a slot, a mailbox or the llama_context.
// Never:   makes the engine thread wait for a picker, except in await_quick(), and in close() for
//          one that was stopped.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/error.h"
#include "sched/runner.h"
#include "sched/wakeup.h"

namespace kqview {

class sampler_lane {
public:
    using clock = std::chrono::steady_clock;

    // At most this many pickers work at once; threads are started when they are needed.
    sampler_lane(std::size_t n_workers_max, std::shared_ptr<doorbell> engine)
        : n_workers_max_(n_workers_max), engine_(std::move(engine)) {}
    ~sampler_lane() { close(); }
    sampler_lane(const sampler_lane&) = delete;
    sampler_lane& operator=(const sampler_lane&) = delete;

    class ticket {
    public:
        explicit ticket(std::unique_ptr<token_picker> picker) : picker_(std::move(picker)) {}

    private:
        friend class sampler_lane;

        const std::unique_ptr<token_picker> picker_;
        std::vector<float> logits_;
        clock::time_point started_;
        // Guarded by the lane's mutex.
        bool is_working_ = false;
        bool is_abandoned_ = false;
        std::optional<picked_token> picked_;
        std::optional<error> failure_;
    };

    // Has the next token picked from a copy of `logits`. The ticket has no other one under way.
    void start(const std::shared_ptr<ticket>& one, std::span<const float> logits);

    bool is_done(const ticket& one) const;
    // Of a ticket that is done. Raises what its picker raised.
    picked_token take(ticket& one);

    // The request leaves its slot: its picker is stopped, and its token dropped.
    void abandon(ticket& one) noexcept;

    // Waits until no token of a ticket is under way, but for none longer than `bound` since its
    // start.
    void await_quick(clock::duration bound);

    // Stops every picker and ends the threads.
    void close();

private:
    void work();

    const std::size_t n_workers_max_;
    const std::shared_ptr<doorbell> engine_;
    std::vector<std::thread> workers_;

    mutable std::mutex mutex_;  // guards what follows, and tickets as they say
    std::condition_variable has_work_;
    std::condition_variable has_picked_;
    std::deque<std::shared_ptr<ticket>> waiting_;
    std::vector<std::shared_ptr<ticket>> working_;  // being picked, or waiting
    std::size_t n_idle_ = 0;
    bool is_closing_ = false;
};

}  // namespace kqview
