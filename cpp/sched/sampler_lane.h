// Picks tokens off the engine thread when that can take long: under a grammar or a schema. The
// engine thread hands over a row of logits and goes on with other slots; its doorbell rings when
// the token is ready.
// Owner:   the engine loop. A ticket is one request's place in the lane. It owns the request's
//          picker and is shared by the slot and the worker, so that a request can leave its slot
//          while its picker runs.
// Threads: the engine thread; the workers never touch a slot, a mailbox or the llama_context.
// Never:   makes the engine thread wait for a picker, except in await_quick(), and in close() for a
//          stopped one.
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
#include <utility>
#include <vector>

#include "base/error.h"
#include "sample/token_picker.h"
#include "sched/wakeup.h"

namespace kqview {

class sampler_lane {
public:
    using clock = std::chrono::steady_clock;

    // At most `n_workers_max` pickers run at once; threads start on demand.
    sampler_lane(std::size_t n_workers_max, std::shared_ptr<doorbell> engine)
        : n_workers_max_(n_workers_max), engine_(std::move(engine)) {}
    ~sampler_lane() { close(); }

    class ticket {
    public:
        explicit ticket(std::unique_ptr<token_picker> picker) : picker_(std::move(picker)) {}

    private:
        friend class sampler_lane;

        const std::unique_ptr<token_picker> picker_;
        std::vector<float> logits_;
        float tie_tolerance_ = -1;
        clock::time_point started_;
        // Guarded by the lane's mutex.
        bool is_working_ = false;
        bool is_abandoned_ = false;
        std::optional<picked_token> picked_;
        std::optional<error> failure_;
    };

    // Queues picking the next token from a copy of `logits`. The ticket must have no other token in
    // progress. Nothing is picked if the picker calls it tied within `tie_tolerance`; below 0, it
    // is not asked.
    void start(const std::shared_ptr<ticket>& one, std::span<const float> logits,
               float tie_tolerance = -1);

    bool is_done(const ticket& one) const;
    // The token of a ticket that is done; empty if it was tied. Raises what its picker raised.
    std::optional<picked_token> take(ticket& one);

    // The request leaves its slot: its picker is stopped, and its token dropped.
    void abandon(ticket& one) noexcept;

    // Waits until no token is in progress, but for no token longer than `bound` after its start.
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
