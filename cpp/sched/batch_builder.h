// Builds the next step: the tokens it decodes, and the blocks that receive their rows. A slot takes
// part if its mailbox has room and the pool has blocks for its rows.
// Owner:   the engine loop.
// Threads: the engine thread.
// Why one ubatch per step: with one KV stream per slot, llama.cpp splits a batch into equal runs of
// adjacent sequences. So a step is either one token each of adjacent slots, one prompt chunk of
// one slot, or equal chunks of adjacent slots whose prompts came together. Behind the tokens of
// texts there may be guesses, as many of each slot: a slot with fewer has its run filled up. Whole
// prompts that are embedded share a step where llama.cpp pools them alike.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "memory/block_pool.h"
#include "sched/batch.h"
#include "sched/delivery.h"
#include "sched/guesser.h"
#include "sched/request.h"
#include "sched/runner.h"
#include "sched/slot_table.h"
#include "sched/step_costs.h"
#include "tap/plan.h"

namespace kqview {

class batch_builder {
public:
    using clock = std::chrono::steady_clock;

    // `max_gap`: as of step_costs.
    batch_builder(runner& model, block_pool& pool, slot_table& slots, delivery& out,
                  engine_counters& counters, step_costs::seconds max_gap)
        : model_(model),
          pool_(pool),
          slots_(slots),
          out_(out),
          counters_(counters),
          costs_(max_gap),
          guesser_(model, pool, slots, out, costs_),
          served_at_(slots.size()) {
        order_.reserve(slots.size());
    }

    // Fills the next step. Prefill and decode steps alternate, so that a long prompt does not stall
    // the other slots; between owners by time, else by steps. If a request fails here it ends, and
    // the others stay in the step. False: no slot can go on.
    bool fill();

    // The step is evaluated.
    void keep_up() { guesser_.keep_up(step_); }
    // The step took so long.
    void note(clock::duration took) {
        if (!is_prefill_) took -= guesser_.drafting();
        costs_.note(is_prefill_, step_.tokens.size(), took);
    }

    // Until when prompts wait for others that come with them, as they do from clients that began at
    // one moment: they then go through the model together, and none of the texts waits for another
    // one's prompt. Only where nothing has begun and a slot is free; a hundredth of the time that
    // the prompts take, so that one that stays alone hardly notices. Empty: they do not wait.
    std::optional<clock::time_point> company_until();

    // The current step; valid until the next fill().
    const batch& step() const { return step_; }
    // False if a text in it goes on. Call before the step's tokens are handed out.
    bool is_prefill() const {
        return std::all_of(step_.parts.begin(), step_.parts.end(),
                           [](const batch_part& part) { return part.is_prompt(); });
    }

private:
    bool fill_prefill();
    void plan_cohort(std::size_t first);
    bool may_join(slot& target) const;
    bool fill_decode();
    bool fill_decode(const lora_scales* only);
    bool try_add(slot& target, bool (batch_builder::*add)(slot&));
    bool add_prompt(slot& target);
    bool prepare_token(slot& target);
    bool add_token(slot& target);
    void add_rows(const batch_part& part);
    int n_most(const slot& target) const;
    batch_part next_chunk(slot& target) const;
    bool make_ready(const batch_part& part);
    bool take_rows(slot& target, const row_layout& layout, captured_rows& rows);
    void starve(slot& target, std::size_t n_bytes, bool is_final);

    runner& model_;
    block_pool& pool_;
    slot_table& slots_;
    delivery& out_;
    engine_counters& counters_;
    batch step_;
    step_costs costs_;
    guesser guesser_;
    bool is_prefill_ = false;
    std::uint64_t n_fills_ = 0;
    // A prompt's step holds the texts of other owners up: then they have as much time to go on.
    bool delays_others_ = false;
    clock::time_point filled_;              // the last step
    clock::time_point texts_until_;         // no prompt before, if a text can go on
    std::vector<std::uint64_t> served_at_;  // the fill in which each slot last got a token
    std::vector<std::size_t> order_;        // of slots; scratch
    // Prompts that share the step: adjacent slots, and tokens of each; 0: they do not.
    std::size_t end_of_cohort_ = 0;
    int n_each_ = 0;
    // Prompts that wait for company: how many, and when the first and the last of them came.
    std::size_t n_gathered_ = 0;
    clock::time_point first_came_;
    clock::time_point last_came_;
    // The turn of a slot's LoRA scales, while slots with others wait.
    std::size_t i_leader_ = 0;
    int n_left_ = 0;  // decode steps of the turn
};

}  // namespace kqview
