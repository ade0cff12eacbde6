// Guesses how the texts of a step go on, as far as that is worth its time: behind the token of each
// slot its guesses, as many of each, since llama.cpp computes equal runs of adjacent sequences.
// Owner:   the batch builder.
// Threads: the engine thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <vector>

#include "memory/block_pool.h"
#include "sched/batch.h"
#include "sched/delivery.h"
#include "sched/model_drafter.h"
#include "sched/runner.h"
#include "sched/slot_table.h"
#include "sched/step_costs.h"

namespace kqview {

class guesser {
public:
    using clock = std::chrono::steady_clock;

    guesser(runner& model, block_pool& pool, slot_table& slots, delivery& out, step_costs& costs)
        : model_(model), pool_(pool), slots_(slots), out_(out), costs_(costs) {
        if (auto* const smaller = model.draft_model()) drafter_.emplace(*smaller);
    }

    // After a step: what guesses has to see of its prompts as they are evaluated.
    void keep_up(const batch& step);
    // Puts guesses behind the tokens of a step of texts. Where memory runs out, the tokens alone
    // are the step.
    void add_to(batch& step);
    // The time that a second model took for that step.
    clock::duration drafting() const { return drafting_; }

private:
    void collect(const batch& step);
    int n_guessable(const batch_part& part, int n_most) const;
    std::size_t n_worth_guessing(const batch& step) const;

    runner& model_;
    block_pool& pool_;
    slot_table& slots_;
    delivery& out_;
    step_costs& costs_;
    std::optional<model_drafter> drafter_;
    std::vector<model_drafter::text> guessed_;  // what it is to guess on; scratch
    clock::duration drafting_{};
};

}  // namespace kqview
