// The "fill" phase of a step: which tokens the next decode gets, and which block each row goes to.
// Threads: the engine thread.
#include <algorithm>
#include <string>
#include <utility>

#include "sched/step.h"

namespace kqview {

namespace {

constexpr std::chrono::hours longest_wait{24 * 365};  // well within the clock's range

}  // namespace

bool step::fill_prefill() {
    for (auto& target : slots_) {
        if (!target.active) continue;
        const auto& prompt = target.active->prompt;
        const auto n_done = target.tokens.size();
        const bool is_prompt = n_done < prompt.size();
        if (!is_prompt) continue;
        const auto n = std::min(prompt.size() - n_done, static_cast<std::size_t>(model_.n_chunk()));
        const bool is_last = n_done + n == prompt.size();
        if (is_last && !make_ready(target)) continue;
        for (std::size_t i = 0; i < n; ++i) {
            batch_.push_back({target.id, prompt[n_done + i], static_cast<std::int32_t>(n_done + i),
                              is_last && i + 1 == n});
        }
        const int i_token = static_cast<int>(n) - 1;
        if (is_last) add_rows(target, i_token);
        work_.push_back({&target, i_token, is_last});
        prefilled_last_ = true;
        return true;
    }
    return false;
}

bool step::fill_decode() {
    const auto n_slots = slots_.size();
    const auto is_generating = [](const slot& one) {
        return one.active && one.tokens.size() >= one.active->prompt.size();
    };
    for (std::size_t i = 0; i < n_slots; ++i) {
        auto next = (decode_cursor_ + i) % n_slots;
        // A run of adjacent slots that are ready, from the first one found.
        while (next < n_slots && is_generating(slots_[next]) && make_ready(slots_[next])) {
            auto& target = slots_[next];
            const int i_token = static_cast<int>(batch_.size());
            batch_.push_back(
                {target.id, target.pending, static_cast<std::int32_t>(target.tokens.size()), true});
            add_rows(target, i_token);
            work_.push_back({&target, i_token, true});
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

// May this slot produce a token now? Sets its state, and takes the block that the row will need.
bool step::make_ready(slot& target) {
    const auto& active = *target.active;
    const bool is_prompt = target.tokens.size() < active.prompt.size();
    const int run_ahead = model_.can_truncate() ? active.run_ahead : 0;
    if (!active.box->has_room(run_ahead)) {
        target.starved_until.reset();
        change(target.state, slot_state::paused);
        return false;
    }
    const auto n_columns = is_prompt ? active.prompt.size() : target.tokens.size() + 1;
    if (active.capture && !take_block(target, static_cast<int>(n_columns))) return false;
    change(target.state, is_prompt ? slot_state::prefill : slot_state::decode);
    return true;
}

bool step::take_block(slot& target, int n_columns) {
    target.row_dropped = false;
    const auto n_bytes = target.active->capture->bytes(static_cast<std::size_t>(n_columns));
    target.block = pool_->try_take(n_bytes);
    // Nothing comes back from a consumer that waits, but it may have dropped a view after our try.
    const bool is_final = !target.block && target.active->box->is_starving();
    if (is_final) target.block = pool_->try_take(n_bytes);
    if (target.block) {
        target.starved_until.reset();
        return true;
    }
    if (is_final && target.active->on_full == full_policy::drop) {
        target.row_dropped = true;
        ++counters_.n_dropped_rows;
        return true;
    }
    starve(target, is_final);
    return false;
}

// No room for the next row: the slot does not take part in this step. As long as the consumer has
// tokens to take, their blocks may come back: running ahead stops first.
void step::starve(slot& target, bool is_final) {
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
    const auto n_columns = std::max(active.prompt.size(), target.tokens.size() + 1);
    finish(
        target, finish_reason::error,
        error(
            errc::pool_exhausted,
            "generate: the next token's attention needs " +
                std::to_string(active.capture->bytes(n_columns)) + " bytes, " +
                std::to_string(stats.leased_bytes) + " of " + std::to_string(stats.budget_bytes) +
                " are held by " + std::to_string(stats.n_leased) +
                " views; drop views, capture fewer layers or heads, use on_full=\"drop\" or raise "
                "attention_budget_bytes"));
}

void step::add_rows(const slot& target, int i_token) {
    if (!target.block) return;
    const auto n_columns = static_cast<int>(batch_.back().position) + 1;
    rows_.push_back({target.active->capture, i_token, n_columns, target.block->data()});
}

}  // namespace kqview
