// Requests whose prompts begin alike share one evaluation: a slot takes over what another one has,
// by a copy of its cache.
// Threads: the engine thread.
#include <algorithm>

#include "sched/step.h"

namespace kqview {

namespace {

// A copy moves the whole cache of a slot: fewer tokens than this are evaluated as fast.
constexpr std::size_t n_fork_min = 32;

}  // namespace

// Looks for the slot that has, or will have after its own prompt, most of this prompt.
void step::plan_fork(slot& target) {
    target.fork_source.reset();
    if (!model_.can_truncate() || !model_.has_cache()) return;
    const auto& active = *target.active;
    const auto n_usable = active.prompt.size() - n_decoded_anew(active);
    std::size_t n_best = target.tokens.size() + n_fork_min - 1;
    for (const auto& other : slots_) {
        if (other.id == target.id) continue;
        auto n = std::min(common_prefix(other.tokens, active.prompt), other.n_exact);
        // A prompt that is being evaluated: wait for the part that both share.
        if (is_in_prompt(other) && n == other.tokens.size())
            n = std::max(n, common_prefix(other.active->prompt, active.prompt));
        n = std::min(n, n_usable);
        if (n <= n_best) continue;
        n_best = n;
        target.fork_source = other.id;
        target.n_fork = n;
        target.fork_request = other.active ? other.active->id : 0;
    }
}

// True while the slot waits for another one's prompt; takes it over once it is there.
bool step::await_fork(slot& target) {
    if (!target.fork_source) return false;
    const auto& source = slots_[static_cast<std::size_t>(*target.fork_source)];
    const auto n_shared = std::min(
        {common_prefix(source.tokens, target.active->prompt), source.n_exact, target.n_fork});
    // Only from a request admitted before this one, so that no two wait for each other; and not
    // from one that waits for its consumer.
    const bool is_coming = source.active && source.active->id == target.fork_request &&
                           source.state == slot_state::prefill && is_in_prompt(source) &&
                           n_shared == source.tokens.size();
    if (n_shared < target.n_fork && is_coming) return true;
    target.fork_source.reset();
    if (n_shared < target.tokens.size() + n_fork_min) return false;  // the source was cancelled
    forget_tail(target, 0);  // a copy that fails leaves none of them
    model_.copy(source.id, target.id);
    {
        const std::lock_guard lock(tokens_mutex_);
        target.tokens = source.tokens;
        target.n_exact = source.n_exact;
    }
    truncate(target, n_shared);
    target.usage.cached_tokens = static_cast<int>(target.tokens.size());
    return false;
}

}  // namespace kqview
