// What follows a slot's last token: sampled from the logits of a step, here, in the sampler lane or
// by the consumer of a steered request; then the guesses that came true.
// Owner:   the engine loop.
// Threads: the engine thread.
#pragma once

#include <chrono>

#include "sched/delivery.h"
#include "sched/runner.h"
#include "sched/sampler_lane.h"
#include "sched/slot_table.h"

namespace kqview {

class slot_sampler {
public:
    using clock = std::chrono::steady_clock;

    slot_sampler(runner& model, slot_table& slots, sampler_lane& lane, delivery& out,
                 engine_counters& counters)
        : model_(model), slots_(slots), lane_(lane), out_(out), counters_(counters) {}

    // Hands out what the logits of a slot's last token give. `is_wide`: they are of a step with
    // guesses, which rounds otherwise.
    void go_on(slot& target, float* logits, bool is_wide);
    // Keeps what a step gave for the likely answer of a slot's consumer, until that comes.
    void keep_ahead(slot& target, const float* logits);
    // Hands out what follows a slot's last token for as long as that was guessed: each next token
    // is sampled as if its step had been a step of its own, from the logits that this one left.
    // Neither the picker nor the consumer can tell the difference.
    void follow_draft(slot& target);
    // Delivers the tokens that the lane has picked since. False: there were none. `last_step`: how
    // long it took.
    bool take_picked(clock::duration last_step);

private:
    void sample(slot& target, float* logits, bool is_wide);
    bool take_guess(slot& target);
    void evaluate_alone(slot& target);

    runner& model_;
    slot_table& slots_;
    sampler_lane& lane_;
    delivery& out_;
    engine_counters& counters_;
};

}  // namespace kqview
