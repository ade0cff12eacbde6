#include "sched/step.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

double seconds(step::clock::duration duration) {
    return std::chrono::duration<double>(duration).count();
}

const error no_memory(errc::out_of_memory,
                      "generate: no memory left; lower n_ctx or hold fewer tokens");

constexpr std::chrono::milliseconds longest_lane_wait{2};

std::uint64_t nanoseconds(step::clock::duration duration) {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count());
}

[[noreturn]] void throw_pick_limit(double limit_s) {
    throw error(errc::invalid_sampling,
                "generate: choosing one token took more than " + std::to_string(limit_s) +
                    " s, which is the limit; simplify the grammar, json_schema or regex");
}

}  // namespace

step::step(runner& model, std::shared_ptr<block_pool> pool, std::shared_ptr<heartbeat> heart,
           std::shared_ptr<doorbell> engine)
    : model_(model),
      pool_(std::move(pool)),
      heart_(std::move(heart)),
      lane_(2 * static_cast<std::size_t>(model.n_slots()), std::move(engine)),
      slots_(static_cast<std::size_t>(model.n_slots())) {
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

// Tokens at the end of the prompt that are decoded even when they are cached: the last one, whose
// logits are wanted; those whose rows are, as no query of theirs is kept; and for an embedding all
// of them.
std::size_t step::n_decoded_anew(const request& wanted) {
    if (wanted.embeds) return wanted.prompt.size();
    return static_cast<std::size_t>(std::max(1, wanted.n_prompt_rows));
}

void step::want_union(const request* added) {
    // A request that ended keeps its nodes until the next one comes: alternating requests of one
    // plan then share their graphs.
    graph_plan all;
    const auto add = [&all](const request& one) {
        if (one.capture) all.add(*one.capture, one.n_prompt_rows > 0);
    };
    for (const auto& other : slots_) {
        if (other.active) add(*other.active);
    }
    add(*added);
    model_.want(all);
}

// ---- cancel

void step::cancel(const std::shared_ptr<request>& wanted) {
    const auto running = std::find_if(slots_.begin(), slots_.end(),
                                      [&](const slot& one) { return one.active == wanted; });
    if (running != slots_.end()) {
        finish(*running, finish_reason::cancelled);
    } else if (const auto id = wanted->slot.load(); id >= 0) {
        collect();
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
    collect();
    for (auto& target : slots_) {
        if (target.active) finish(target, finish_reason::error, failure);
    }
}

void step::abandon(const error& failure) {
    std::vector<std::shared_ptr<request>> running;
    {
        const std::lock_guard lock(tokens_mutex_);
        for (const auto& one : slots_) {
            if (one.active) running.push_back(one.active);
        }
    }
    for (const auto& wanted : running) {
        end_event end{finish_reason::error, {}, failure};
        end.usage.prompt_tokens = static_cast<int>(wanted->prompt.size());
        wanted->box->finish(std::move(end));
        wanted->box->settle();
    }
    counters_.n_failed += running.size();
}

// ---- orders

void step::work_on(slot_id id, const slot_work& work) {
    heart_->enter(engine_phase::ordering);
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

// ---- run

// The engine thread lets nothing escape.
error step::current_failure() noexcept {
    return running_failure("generate", errc::decode, no_memory);
}

bool step::run() {
    const auto started = clock::now();
    heart_->enter(engine_phase::filling);
    has_released_ = false;
    batch_.clear();
    rows_.clear();
    work_.clear();
    // A picker that is nearly done keeps its slot in the batch. Less than a step, and once a token.
    const auto is_sampling = [](const slot& one) { return one.state == slot_state::sampling; };
    if (std::any_of(slots_.begin(), slots_.end(), is_sampling))
        lane_.await_quick(std::min<clock::duration>(longest_lane_wait, last_decode_ / 2));
    const bool has_picked = take_picked();
    // Prompts and running texts take turns, so that a long prompt does not stall the others.
    const bool is_filled =
        prefilled_last_ ? fill_decode() || fill_prefill() : fill_prefill() || fill_decode();
    if (is_filled) {
        decode();
        last_decode_ = clock::now() - started;
        (prefilled_last_ ? counters_.prefill_ns : counters_.decode_ns) +=
            nanoseconds(clock::now() - started);
    }
    // Nobody can go on before these are taken.
    const bool has_parcels = !is_filled && !parcels_.empty();
    if (has_parcels) collect();
    // A request that ended before it was decoded leaves its slot to one that waits for it.
    return is_filled || has_parcels || has_picked || has_released_;
}

// ---- decode, sample, publish

void step::decode() {
    // A step that ends such a prompt has no other slot's tokens.
    const bool embeds = work_.front().is_end && work_.front().target->active->embeds;
    step_result result;
    heart_->enter(engine_phase::decoding);
    try {
        result = model_.decode(batch_, rows_, embeds);
    } catch (...) {
        const auto failure = current_failure();
        for (const auto& done : work_) {
            drop_unknown(*done.target);
            finish(*done.target, finish_reason::error, failure);
        }
        return;
    }
    collect();  // the rows of the step before came while this one was started
    computed_.reset();
    is_counted_ = false;
    // What the CPU writes is there; what a device computes is known with the logits.
    if (!rows_.empty() && result.transfer == 0) note_computed();
    ++counters_.n_decodes;
    (prefilled_last_ ? counters_.n_prompt_tokens : counters_.n_decoded_tokens) += batch_.size();
    {
        const std::lock_guard lock(tokens_mutex_);
        for (const auto& token : batch_) {
            auto& target = slots_[static_cast<std::size_t>(token.slot)];
            target.tokens.push_back(token.id);
            if (!model_.is_causal()) target.n_exact = 0;
        }
    }
    for (const auto& done : work_) {
        heart_->enter(engine_phase::sampling);
        const auto asked = done.target->active;
        if (!asked) continue;  // its rows of the step before did not come
        try {
            if (done.n_rows > 0) publish(done, result);
            if (embeds) publish_embedding(done);
            if (done.samples) sample(done, result);
            if (done.is_end) finish(*done.target, finish_reason::stop);
        } catch (...) {
            fail(*done.target, asked);
        }
    }
}

// Ends a request whose token could not be handed out, inside a catch block.
void step::fail(slot& target, const std::shared_ptr<request>& asked) {
    auto failure = current_failure();
    if (target.active) {
        finish(target, finish_reason::error, std::move(failure));
    } else {  // it was its last one
        asked->box->finish(end_of(target, finish_reason::error, std::move(failure)));
    }
}

void step::publish(const work& done, const step_result& result) {
    auto& target = *done.target;
    const auto& active = *target.active;
    prompt_event rows{static_cast<int>(target.tokens.size()) - done.n_rows, done.n_rows, {}};
    if (target.prompt_block) {
        const auto layout = prompt_layout(target, done.n_rows);
        counters_.n_attention_bytes += layout.size_bytes;
        rows.rows = {std::move(target.prompt_block), active.capture, layout, result.written_at};
    }
    deliver({target.active, std::move(rows), {}}, awaited(active, result));
}

void step::publish_embedding(const work& done) {
    auto& target = *done.target;
    auto [n_rows, values] = model_.embedding(target.id, static_cast<int>(batch_.size()));
    target.active->box->put(prompt_event{0, n_rows, {}, std::move(values)});
}

void step::sample(const work& done, const step_result& result) {
    auto& target = *done.target;
    const auto& active = *target.active;
    if (target.usage.completion_tokens == 0) target.prefilled = clock::now();
    float* const logits = model_.logits(done.i_token);
    if (result.transfer != 0) note_computed();
    captured_rows rows;
    if (target.block) {
        const auto layout = active.capture->layout(static_cast<int>(target.tokens.size()));
        rows = {std::move(target.block), active.capture, layout,
                rows_.size() == 1 ? result.written_at : nullptr};
    }
    const auto transfer = awaited(active, result);
    if (target.picker && target.picker->is_slow())
        target.ticket = std::make_shared<sampler_lane::ticket>(std::move(target.picker));
    if (!target.ticket)
        return publish_token(target, target.picker->pick(logits), std::move(rows), transfer);
    target.coming = std::move(rows);
    target.coming_transfer = transfer;
    lane_.start(target.ticket, {logits, static_cast<std::size_t>(model_.n_vocab())});
    ++counters_.n_handed_over;
    change(target.state, slot_state::sampling);
}

step::clock::time_point step::pick_deadline(const slot& target) const {
    return lane_.started(*target.ticket) +
           std::chrono::duration_cast<clock::duration>(target.active->pick_limit);
}

// Publishes what the lane has picked since. False: nothing.
bool step::take_picked() {
    bool has_picked = false;
    for (auto& target : slots_) {
        if (target.state != slot_state::sampling) continue;
        const bool is_done = lane_.is_done(*target.ticket);
        if (!is_done && clock::now() < pick_deadline(target)) continue;
        has_picked = true;
        const auto asked = target.active;
        try {
            if (!is_done) throw_pick_limit(asked->pick_limit.count());
            publish_token(target, lane_.take(*target.ticket), std::move(target.coming),
                          target.coming_transfer);
        } catch (...) {
            fail(target, asked);
        }
    }
    return has_picked;
}

void step::publish_token(slot& target, picked_token picked, captured_rows rows,
                         transfer_id transfer) {
    const auto& active = *target.active;
    const bool is_stop_token =
        std::binary_search(active.stop_tokens.begin(), active.stop_tokens.end(), picked.id);
    if (is_stop_token || model_.is_end_of_generation(picked.id)) {
        await_rows(rows, transfer);
        rows = {};  // before the consumer can see the end
        return finish(target, is_stop_token ? finish_reason::stop_token : finish_reason::stop);
    }

    ++counters_.n_tokens;
    ++target.usage.completion_tokens;
    if (rows.block) counters_.n_attention_bytes += rows.layout.size_bytes;
    token_event token{picked.id, picked.logprob, std::move(picked.top), std::move(rows),
                      target.last.n_discarded};
    if (n_left(target) == 0) {
        const auto to = target.active;
        auto end = end_of(target, finish_reason::length, {});
        count_end(finish_reason::length);
        release(target);
        return deliver({to, std::move(token), std::move(end)}, transfer);
    }
    target.pending = picked.id;
    change(target.state, slot_state::decode);
    deliver({target.active, std::move(token), {}}, transfer);
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
    if (n_on_the_way(target) > 0) {
        const auto ending = target.active;
        collect();
        if (target.active != ending) return;  // its rows did not come: that was its end
    }
    const auto box = target.active->box;
    const bool is_cancelled = reason == finish_reason::cancelled;
    if (is_cancelled) roll_back(target, box->n_taken());
    auto end = end_of(target, reason, std::move(failure));
    count_end(reason);
    release(target);  // first: who sees the end finds the slot free
    box->finish(std::move(end));
    if (is_cancelled) box->settle();
}

// Before the consumer can see the end: what it reads then has it.
void step::count_end(finish_reason reason) {
    ++(reason == finish_reason::error       ? counters_.n_failed
       : reason == finish_reason::cancelled ? counters_.n_cancelled
                                            : counters_.n_finished);
}

void step::release(slot& target) {
    has_released_ = true;
    target.block.reset();
    target.prompt_block.reset();
    target.picker.reset();
    if (target.ticket) lane_.abandon(*target.ticket);
    target.ticket.reset();
    await_rows(target.coming, target.coming_transfer);
    target.coming = {};
    target.coming_transfer = 0;
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
    const auto add = [&first](clock::time_point next) {
        first = std::min(first.value_or(next), next);
    };
    for (const auto& one : slots_) {
        if (one.starved_until) add(*one.starved_until);
        if (one.state == slot_state::sampling) add(pick_deadline(one));
    }
    return first;
}

std::vector<token_id> step::tokens_of(slot_id id) const {
    const std::lock_guard lock(tokens_mutex_);
    return slots_[static_cast<std::size_t>(id)].tokens;
}

std::size_t step::n_exact_of(slot_id id) const {
    const std::lock_guard lock(tokens_mutex_);
    const auto& one = slots_[static_cast<std::size_t>(id)];
    return std::min(one.n_exact, one.tokens.size());
}

std::vector<slot_view> step::slots() const {
    std::vector<slot_view> seen;
    seen.reserve(slots_.size());
    const std::lock_guard lock(tokens_mutex_);
    for (const auto& one : slots_) {
        // The state changes beside the lock, just before or after `active`.
        auto state = one.state.load(std::memory_order_relaxed);
        if (!one.active) state = slot_state::idle;
        if (one.active && state == slot_state::idle) state = slot_state::prefill;
        seen.push_back({state, one.tokens.size(), one.active ? one.active->id : 0});
    }
    return seen;
}

bool step::is_busy(slot_id id) const {
    const std::lock_guard lock(tokens_mutex_);
    return slots_[static_cast<std::size_t>(id)].active != nullptr;
}

}  // namespace kqview
