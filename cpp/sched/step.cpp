#include "sched/step.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

namespace kqview {

namespace {

double seconds(step::clock::duration duration) {
    return std::chrono::duration<double>(duration).count();
}

}  // namespace

step::step(runner& model, std::shared_ptr<block_pool> pool)
    : model_(model), pool_(std::move(pool)) {
    slots_.resize(static_cast<std::size_t>(model.n_slots()));
    for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i].id = static_cast<slot_id>(i);
}

// ---- admit

bool step::is_in_prompt(const slot& one) {
    // A slot that made room may hold fewer tokens than its prompt had.
    return one.active && one.usage.completion_tokens == 0 &&
           one.tokens.size() < one.active->prompt.size();
}

bool step::can_admit(const request& wanted) const {
    return std::any_of(slots_.begin(), slots_.end(), [&](const slot& one) {
        return !one.active && (wanted.wanted_slot < 0 || wanted.wanted_slot == one.id);
    });
}

void step::admit(const std::shared_ptr<request>& wanted) {
    auto chosen = choose_slot(*wanted);
    if (!chosen.target)
        throw error(errc::internal, "step.admit: no slot is free; ask can_admit first");
    ++counters_.n_requests;
    auto& target = *chosen.target;
    {
        const std::lock_guard lock(tokens_mutex_);
        target.active = wanted;
    }
    target.usage = {};
    target.usage.prompt_tokens = static_cast<int>(wanted->prompt.size());
    target.started = target.prefilled = clock::now();
    target.last = {wanted->id, wanted->prompt.size(), wanted->n_keep, 0};
    target.starved_until.reset();
    change(target.state, slot_state::prefill);
    wanted->slot.store(target.id);
    try {
        want_union(wanted.get());
        take_over(target, std::move(chosen.plan));
        plan_fork(target);
        target.picker = std::move(wanted->picker);
    } catch (...) {
        finish(target, finish_reason::error, current_failure());
    }
}

void step::want_union(const request* added) {
    // A request that ended keeps its nodes until the next one comes: alternating requests of one plan
    // then share their graphs.
    graph_plan all;
    for (const auto& other : slots_) {
        if (other.active && other.active->capture) all.add(*other.active->capture);
    }
    if (added->capture) all.add(*added->capture);
    model_.want(all);
}

// ---- cancel

void step::cancel(const std::shared_ptr<request>& wanted) {
    const auto running = std::find_if(slots_.begin(), slots_.end(),
                                      [&](const slot& one) { return one.active == wanted; });
    if (running != slots_.end()) {
        finish(*running, finish_reason::cancelled);
    } else if (const auto id = wanted->slot.load(); id >= 0) {
        // It ended by itself, but its last tokens were never handed out.
        auto& target = slots_[static_cast<std::size_t>(id)];
        if (!target.active && target.last.request == wanted->id) {
            roll_back(target, wanted->box->n_taken());
        }
    }
    wanted->box->finish({});  // a request that was still queued ends here
    wanted->box->settle();
}

void step::fail_all(const error& failure) {
    for (auto& target : slots_) {
        if (target.active) finish(target, finish_reason::error, failure);
    }
}

// ---- orders

void step::work_on(slot_id id, const slot_work& work) {
    auto& target = slots_[static_cast<std::size_t>(id)];
    if (target.active) {
        throw error(errc::busy, "slot: a generation works in slot " + std::to_string(id) +
                                    "; read it to its end or close it first");
    }
    change_cache(target, [&](idle_slot& view) {
        const auto forget = [&] {
            // No cancellation that comes late may roll this back.
            if (view.has_changed) target.last = {};
        };
        try {
            work(view);
        } catch (...) {
            forget();
            throw;
        }
        forget();
    });
}

// The running exception as ours; the engine thread lets nothing escape.
error step::current_failure() {
    try {
        throw;
    } catch (const error& failure) {
        return failure;
    } catch (const std::bad_alloc&) {
        return error(errc::out_of_memory,
                     "generate: no memory left; lower n_ctx or hold fewer tokens");
    } catch (const std::exception& failure) {
        return error(errc::decode, std::string("generate: ") + failure.what());
    } catch (...) {
        return error(errc::decode, "generate: an exception of no known type");
    }
}

// ---- run

bool step::run() {
    batch_.clear();
    rows_.clear();
    work_.clear();
    // Prompts and running texts take turns, so that a long prompt does not stall the others.
    const bool is_filled =
        prefilled_last_ ? fill_decode() || fill_prefill() : fill_prefill() || fill_decode();
    if (is_filled) decode();
    return is_filled;
}

// ---- decode, sample, publish

void step::decode() {
    const std::byte* written_at = nullptr;
    try {
        written_at = model_.decode(batch_, rows_);
    } catch (...) {
        const auto failure = current_failure();
        for (const auto& done : work_) {
            drop_unknown(*done.target);
            finish(*done.target, finish_reason::error, failure);
        }
        return;
    }
    ++counters_.n_decodes;
    {
        const std::lock_guard lock(tokens_mutex_);
        for (const auto& token : batch_) {
            slots_[static_cast<std::size_t>(token.slot)].tokens.push_back(token.id);
        }
    }
    for (const auto& done : work_) {
        if (!done.samples || done.target->usage.completion_tokens == 0) {
            counters_.n_prompt_tokens += batch_.size();
        }
        try {
            if (done.n_rows > 0) publish(done, written_at);
            if (done.samples) sample(done, rows_.size() == 1 ? written_at : nullptr);
            if (done.is_end) finish(*done.target, finish_reason::stop);
        } catch (...) {
            finish(*done.target, finish_reason::error, current_failure());
        }
    }
}

void step::publish(const work& done, const std::byte* written_at) {
    auto& target = *done.target;
    const auto& active = *target.active;
    prompt_event rows{static_cast<int>(target.tokens.size()) - done.n_rows, done.n_rows, {}};
    if (target.prompt_block) {
        const auto layout = prompt_layout(target, done.n_rows);
        counters_.n_attention_bytes += layout.size_bytes;
        rows.rows = {std::move(target.prompt_block), active.capture, layout, written_at};
    }
    active.box->put(std::move(rows));
}

void step::sample(const work& done, const std::byte* written_at) {
    auto& target = *done.target;
    const auto& active = *target.active;
    if (target.usage.completion_tokens == 0) target.prefilled = clock::now();
    auto picked = target.picker->pick(model_.logits(done.i_token));

    if (std::binary_search(active.stop_tokens.begin(), active.stop_tokens.end(), picked.id)) {
        return finish(target, finish_reason::stop_token);
    }
    if (model_.is_end_of_generation(picked.id)) return finish(target, finish_reason::stop);

    ++counters_.n_tokens;
    ++target.usage.completion_tokens;
    token_event token{
        picked.id, picked.logprob, std::move(picked.top), {}, target.last.n_discarded};
    if (target.block) {
        const auto layout = active.capture->layout(static_cast<int>(target.tokens.size()));
        counters_.n_attention_bytes += layout.size_bytes;
        token.rows = {std::move(target.block), active.capture, layout, written_at};
    }
    if (n_left(target) == 0) {
        const auto box = active.box;
        auto end = end_of(target, finish_reason::length, {});
        release(target);
        return box->put(std::move(token), std::move(end));
    }
    target.pending = picked.id;
    change(target.state, slot_state::decode);
    active.box->put(std::move(token), {});
}

int step::n_left(const slot& target) const {
    const int n_due = target.active->max_tokens - target.usage.completion_tokens;
    if (target.active->n_discard > 0) return std::max(0, n_due);
    const int n_room = model_.n_ctx() - static_cast<int>(target.tokens.size());
    return std::max(0, std::min(n_due, n_room));
}

end_event step::end_of(slot& target, finish_reason reason, std::optional<error> failure) const {
    const auto now = clock::now();
    auto usage = target.usage;
    const bool is_prefilled = usage.completion_tokens > 0;
    usage.prefill_s = seconds((is_prefilled ? target.prefilled : now) - target.started);
    usage.decode_s = is_prefilled ? seconds(now - target.prefilled) : 0.0;
    return {reason, usage, std::move(failure)};
}

void step::finish(slot& target, finish_reason reason, std::optional<error> failure) {
    const auto box = target.active->box;
    const bool is_cancelled = reason == finish_reason::cancelled;
    if (is_cancelled) roll_back(target, box->n_taken());
    auto end = end_of(target, reason, std::move(failure));
    release(target);  // first: who sees the end finds the slot free
    box->finish(std::move(end));
    if (is_cancelled) box->settle();
}

void step::release(slot& target) {
    target.block.reset();
    target.prompt_block.reset();
    target.picker.reset();
    target.fork_source.reset();
    target.starved_until.reset();
    change(target.state, slot_state::idle);
    if (!model_.has_cache()) forget_tail(target, 0);
    const std::lock_guard lock(tokens_mutex_);
    target.active.reset();
}

// ---- what others may see

std::vector<request_id> step::stalled_on(const request& wanted) const {
    std::vector<request_id> holders;
    for (const auto& one : slots_) {
        if (wanted.wanted_slot >= 0 && wanted.wanted_slot != one.id) continue;
        const bool is_paused = one.state == slot_state::paused ||
                               (one.state == slot_state::starved && !one.starved_until);
        if (!is_paused) return {};
        holders.push_back(one.active->id);
    }
    return holders;
}

std::optional<step::clock::time_point> step::next_deadline() const {
    std::optional<clock::time_point> first;
    for (const auto& one : slots_) {
        if (one.starved_until && (!first || *one.starved_until < *first)) first = one.starved_until;
    }
    return first;
}

std::vector<token_id> step::tokens_of(slot_id id) const {
    const std::lock_guard lock(tokens_mutex_);
    return slots_[static_cast<std::size_t>(id)].tokens;
}

bool step::is_busy(slot_id id) const {
    const std::lock_guard lock(tokens_mutex_);
    return slots_[static_cast<std::size_t>(id)].active != nullptr;
}

}  // namespace kqview
