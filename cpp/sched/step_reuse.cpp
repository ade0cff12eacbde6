// Which tokens a slot keeps: what a new prompt takes over, what makes room in a full slot, and what
// a cancellation takes back.
// Threads: the engine thread.
#include <algorithm>
#include <new>
#include <utility>

#include "sched/slot_shifting.h"
#include "sched/step.h"

namespace kqview {

reuse_plan step::plan_of(const slot& candidate, const request& wanted) const {
    try {
        if (wanted.n_reuse_min > 0) {
            const auto n_run_min = static_cast<std::size_t>(wanted.n_reuse_min);
            auto shifted = plan_shift(candidate.tokens, wanted.prompt, n_run_min);
            // A shift moves the whole cache of the slot: it has to be worth that.
            const auto n_prefix = shifted.n_prefix();
            if (shifted.n_kept() < n_prefix + n_run_min) cut(shifted, n_prefix);
            return shifted;
        }
        auto plan = plan_prefix(candidate.tokens, wanted.prompt);
        cut(plan, std::min(plan.n_kept(), candidate.n_exact));
        return plan;
    } catch (const std::bad_alloc&) {
        return {};  // evaluating everything gives the same
    }
}

// The free slot that has most of the prompt, the lowest among equals.
step::choice step::choose_slot(const request& wanted) {
    choice best;
    std::size_t n_best = 0;
    for (auto& candidate : slots_) {
        if (candidate.active || (wanted.wanted_slot >= 0 && wanted.wanted_slot != candidate.id))
            continue;
        auto plan = plan_of(candidate, wanted);
        const auto n = plan.n_kept();
        if (!best.target || n > n_best) best = {&candidate, std::move(plan)}, n_best = n;
    }
    return best;
}

void step::take_over(slot& target, reuse_plan plan) {
    const auto& active = *target.active;
    const auto n_usable = active.prompt.size() - n_decoded_anew(active);
    cut(plan, n_usable);
    if (plan.n_kept() > plan.n_prefix()) {
        const auto& last = plan.runs.back();
        truncate(target, last.start + last.n_tokens);
        try {
            discard(target, gaps_of(plan, target.tokens.size()));
        } catch (const std::exception&) {
            // The slot is consistent, perhaps empty: what is not there is evaluated.
        }
    }
    const auto n_common = common_prefix(target.tokens, active.prompt);
    truncate(target,
             std::min({n_common, n_usable, active.n_reuse_min > 0 ? all_exact : target.n_exact}));
    target.usage.cached_tokens = static_cast<int>(target.tokens.size());
}

void step::discard(slot& target, std::span<const token_range> gone) {
    change_cache(target, [&](idle_slot& view) { discard_tokens(view, gone); });
}

// Before a token that a full slot has no room for. False: that failed, and the request has ended.
bool step::make_room(slot& target) {
    const auto& active = *target.active;
    if (active.n_discard == 0 || static_cast<int>(target.tokens.size()) < model_.n_ctx())
        return true;
    const token_range gone{static_cast<std::size_t>(active.n_keep),
                           static_cast<std::size_t>(active.n_discard)};
    try {
        discard(target, {&gone, 1});
    } catch (...) {
        finish(target, finish_reason::error, current_failure());
        return false;
    }
    target.last.n_discarded += active.n_discard;
    return true;
}

// Does the work on the slot's cache, and knows afterwards what is in it, also when it failed.
void step::change_cache(slot& target, const slot_work& work) {
    idle_slot view{target.id, model_, target.tokens, false, target.n_exact};
    const auto keep = [&] {
        if (!view.has_changed) return;
        {
            const std::lock_guard lock(tokens_mutex_);
            target.tokens = std::move(view.tokens);
            target.n_exact = view.n_exact;
        }
        forget_tail(target, target.tokens.size());
    };
    try {
        work(view);
    } catch (...) {
        keep();
        throw;
    }
    keep();
}

void step::truncate(slot& target, std::size_t n_keep) {
    if (n_keep >= target.tokens.size()) return;
    if (!model_.truncate(target.id, static_cast<int>(n_keep))) {
        model_.truncate(target.id, 0);  // dropping everything always works
        n_keep = 0;
    }
    forget_tail(target, n_keep);
}

// The cache holds the first n_keep tokens and no more.
void step::forget_tail(slot& target, std::size_t n_keep) {
    const std::lock_guard lock(tokens_mutex_);
    target.tokens.resize(n_keep);
    target.n_exact = exact_mark(target.n_exact, n_keep);
}

// After a failed step: whatever the cache holds beyond the known tokens goes.
void step::drop_unknown(slot& target) {
    if (model_.truncate(target.id, static_cast<int>(target.tokens.size()))) return;
    model_.truncate(target.id, 0);
    forget_tail(target, 0);
}

// Back to the prompt and the tokens taken, less the last one, of what the slot's last request has
// fed. What it discarded stays gone, also where that made room for tokens that nobody took.
void step::roll_back(slot& target, int n_taken) {
    const auto n_fed = target.last.n_prompt + static_cast<std::size_t>(std::max(n_taken - 1, 0));
    const auto n_kept = static_cast<std::size_t>(target.last.n_keep);
    const auto n_gone = static_cast<std::size_t>(target.last.n_discarded);
    const auto n_left =
        n_gone == 0 || n_fed <= n_kept ? n_fed : std::max(n_kept, n_fed - std::min(n_fed, n_gone));
    truncate(target, std::min(target.tokens.size(), n_left));
}

}  // namespace kqview
