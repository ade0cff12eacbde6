#include "sched/slot_table.h"

#include <algorithm>
#include <new>
#include <utility>

#include "sched/mailbox.h"

namespace kqview {

namespace {

// A copy moves the whole cache of a slot: fewer tokens than this are evaluated just as fast.
constexpr std::size_t n_fork_min = 32;

bool may_run_in(const slot& one, const request& wanted) {
    return wanted.wanted_slot < 0 || wanted.wanted_slot == one.id();
}

// Number of prompt tokens that may come from a cache. Excludes the last token and those before
// scored ones, whose logits are wanted, and tokens whose rows are wanted, because no cache keeps
// their queries. 0 for an embedding, and for a request that wants no cache.
std::size_t n_usable(const request& wanted) {
    if (wanted.embeds || !wanted.cache_prompt) return 0;
    return wanted.prompt.size() -
           std::max(static_cast<std::size_t>(std::max(1, wanted.n_prompt_rows)),
                    wanted.n_scores + 1);
}

}  // namespace

slot_table::slot_table(runner& model, std::chrono::milliseconds least_turn)
    : model_(model), least_turn_(least_turn) {
    for (slot_id id = 0; id < model.n_slots(); ++id) slots_.emplace_back(id, model, mutex_);
}

slot* slot_table::running(const std::shared_ptr<request>& wanted) {
    const auto found = std::find_if(slots_.begin(), slots_.end(),
                                    [&](const slot& one) { return one.active == wanted; });
    return found == slots_.end() ? nullptr : &*found;
}

// ---- a request comes

bool slot_table::can_admit(const request& wanted) const {
    return std::any_of(slots_.begin(), slots_.end(),
                       [&](const slot& one) { return !one.active && may_run_in(one, wanted); });
}

reuse_plan slot_table::plan_of(const slot& candidate, const request& wanted) const {
    try {
        const auto& cached = candidate.cache.tokens();
        if (!wanted.cache_prompt || candidate.cache.lora() != wanted.lora) return {};
        if (wanted.n_reuse_min > 0) {
            const auto n_run_min = static_cast<std::size_t>(wanted.n_reuse_min);
            auto shifted = plan_shift(cached, wanted.prompt, n_run_min);
            // A shift moves the slot's whole cache: the gain must be worth it.
            const auto n_prefix = shifted.n_prefix();
            if (shifted.n_kept() < n_prefix + n_run_min) cut(shifted, n_prefix);
            return shifted;
        }
        auto plan = plan_prefix(cached, wanted.prompt);
        cut(plan, std::min(plan.n_kept(), candidate.cache.n_exact()));
        return plan;
    } catch (const std::bad_alloc&) {
        return {};  // evaluating everything gives the same result
    }
}

slot_table::seat slot_table::admit(const std::shared_ptr<request>& wanted) {
    slot* best = nullptr;
    reuse_plan plan;
    std::size_t n_best = 0;
    for (auto& candidate : slots_) {
        if (candidate.active || !may_run_in(candidate, *wanted)) continue;
        auto offered = plan_of(candidate, *wanted);
        const auto n = offered.n_kept();
        // A steered one goes to the last of equals: while it waits, the others stay adjacent, which
        // is what lets them share a step.
        const bool is_better = n > n_best || (n == n_best && wanted->is_steered);
        if (!best || is_better) best = &candidate, plan = std::move(offered), n_best = n;
    }
    if (!best) throw error(errc::internal, "slots: none is free; ask can_admit first");
    request_progress& progress = *best;
    progress = {};
    progress.usage.prompt_tokens = static_cast<int>(wanted->prompt.size());
    progress.started = progress.prefilled = std::chrono::steady_clock::now();
    progress.usage.queue_s =
        std::chrono::duration<double>(progress.started - wanted->submitted).count();
    progress.n_prompt_rows = wanted->n_prompt_rows;
    give(*best, wanted);
    return {*best, std::move(plan)};
}

void slot_table::give(slot& target, const std::shared_ptr<request>& wanted) {
    target.last = {wanted->id, wanted->prompt.size(), wanted->n_keep, 0};
    target.given = std::chrono::steady_clock::now();
    target.evaluated = {};
    {
        const std::lock_guard lock(mutex_);
        target.active = wanted;
        change(target.state, slot_state::prefill);
    }
    if (!target.prompt().empty()) target.pending = target.prompt().back();
}

void slot_table::take_over(slot& target, reuse_plan plan) {
    auto& active = *target.active;
    auto& cache = target.cache;
    cache.use(active.lora);
    cut(plan, n_usable(active));
    if (plan.n_kept() > plan.n_prefix()) {
        const auto& last = plan.runs.back();
        cache.truncate(last.start + last.n_tokens);
        try {
            cache.discard(gaps_of(plan, cache.size()));
        } catch (const std::exception&) {
            // The slot is consistent, perhaps empty: missing tokens are evaluated.
        }
    }
    const auto n_exact = active.n_reuse_min > 0 ? all_exact : cache.n_exact();
    cache.truncate(
        std::min({common_prefix(cache.tokens(), active.prompt), n_usable(active), n_exact}));
    note_cached(target);
    plan_fork(target);
    active.slot.store(target.id());
}

// ---- requests with a common prompt prefix share one evaluation

// Looks for the slot that has, or will have after its own prefill, most of this prompt.
void slot_table::plan_fork(slot& target) {
    target.fork.reset();
    if (!model_.can_truncate() || !model_.has_cache()) return;
    const auto& prompt = target.active->prompt;
    std::size_t n_best = target.cache.size() + n_fork_min - 1;
    for (const auto& other : slots_) {
        if (other.id() == target.id() || other.cache.lora() != target.cache.lora()) continue;
        auto n = std::min(common_prefix(other.cache.tokens(), prompt), other.cache.n_exact());
        // A prompt in prefill: wait for the shared part.
        if (other.is_in_prompt() && n == other.cache.size())
            n = std::max(n, common_prefix(other.active->prompt, prompt));
        n = std::min(n, n_usable(*target.active));
        if (n <= n_best) continue;
        n_best = n;
        target.fork = {other.id(), n, other.active ? other.active->id : 0};
    }
}

bool slot_table::await_fork(slot& target) {
    if (!target.fork) return false;
    const auto fork = *target.fork;
    const auto& source = at(fork.source);
    const auto n_shared = std::min({common_prefix(source.cache.tokens(), target.active->prompt),
                                    source.cache.n_exact(), fork.n_tokens});
    // Only for a request admitted earlier, so that no two wait for each other; and not for one that
    // waits for its consumer.
    const bool is_coming = source.active && source.active->id == fork.request &&
                           source.state == slot_state::prefill && source.is_in_prompt() &&
                           n_shared == source.cache.size();
    const bool is_alike = source.cache.lora() == target.cache.lora();
    if (n_shared < fork.n_tokens && is_coming) return true;
    target.fork.reset();
    // The source was cancelled, and may hold something else.
    if (!is_alike || n_shared < target.cache.size() + n_fork_min) return false;
    target.cache.copy_from(source.cache, n_shared);
    note_cached(target);
    return false;
}

void slot_table::note_cached(slot& target) {
    target.usage.cached_tokens = static_cast<int>(target.cache.size());
    target.active->n_cached.store(target.usage.cached_tokens);
}

// ---- a request runs

void slot_table::append(std::span<const step_token> tokens) {
    const bool is_exact = model_.is_causal();
    const std::lock_guard lock(mutex_);
    for (const auto& token : tokens) {
        slots_[static_cast<std::size_t>(token.slot)].cache.append(token.id, is_exact);
    }
}

void slot_table::make_room(slot& target) {
    const auto& active = *target.active;
    if (active.n_discard == 0 || static_cast<int>(target.cache.size()) < model_.n_ctx()) return;
    const token_range gone{static_cast<std::size_t>(active.n_keep),
                           static_cast<std::size_t>(active.n_discard)};
    target.cache.discard({&gone, 1});
    target.last.n_discarded += active.n_discard;
    if (target.text.empty()) return;
    const auto first = target.text.begin() + active.n_keep;
    target.text.erase(first, first + active.n_discard);
}

void slot_table::revise(slot& target, const pass_answer& answer) {
    auto& text = target.text;
    if (text.empty()) text = target.active->prompt;
    const auto n_kept = text.size() - static_cast<std::size_t>(answer.n_removed);
    text.resize(n_kept);
    text.insert(text.end(), answer.ids.begin(), answer.ids.end());
    target.cache.truncate(answer.end ? n_kept : std::min(n_kept, text.size() - 1));
}

void slot_table::roll_back(slot& target, int n_taken) {
    if (target.active && target.active->is_steered) {
        // The last id counts as not fed, whether or not it has been meanwhile. A cache that cannot
        // drop it keeps it.
        const bool has_generated = target.usage.completion_tokens > 0;
        if (has_generated && target.cache.size() == target.text.size() && model_.can_truncate())
            target.cache.truncate(target.text.size() - 1);
        return;
    }
    const auto n_fed = target.last.n_prompt + static_cast<std::size_t>(std::max(n_taken - 1, 0));
    const auto n_kept = static_cast<std::size_t>(target.last.n_keep);
    const auto n_gone = static_cast<std::size_t>(target.last.n_discarded);
    const auto n_left =
        n_gone == 0 || n_fed <= n_kept ? n_fed : std::max(n_kept, n_fed - std::min(n_fed, n_gone));
    target.cache.truncate(std::min(target.cache.size(), n_left));
}

void slot_table::release(slot& target) {
    has_released_ = true;
    target.rows = {};
    target.prompt_rows = {};
    target.transfer = 0;
    target.picker.reset();
    target.ticket.reset();
    target.text.clear();
    target.fork.reset();
    target.deadline.reset();
    if (!model_.has_cache()) target.cache.forget();
    std::shared_ptr<request> leaving;  // may be destroyed here, outside the lock
    const std::lock_guard lock(mutex_);
    leaving.swap(target.active);
    change(target.state, slot_state::idle);
}

// ---- a request leaves its slot before its end

// Prompt rows are large: one run of them waits for the consumer while the next one is computed.
int slot_table::n_ahead(const request& wanted, bool is_prompt_rows) const {
    if (!model_.can_truncate()) return 0;
    return is_prompt_rows ? std::min(1, wanted.run_ahead) : wanted.run_ahead;
}

bool slot_table::has_behind() const {
    return std::any_of(slots_.begin(), slots_.end(),
                       [](const slot& one) { return one.state == slot_state::paused; });
}

slot_table::time_point slot_table::end_of_turn(const slot& one) const {
    const bool is_evaluated = one.evaluated != time_point{};
    const auto begin = is_evaluated ? one.evaluated : one.given;
    return begin + std::max<time_point::duration>(least_turn_, begin - one.given);
}

std::optional<slot_table::time_point> slot_table::next_turn(time_point now) const {
    std::optional<time_point> next;
    for (const auto& one : slots_) {
        if (one.state != slot_state::paused) continue;
        const auto end = end_of_turn(one);
        if (end > now) next = std::min(next.value_or(end), end);
    }
    return next;
}

slot* slot_table::parkable_for(const request& wanted, time_point now) {
    slot* found = nullptr;
    for (auto& one : slots_) {
        if (one.state != slot_state::paused || !may_run_in(one, wanted)) continue;
        const bool is_reproducible =
            one.last.n_discarded == 0 && one.cache.n_exact() >= one.cache.size();
        if (one.active->is_steered || !is_reproducible || end_of_turn(one) > now) continue;
        if (one.active->box->has_room(n_ahead(one))) continue;  // it has caught up meanwhile
        if (!found || one.active->priority < found->active->priority) found = &one;
    }
    return found;
}

request_progress slot_table::vacate(slot& target) {
    const auto& cached = target.cache.tokens();
    const bool has_generated = target.usage.completion_tokens > 0;
    if (has_generated && target.text.empty()) {
        std::vector<token_id> text;
        text.reserve(cached.size() + 1);
        text.assign(cached.begin(), cached.end());
        text.push_back(target.pending);
        target.text.swap(text);
    }
    request_progress progress = std::move(target);
    // Rows of the tokens in the cache were handed out.
    const int n_left = static_cast<int>(target.active->prompt.size() - cached.size());
    progress.n_prompt_rows = has_generated ? 0 : std::min(progress.n_prompt_rows, n_left);
    target.active->slot.store(-1);
    release(target);
    return progress;
}

slot& slot_table::readmit(const std::shared_ptr<request>& wanted, request_progress progress) {
    const auto& ids = progress.text.empty() ? wanted->prompt : progress.text;
    slot* best = nullptr;
    std::size_t n_best = 0;
    for (auto& candidate : slots_) {
        if (candidate.active || !may_run_in(candidate, *wanted)) continue;
        const bool is_alike = candidate.cache.lora() == wanted->lora;
        const auto n = is_alike ? common_prefix(candidate.cache.tokens(), ids) : 0;
        if (!best || n > n_best) best = &candidate, n_best = n;
    }
    if (!best) throw error(errc::internal, "slots: none is free; ask can_admit first");
    static_cast<request_progress&>(*best) = std::move(progress);
    give(*best, wanted);
    return *best;
}

void slot_table::take_over_text(slot& target) {
    const auto& ids = target.prompt();
    auto& cache = target.cache;
    cache.use(target.active->lora);
    // The last token's logits are wanted, and the rows of the last ones.
    const auto n_wanted = static_cast<std::size_t>(std::max(1, target.n_prompt_rows));
    const auto n_most = target.active->cache_prompt ? ids.size() - n_wanted : 0;
    cache.truncate(std::min({common_prefix(cache.tokens(), ids), n_most, cache.n_exact()}));
    target.active->slot.store(target.id());
}

void slot_table::work_on(slot_id id, const slot_work& work) {
    auto& target = slots_[static_cast<std::size_t>(id)];
    if (target.active) {
        throw error(errc::busy, "slot " + std::to_string(id) +
                                    ": a generation runs in it; read it to its end or close it "
                                    "first");
    }
    const auto n_changes = target.cache.n_changes();
    const auto forget_request = [&] {
        // A late cancellation must not roll this back.
        if (target.cache.n_changes() != n_changes) target.last = {};
    };
    try {
        work(target.cache);
    } catch (...) {
        forget_request();
        throw;
    }
    forget_request();
}

// ---- what others may see

std::vector<request_id> slot_table::stalled_on(const request& wanted) const {
    std::vector<request_id> holders;
    for (const auto& one : slots_) {
        if (!may_run_in(one, wanted)) continue;
        const bool is_behind =
            one.state == slot_state::paused && !one.active->box->has_room(n_ahead(one));
        const bool is_paused = is_behind || one.state == slot_state::steered ||
                               (one.state == slot_state::starved && !one.deadline);
        if (!is_paused) return {};
        holders.push_back(one.active->id);
    }
    return holders;
}

std::vector<token_id> slot_table::tokens_of(slot_id id) const {
    const std::lock_guard lock(mutex_);
    return at(id).cache.tokens();
}

std::vector<slot_view> slot_table::views() const {
    std::vector<slot_view> seen;
    seen.reserve(slots_.size());
    const std::lock_guard lock(mutex_);
    for (const auto& one : slots_) {
        const auto n = one.cache.size();
        seen.push_back(
            {one.state, n, std::min(one.cache.n_exact(), n), one.active ? one.active->id : 0});
    }
    return seen;
}

std::vector<std::shared_ptr<request>> slot_table::active() const {
    std::vector<std::shared_ptr<request>> running;
    running.reserve(slots_.size());
    const std::lock_guard lock(mutex_);
    for (const auto& one : slots_) {
        if (one.active) running.push_back(one.active);
    }
    return running;
}

}  // namespace kqview
