// The "fill" phase of a step: which tokens the next decode gets, and which block each row goes to.
// Threads: the engine thread.
#include <algorithm>
#include <string>
#include <utility>

#include "sched/step.h"

namespace kqview {

namespace {

// Prompt tokens of a step that others wait for: evaluating more at once is faster, and stalls them.
constexpr int n_shared_chunk = 128;
constexpr std::size_t n_blocks_of_budget = 4;         // of prompt rows
constexpr std::chrono::hours longest_wait{24 * 365};  // well within the clock's range

}  // namespace

// Adds what `add` does for one slot to the step. Where that fails its request ends and the step is
// as before.
bool step::try_add(slot& target, bool (step::*add)(slot&)) {
    const auto n_batch = batch_.size();
    const auto n_rows = rows_.size();
    const auto n_work = work_.size();
    try {
        return (this->*add)(target);
    } catch (...) {
        auto failure = current_failure();
        batch_.resize(n_batch);
        rows_.resize(n_rows);
        work_.resize(n_work);
        drop_unknown(target);
        finish(target, finish_reason::error, std::move(failure));
        return false;
    }
}

bool step::fill_prefill() {
    for (auto& target : slots_) {
        if (target.active && try_add(target, &step::add_prompt)) {
            prefilled_last_ = true;
            return true;
        }
    }
    return false;
}

bool step::add_prompt(slot& target) {
    if (await_fork(target) || !is_in_prompt(target)) return false;
    const auto& prompt = target.active->prompt;
    const auto n_done = target.tokens.size();
    const auto piece = next_chunk(target);
    if (!make_ready(target, piece)) return false;
    const auto n = static_cast<std::size_t>(piece.n_tokens);
    make_place(target, n);
    for (std::size_t i = 0; i < n; ++i) {
        batch_.push_back({target.id, prompt[n_done + i], static_cast<std::int32_t>(n_done + i),
                          piece.samples && i + 1 == n});
    }
    const int i_token = piece.n_tokens - 1;
    add_rows(target, i_token, piece.n_rows);
    work_.push_back({&target, i_token, piece.samples, piece.n_rows,
                     piece.is_last && target.active->only_attends});
    return true;
}

// Once llama.cpp has decoded nothing may fail for want of memory: the ids have their place by then.
void step::make_place(slot& target, std::size_t n_tokens) {
    const auto n_needed = target.tokens.size() + n_tokens;
    if (target.tokens.capacity() >= n_needed) return;
    const std::lock_guard lock(tokens_mutex_);
    target.tokens.reserve(std::max(n_needed, 2 * target.tokens.capacity()));
}

// As much of the prompt as one step takes; less where the rows of all its tokens would fill more
// than a part of the pool, so that a consumer can hold some blocks and more come.
step::chunk step::next_chunk(const slot& target) const {
    const auto& active = *target.active;
    const auto n_prompt = static_cast<int>(active.prompt.size());
    const auto n_done = static_cast<int>(target.tokens.size());
    chunk piece{};
    // What is pooled has to be one step.
    const bool is_whole = active.embeds && !model_.can_split_embedding();
    const int n_most = !is_whole && is_shared_step(target) ? n_shared_chunk : model_.n_chunk();
    piece.n_tokens = std::min(n_prompt - n_done, std::min(n_most, model_.n_chunk()));
    if (active.n_prompt_rows > 0) {
        // Tokens of this piece before the first one whose rows are wanted.
        const int n_before = std::max(0, n_prompt - active.n_prompt_rows - n_done);
        piece.n_rows = std::max(0, piece.n_tokens - n_before);
        const auto row_bytes = std::max<std::size_t>(1, prompt_layout(target, 1).size_bytes);
        const auto n_rows_max =
            std::min(pool_->stats().budget_bytes / n_blocks_of_budget / row_bytes,
                     static_cast<std::size_t>(model_.n_prompt_rows()));
        if (model_.has_cache() && static_cast<std::size_t>(piece.n_rows) > n_rows_max) {
            piece.n_rows = std::max(1, static_cast<int>(n_rows_max));
            piece.n_tokens = n_before + piece.n_rows;
        }
    }
    piece.is_last = n_done + piece.n_tokens == n_prompt;
    piece.samples = piece.is_last && !active.only_attends;
    return piece;
}

// Does another slot generate, and so wait for this one's prompt?
bool step::is_shared_step(const slot& target) const {
    return std::any_of(slots_.begin(), slots_.end(), [&](const slot& one) {
        return one.id != target.id &&
               (one.state == slot_state::decode || one.state == slot_state::sampling);
    });
}

bool step::fill_decode() {
    const auto n_slots = slots_.size();
    const auto is_generating = [](const slot& one) {
        return one.active && !is_in_prompt(one) && one.state != slot_state::sampling;
    };
    for (std::size_t i = 0; i < n_slots; ++i) {
        auto next = (decode_cursor_ + i) % n_slots;
        // A run of adjacent slots that are ready, from the first one found.
        while (next < n_slots && is_generating(slots_[next]) &&
               try_add(slots_[next], &step::add_token)) {
            ++next;
        }
        if (!batch_.empty()) {
            decode_cursor_ = next % n_slots;
            prefilled_last_ = false;
            return true;
        }
    }
    return false;
}

bool step::add_token(slot& target) {
    if (!make_ready(target, {1, 0, true, true})) return false;
    make_place(target, 1);
    const int i_token = static_cast<int>(batch_.size());
    batch_.push_back(
        {target.id, target.pending, static_cast<std::int32_t>(target.tokens.size()), true});
    add_rows(target, i_token, 0);
    work_.push_back({&target, i_token, true, 0, false});
    return true;
}

// May this slot go on now? Sets its state, and takes the blocks that its rows will need.
bool step::make_ready(slot& target, const chunk& piece) {
    const auto& active = *target.active;
    const bool is_prompt = is_in_prompt(target);
    if (!piece.samples && piece.n_rows == 0) return true;  // nobody has to take anything
    // Rows of a prompt are large: one run of them waits while the next one is computed.
    const int run_ahead = model_.can_truncate()
                              ? std::min(active.run_ahead, piece.n_rows > 0 ? 1 : active.run_ahead)
                              : 0;
    // What is on its way to the consumer is as good as there.
    const int n_coming = n_on_the_way(target);
    const bool has_room =
        (n_coming == 0 || run_ahead > 0) && active.box->has_room(std::max(0, run_ahead - n_coming));
    if (!has_room) {
        target.starved_until.reset();
        change(target.state, slot_state::paused);
        return false;
    }
    if (!is_prompt && !make_room(target)) return false;
    const auto n_columns = is_prompt ? active.prompt.size() : target.tokens.size() + 1;
    if (piece.n_rows > 0 &&
        !take_block(target, prompt_layout(target, piece.n_rows), target.prompt_block)) {
        return false;
    }
    if (piece.samples && active.capture &&
        !take_block(target, active.capture->layout(static_cast<int>(n_columns)), target.block)) {
        return false;
    }
    change(target.state, is_prompt ? slot_state::prefill : slot_state::decode);
    return true;
}

row_layout step::prompt_layout(const slot& target, int n_rows) const {
    const auto n_columns = static_cast<int>(target.active->prompt.size());
    return target.active->capture->layout(n_columns, n_rows, false);
}

bool step::take_block(slot& target, const row_layout& layout, std::shared_ptr<lease>& block) {
    if (block) return true;  // from a try in which the other one found no room
    block = pool_->try_take(layout.size_bytes);
    // Nothing comes back from a consumer that waits, but it may have dropped a view after our try.
    // A token on its way to the consumer has a block that he may give back.
    const bool is_final = !block && n_on_the_way(target) == 0 && target.active->box->is_starving();
    if (is_final) block = pool_->try_take(layout.size_bytes);
    if (block) {
        target.starved_until.reset();
        return true;
    }
    if (is_final && target.active->on_full == full_policy::drop) {
        counters_.n_dropped_rows += static_cast<std::uint64_t>(layout.n_queries);
        return true;
    }
    starve(target, layout.size_bytes, is_final);
    return false;
}

// No room for the next row: the slot does not take part in this step. As long as the consumer has
// tokens to take, their blocks may come back: running ahead stops first.
void step::starve(slot& target, std::size_t n_bytes, bool is_final) {
    change(target.state, slot_state::starved);
    if (!is_final) {
        target.starved_until.reset();
        return;
    }
    const auto now = clock::now();
    const auto& active = *target.active;
    if (active.on_full == full_policy::wait) {
        if (!target.starved_until) {
            const auto limit =
                std::min<std::chrono::duration<double>>(active.wait_limit, longest_wait);
            target.starved_until = now + std::chrono::duration_cast<clock::duration>(limit);
        }
        if (now < *target.starved_until) return;
    }
    const auto stats = pool_->stats();
    finish(
        target, finish_reason::error,
        error(
            errc::pool_exhausted,
            "generate: the next rows of attention need " + std::to_string(n_bytes) + " bytes, " +
                std::to_string(stats.leased_bytes) + " of " + std::to_string(stats.budget_bytes) +
                " are held by " + std::to_string(stats.n_leased) +
                " views; drop views, capture fewer layers or heads, use on_full=\"drop\" or raise "
                "attention_budget_bytes"));
}

void step::add_rows(const slot& target, int i_token, int n_prompt_rows) {
    const auto& plan = target.active->capture;
    const int n_columns = batch_.back().position + 1;
    if (target.prompt_block) {
        const auto layout = prompt_layout(target, n_prompt_rows);
        const int n_visible = model_.has_cache() ? n_columns - n_prompt_rows + 1 : n_columns;
        rows_.push_back(
            {plan, i_token - n_prompt_rows + 1, n_visible, layout, target.prompt_block->data()});
    }
    if (target.block) {
        rows_.push_back({plan, i_token, n_columns, plan->layout(n_columns), target.block->data()});
    }
}

}  // namespace kqview
