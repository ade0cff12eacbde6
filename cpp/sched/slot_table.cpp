#include "sched/slot_table.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>
#include <span>
#include <tuple>
#include <utility>

#include "sched/mailbox.h"

namespace kqview {

namespace {

// A copy moves the whole cache of a slot: fewer tokens than this are evaluated just as fast.
constexpr std::size_t n_fork_min = 32;
constexpr std::size_t n_cut_min = 64;
constexpr std::size_t n_borders_kept = 2;
constexpr std::size_t n_between_passes = 8;

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

std::vector<token_id> first_of(const std::vector<token_id>& ids, std::size_t n) {
    return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n)};
}

// The states in which a request may be held. A deadline ends the wait for a block.
bool may_be_held(const slot& one) {
    return one.state == slot_state::paused || one.state == slot_state::steered ||
           (one.state == slot_state::starved && !one.deadline);
}

}  // namespace

slot_table::slot_table(runner& model, std::chrono::milliseconds least_turn,
                       const checkpoint_options& kept)
    : model_(model),
      least_turn_(least_turn),
      kept_(model, mutex_, kept.budget_bytes),
      n_between_checkpoints_(kept.n_between) {
    for (slot_id id = 0; id < model.n_slots(); ++id) slots_.emplace_back(id, model, kept_, mutex_);
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
        const auto n_alike = candidate.cache.edits().n_agreeing(wanted.keys_of_edits());
        if (wanted.n_reuse_min > 0) {
            const auto n_run_min = static_cast<std::size_t>(wanted.n_reuse_min);
            const auto alike = first_of(cached, std::min(n_alike, cached.size()));
            auto shifted = plan_shift(alike, wanted.prompt, n_run_min);
            // A shift moves the slot's whole cache: the gain must be worth it.
            const auto n_prefix = shifted.n_prefix();
            if (shifted.n_kept() < n_prefix + n_run_min) cut(shifted, n_prefix);
            return shifted;
        }
        auto plan = plan_prefix(cached, wanted.prompt);
        cut(plan, std::min({plan.n_kept(), candidate.cache.n_exact(), n_alike}));
        if (model_.needs_snapshots()) {
            cut(plan, candidate.cache.n_left_by(std::min(plan.n_kept(), n_usable(wanted))));
        }
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
    target.stays = false;
    target.draft_rate = {};
    if (wanted->n_draft_max > 0) target.lookup.restart(wanted->prompt, wanted->prediction);
    {
        const std::lock_guard lock(mutex_);
        target.active = wanted;
        change(target.state, slot_state::prefill);
    }
    ++wanted->share->n_slots;
    wanted->share->last_slot = ++n_given_;
    if (!target.prompt().empty()) target.pending = target.prompt().back();
}

void slot_table::take_over(slot& target, reuse_plan plan) {
    auto& active = *target.active;
    auto& cache = target.cache;
    cache.use(active.lora);
    cache.use(target.edits);
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
    plan_cuts(target);
    plan_fork(target);
    active.slot.store(target.id());
}

// ---- checkpoints

// At the last borders of messages, from where a chat goes on when its end is edited; every so many
// tokens; and before what is evaluated even when the same prompt comes again. Each of the first two
// costs a step, so they save at least n_cut_min tokens. What the slot holds is kept as well: a
// text that another prompt may part from.
void slot_table::plan_cuts(slot& target) {
    target.cuts.clear();
    const auto& active = *target.active;
    if (!kept_.are_kept() || !active.cache_prompt || active.embeds) return;
    target.cache.keep_checkpoint();
    const auto& prompt = target.prompt();
    const auto n_end = target.text.empty() ? n_usable(active) : target.n_in_chunks();
    auto& cuts = target.cuts;
    std::size_t n_borders = 0;
    for (auto i = n_end; i > target.cache.size() && n_borders < n_borders_kept; --i) {
        if (!model_.is_end_of_generation(prompt[i - 1])) continue;
        cuts.push_back(i);
        ++n_borders;
    }
    if (const auto n = n_between_checkpoints_) {
        for (auto i = (target.cache.size() / n + 1) * n; i < n_end; i += n) cuts.push_back(i);
    }
    std::ranges::sort(cuts);
    auto before = target.cache.size();
    std::erase_if(cuts, [&](std::size_t at) {
        if (at < before + n_cut_min) return true;
        before = at;
        return false;
    });
    if (n_end > target.cache.size() && (cuts.empty() || cuts.back() < n_end)) cuts.push_back(n_end);
}

// Lets a step of another slot's prompt end where this one parts from it, and returns the place. A
// deterministic request keeps its steps.
std::size_t slot_table::cut_at(slot& source, std::size_t n) {
    const auto after = std::ranges::upper_bound(source.cuts, n);
    const auto last = after == source.cuts.begin() ? 0 : *std::prev(after);
    if (last == n || source.active->is_alone || source.active->embeds) return last;
    source.cuts.insert(after, n);
    return n;
}

// The consumer of a steered request may take back what was generated: some of it is evaluated again
// rather than a state copied for each token. A cache that keeps only what windows see has room for
// what a step adds, and drops so much again.
void slot_table::keep_checkpoint(slot& target) {
    const auto n_done = target.cache.size();
    const bool is_due =
        std::ranges::binary_search(target.cuts, n_done) ||
        (target.active->is_steered && !target.is_in_prompt() && n_done % n_between_passes == 0 &&
         !model_.drops_tail(target.id(), static_cast<int>(n_done - 1)));
    if (is_due) target.cache.keep_checkpoint();
}

// ---- requests with a common prompt prefix share one evaluation

// Looks for the slot that has, or will have after its own prefill, most of this prompt.
void slot_table::plan_fork(slot& target) {
    target.fork.reset();
    if (!model_.has_cache() || !(model_.can_truncate() || kept_.are_kept())) return;
    const auto& prompt = target.active->prompt;
    std::size_t n_best = target.cache.size() + n_fork_min - 1;
    for (auto& other : slots_) {
        if (other.id() == target.id() || other.cache.lora() != target.cache.lora()) continue;
        auto n = std::min(common_prefix(other.cache.tokens(), prompt), other.cache.n_exact());
        // A prompt in prefill: wait for the shared part.
        if (other.is_in_prompt() && n == other.cache.size())
            n = std::max(n, common_prefix(other.active->prompt, prompt));
        n = std::min({n, n_usable(*target.active),
                      other.cache.edits().n_agreeing(target.active->keys_of_edits())});
        if (n <= n_best) continue;
        if (kept_.are_kept()) {
            n = n > other.cache.size() ? cut_at(other, n) : other.cache.n_left_by(n);
            if (n <= n_best) continue;
        }
        n_best = n;
        target.fork = {other.id(), n, other.active ? other.active->id : 0};
    }
}

bool slot_table::await_fork(slot& target) {
    if (!target.fork) return false;
    const auto fork = *target.fork;
    const auto& source = at(fork.source);
    const auto n_shared = std::min(
        {common_prefix(source.cache.tokens(), target.active->prompt), source.cache.n_exact(),
         fork.n_tokens, source.cache.edits().n_agreeing(target.active->keys_of_edits())});
    // Only for a request admitted earlier, so that no two wait for each other; and not for one that
    // waits for its consumer.
    const bool is_coming = source.active && source.active->id == fork.request &&
                           source.state == slot_state::prefill && source.is_in_prompt() &&
                           n_shared == source.cache.size();
    const bool is_alike = source.cache.lora() == target.cache.lora();
    if (n_shared < fork.n_tokens && is_coming) return true;
    target.fork.reset();
    // The source was cancelled, and may hold something else.
    if (!is_alike || source.cache.n_left_by(n_shared) < target.cache.size() + n_fork_min)
        return false;
    target.cache.copy_from(source.cache, source.cache.n_left_by(n_shared));
    note_cached(target);
    return false;
}

void slot_table::note_cached(slot& target) {
    target.usage.cached_tokens = static_cast<int>(target.cache.size());
    target.active->n_cached.store(target.usage.cached_tokens);
}

// ---- a request runs

void slot_table::append(std::span<const step_token> tokens, std::size_t n_guessed) {
    const bool is_exact = model_.is_causal();
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < tokens.size(); i += 1 + n_guessed) {
        auto& target = slots_[static_cast<std::size_t>(tokens[i].slot)];
        if (target.state == slot_state::steered) {
            target.cache.expect_unknown();
        } else {
            target.cache.append(tokens[i].id, is_exact);
        }
    }
}

void slot_table::drop_draft(slot& target) {
    auto& draft = target.draft;
    if (draft.is_ahead) {
        await_rows(target);
    } else if (!draft.ids.empty() && draft.is_of_model) {
        target.draft_rate.note(draft.ids.size(), draft.n_true);
    } else if (!draft.ids.empty()) {
        target.lookup.note(draft.ids.size(), draft.n_true);
    }
    draft = {};
    if (target.cache.has_unknown()) target.cache.drop_unknown();
}

// Before a block goes back to the pool: a device may still write into it.
void slot_table::await_rows(slot& target) {
    const auto transfer = std::exchange(target.transfer, 0);
    if (transfer == 0) return;
    try {
        model_.await(transfer);
    } catch (...) {
        // The next decode reports what is wrong with the device.
    }
}

void slot_table::make_room(slot& target) {
    const auto& active = *target.active;
    if (active.n_discard == 0 || static_cast<int>(target.cache.size()) < model_.n_ctx()) return;
    const token_range gone{static_cast<std::size_t>(active.n_keep),
                           static_cast<std::size_t>(active.n_discard)};
    target.cache.discard({&gone, 1});
    target.last.n_discarded += active.n_discard;
    target.edits.move_up(gone.start, gone.n_tokens);
    if (target.text.empty()) return;
    const auto first = target.text.begin() + active.n_keep;
    target.text.erase(first, first + active.n_discard);
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
    drop_draft(target);
    target.is_unclear = false;
    target.transfer = 0;
    target.picker.reset();
    target.ticket.reset();
    target.text.clear();
    target.edits = {};
    target.fork.reset();
    target.cuts.clear();
    target.deadline.reset();
    target.gives_way = false;
    target.cells = {};
    --target.active->share->n_slots;
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

bool slot_table::has_held() const { return std::ranges::any_of(slots_, may_be_held); }

bool slot_table::is_held(const slot& one) const {
    if (!may_be_held(one)) return false;
    if (one.state == slot_state::paused) return !one.active->box->has_room(n_ahead(one));
    return one.state == slot_state::steered || !one.active->box->is_starving();
}

slot_table::time_point slot_table::end_of_turn(const slot& one, time_point begin) const {
    const auto first = one.evaluated == time_point{} ? one.given : one.evaluated;
    return std::max(begin, first) + std::max<time_point::duration>(least_turn_, first - one.given);
}

// A steered request's turn begins anew with each forward pass: a consumer that answers in time
// keeps the slot.
slot_table::time_point slot_table::end_of_turn(const slot& one) const {
    return end_of_turn(one, one.state == slot_state::steered ? one.asked : time_point{});
}

std::optional<slot_table::time_point> slot_table::next_turn(time_point now) const {
    std::optional<time_point> next;
    for (const auto& one : slots_) {
        if (!one.active) continue;
        for (const auto end : {end_of_turn(one), end_of_turn(one, time_point{})}) {
            if (end > now) next = std::min(next.value_or(end), end);
        }
    }
    return next;
}

// Where that leaves its owner another slot, the request gives way at once. Where two owners have
// one slot between them, they take turns in it; where each has one, both keep it. A steered request
// leaves while its consumer has the forward pass.
bool slot_table::is_owed(const slot& one, const request& wanted, time_point now) const {
    const auto& held = *one.active;
    if (held.share == wanted.share || held.priority > wanted.priority) return false;
    // Scores that were handed out would come again.
    if (held.embeds || held.n_scores > 0) return false;
    if (held.is_steered && one.state != slot_state::steered) return false;
    const int n_more = held.share->n_slots - wanted.share->n_slots;
    if (n_more > 1) return true;
    return n_more == 1 && wanted.share->n_slots == 0 && one.evaluated != time_point{} &&
           end_of_turn(one, one.evaluated) <= now;
}

// Of those that are not held, the one with least to evaluate again, of the owner with most slots.
slot* slot_table::parkable_for(const request& wanted, time_point now) {
    slot* found = nullptr;
    const auto cost = [this](const slot& one) {
        const bool is_held = this->is_held(one);
        return std::tuple(one.active->priority, !is_held, is_held ? 0 : -one.active->share->n_slots,
                          is_held ? 0 : one.cache.size());
    };
    for (auto& one : slots_) {
        if (!one.active || one.stays || !may_run_in(one, wanted)) continue;
        const bool can_go = is_held(one) && end_of_turn(one) <= now;
        if (!can_go && !is_owed(one, wanted, now)) continue;
        if (!found || cost(one) < cost(*found)) found = &one;
    }
    return found;
}

bool slot_table::keep_cells(slot& target, std::size_t n_bytes_max) {
    drop_draft(target);
    auto& cache = target.cache;
    const auto& active = *target.active;
    const bool is_reproducible =
        target.last.n_discarded == 0 && cache.n_exact() >= cache.size() &&
        cache.edits().n_agreeing(target.edits) >= cache.size() &&
        !(active.is_alone && (active.is_steered || active.n_prompt_rows > 0));
    target.cells.clear();
    if (is_reproducible || cache.size() == 0) return true;
    try {
        const auto n_bytes = cache.save({});
        if (n_bytes <= n_bytes_max) {
            std::vector<std::byte> cells(n_bytes);
            cells.resize(cache.save(cells));
            target.cells.swap(cells);
            target.n_exact = cache.n_exact();
            target.n_as_saved = all_exact;
            target.edited = cache.edits().runs();
            return true;
        }
    } catch (const error&) {
        // A model whose cache cannot be saved.
    }
    target.stays = true;
    return false;
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
    progress.n_prompt_rows = progress.text.empty() ? std::min(progress.n_prompt_rows, n_left) : 0;
    progress.awaits_answer = target.state == slot_state::steered;
    progress.n_discarded = target.last.n_discarded;
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
        const auto n_alike = is_alike ? std::min(common_prefix(candidate.cache.tokens(), ids),
                                                 candidate.cache.edits().n_agreeing(progress.edits))
                                      : 0;
        const auto n = candidate.cache.n_left_by(n_alike);
        if (!best || n > n_best) best = &candidate, n_best = n;
    }
    if (!best) throw error(errc::internal, "slots: none is free; ask can_admit first");
    static_cast<request_progress&>(*best) = std::move(progress);
    give(*best, wanted);
    best->last.n_discarded = best->n_discarded;
    return *best;
}

void slot_table::take_over_text(slot& target) {
    const auto& ids = target.prompt();
    auto& cache = target.cache;
    const auto& active = *target.active;
    const auto cells = std::exchange(target.cells, {});
    if (cells.empty()) {
        cache.use(active.lora);
        cache.use(target.edits);
    } else {
        cache.restore(cells, target.n_exact, active.lora, std::move(target.edited));
    }
    // The last token's logits are wanted, and the rows of the last ones.
    const auto n_wanted = static_cast<std::size_t>(std::max(1, target.n_prompt_rows));
    const auto n_most = active.cache_prompt || !cells.empty() ? ids.size() - n_wanted : 0;
    const auto n_exact = cells.empty() ? cache.n_exact() : target.n_as_saved;
    cache.truncate(std::min({common_prefix(cache.tokens(), ids), n_most, n_exact}));
    plan_cuts(target);
    target.active->slot.store(target.id());
}

void slot_table::check_idle(slot_id id) const {
    if (!at(id).active) return;
    throw error(errc::busy, "slot ", id,
                ": a generation runs in it; read it to its end or close it first");
}

std::vector<slot_id> slot_table::branch(slot_id from, std::size_t n) {
    check_idle(from);
    const auto& source = at(from).cache;
    std::vector<slot*> idle;
    for (auto& one : slots_) {
        if (!one.active && one.id() != from) idle.push_back(&one);
    }
    if (idle.size() < n) {
        throw error(errc::busy, "n is ", n, ", but ", idle.size(),
                    " other slots are idle; read generations to their end or close them first");
    }
    std::ranges::stable_sort(idle, {}, [](const slot* one) { return one->cache.size(); });
    std::vector<slot_id> branches;
    for (auto* const one : std::span(idle).first(n)) {
        one->last = {};
        one->cache.use(source.lora());
        one->cache.copy_from(source, source.size());
        branches.push_back(one->id());
    }
    return branches;
}

void slot_table::work_on(slot_id id, const slot_work& work) {
    check_idle(id);
    auto& target = slots_[static_cast<std::size_t>(id)];
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
        if (!is_held(one)) return {};
        holders.push_back(one.active->id);
    }
    return holders;
}

std::vector<token_id> slot_table::tokens_of(slot_id id) const {
    const std::lock_guard lock(mutex_);
    return at(id).cache.tokens();
}

std::vector<std::size_t> slot_table::checkpoints_of(slot_id id) const {
    const std::lock_guard lock(mutex_);
    return kept_.counts_of(id);
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
