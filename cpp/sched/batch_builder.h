// Puts the next step together: which tokens it decodes, and which blocks their rows go to. A slot
// takes part when its mailbox has room and the pool has blocks for its rows.
// Owner: the engine loop. Threads: the engine thread.
// Why one ubatch a step: with a KV stream per slot llama.cpp splits a batch into equal runs of
// adjacent sequences; a step is therefore one token each of adjacent slots, or one prompt chunk of
// one slot.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "memory/block_pool.h"
#include "sched/delivery.h"
#include "sched/runner.h"
#include "sched/slot_table.h"

namespace kqview {

// One slot's part of a step.
struct batch_part {
    slot* target;
    int n_tokens;
    int n_rows;       // of its last tokens, captured as the prompt's
    bool samples;     // the logits of its last token are wanted
    bool is_last;     // nothing of the prompt is left after it
    int i_token = 0;  // its last token in the batch

    // Does the request end with its prompt, and so with this step?
    bool is_end() const { return is_last && !samples; }
};

class batch_builder {
public:
    batch_builder(runner& model, block_pool& pool, slot_table& slots, delivery& out,
                  engine_counters& counters)
        : model_(model), pool_(pool), slots_(slots), out_(out), counters_(counters) {}

    // Prompts and running texts take turns, so that a long prompt does not stall the others. A
    // request that fails here ends, and the others stay in the step. False: no slot can go on.
    bool fill();

    // The step, until the next fill().
    std::span<const step_token> tokens() const { return tokens_; }
    std::span<const step_rows> rows() const { return rows_; }
    std::span<const batch_part> parts() const { return parts_; }
    bool is_prefill() const { return is_prefill_; }

private:
    using clock = std::chrono::steady_clock;

    bool fill_prefill();
    bool fill_decode();
    bool try_add(slot& target, bool (batch_builder::*add)(slot&));
    bool add_prompt(slot& target);
    bool add_token(slot& target);
    void add_rows(const batch_part& part);
    batch_part next_chunk(slot& target) const;
    bool is_shared_step(const slot& target) const;
    bool make_ready(const batch_part& part);
    bool take_rows(slot& target, const row_layout& layout, captured_rows& rows);
    void starve(slot& target, std::size_t n_bytes, bool is_final);

    runner& model_;
    block_pool& pool_;
    slot_table& slots_;
    delivery& out_;
    engine_counters& counters_;
    std::vector<step_token> tokens_;
    std::vector<step_rows> rows_;
    std::vector<batch_part> parts_;
    bool is_prefill_ = false;
    std::size_t i_next_slot_ = 0;  // of the next step that generates
};

}  // namespace kqview
