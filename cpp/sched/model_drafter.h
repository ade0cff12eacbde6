// Guesses how texts go on with a second, smaller model of the same vocabulary: what it would choose
// itself, greedily, for all texts of a step at once. Its cache has a sequence for each slot, which
// follows the slot's text: whatever became of that (truncated, taken back, another request's), what
// both begin with is kept and the rest evaluated.
// Owner:   the batch builder; the model belongs to the runner.
// Threads: the engine thread.
// Never:   fails a request: a model that does not work guesses nothing from then on.
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "sched/runner.h"

namespace kqview {

class model_drafter {
public:
    // A text that is to be guessed on.
    struct text {
        slot_id slot;
        std::span<const token_id> tokens;  // in the slot's cache
        token_id last;                     // that follows them
        std::size_t n_most;                // tokens to guess
        std::vector<token_id>& guess;      // where they go
    };

    explicit model_drafter(runner& model)
        : model_(model), held_(static_cast<std::size_t>(model.n_slots())) {}

    // Evaluates the tokens of a prompt that a model which needs_states() has not seen, while what
    // the other one made of them is known. Raises std::bad_alloc.
    void keep_up(slot_id slot, std::span<const token_id> tokens);

    // `texts`: of slots in ascending order. One whose prompt the model has not seen yet is not
    // guessed on: at most `n_catch_up` of its tokens are evaluated. Raises std::bad_alloc.
    // Returns how long a token of all guesses took; 0 without any.
    std::chrono::duration<double> guess(std::span<text> texts, std::size_t n_catch_up);

    // The most tokens that it can guess.
    std::size_t n_most() const;

private:
    using ids = std::vector<token_id>;

    void follow(slot_id slot, std::span<const token_id> tokens, std::size_t n_catch_up);
    void give_up(const error& failure);
    void take_over(slot_id slot, std::span<const token_id> tokens);
    void cut(slot_id slot, std::size_t n_kept);
    void extend(std::span<text* const> texts);
    void decode();
    bool is_chain() const { return model_.n_predicting() > 1; }
    ids& held(slot_id slot) { return held_[static_cast<std::size_t>(slot)]; }

    runner& model_;
    std::vector<ids> held_;  // by slot: the ids in its sequence
    std::vector<step_token> step_;
    std::vector<text*> ready_, adjacent_;
    bool is_broken_ = false;
};

}  // namespace kqview
