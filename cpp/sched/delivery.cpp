#include "sched/delivery.h"

#include <algorithm>
#include <utility>
#include <variant>

namespace kqview {

namespace {

double seconds(delivery::clock::duration duration) {
    return std::chrono::duration<double>(duration).count();
}

}  // namespace

// ---- a step's tokens and rows

void delivery::begin_step() {
    computed_.reset();
    is_counted_ = false;
}

void delivery::note_computed() {
    if (!computed_) computed_ = clock::now();
}

void delivery::put(slot& target, prompt_event rows) {
    if (rows.rows.block) counters_.n_attention_bytes += rows.rows.layout.size_bytes;
    send({target.active, std::move(rows), {}}, target.transfer);
}

void delivery::put(slot& target, picked_token picked) {
    if (const auto reason = target.active->end_by(model_, picked.id))
        return finish(target, *reason);

    ++counters_.n_tokens;
    ++target.usage.completion_tokens;
    target.text.clear();  // the cache holds all of it
    if (target.evaluated == clock::time_point{}) target.evaluated = clock::now();
    const auto transfer = target.transfer;
    token_event token{picked.id, picked.logprob, std::move(picked.top),
                      std::exchange(target.rows, {}), target.last.n_discarded};
    if (token.rows.block) counters_.n_attention_bytes += token.rows.layout.size_bytes;
    auto to = target.active;
    if (n_left(*target.active, target, target.cache.size() + 1) > 0) {
        target.pending = picked.id;
        change(target.state, slot_state::decode);
        return send({std::move(to), std::move(token), {}}, transfer);
    }
    auto end = end_of(target, finish_reason::length, {});
    count_end(finish_reason::length);
    target.transfer = 0;  // the token carries the rows
    release(target);
    send({std::move(to), std::move(token), std::move(end)}, transfer);
}

void delivery::put(slot& target, std::span<const float> logits) {
    const auto n_tokens = target.cache.size();
    int n_removable = target.usage.completion_tokens;
    if (target.last.n_discarded > 0) {  // perhaps of what was generated
        const auto n_before = static_cast<std::size_t>(std::max(1, target.last.n_keep));
        n_removable = std::min(n_removable, static_cast<int>(n_tokens - n_before));
    }
    const forward_pass::limits known{static_cast<int>(n_tokens), n_removable,
                                     n_left(*target.active, target, n_tokens)};
    forward_event event{std::make_shared<forward_pass>(*target.active, logits, known),
                        std::exchange(target.rows, {}), target.last.n_discarded};
    target.likely = event.pass->foreseen();
    if (target.likely && !is_worth_a_step(target, known)) target.likely.reset();
    if (event.rows.block) counters_.n_attention_bytes += event.rows.layout.size_bytes;
    target.asked = clock::now();
    if (target.evaluated == clock::time_point{}) target.evaluated = target.asked;
    change(target.state, slot_state::steered);
    send({target.active, std::move(event), {}}, target.transfer);
}

// Whether the likely answer may be evaluated before it has come: if a forward pass follows it, the
// cache can drop it again, and the request lets the engine run ahead and sees no steps.
bool delivery::is_worth_a_step(const slot& target, const forward_pass::limits& known) const {
    const auto& active = *target.active;
    const auto* const edits = target.edits.at(target.cache.size());
    return known.n_left > 1 && !active.end_by(model_, *target.likely) &&
           known.n_tokens < model_.n_ctx() && slots_.n_ahead(active, false) > 0 &&
           !model_.needs_snapshots() && !(edits && edits->is_watched());
}

// Drops from the cache what does not belong to the text; where it cannot drop a tail, all of it.
// Unless the request ends, at least the last token is to be evaluated then.
void delivery::take(slot& target, pass_answer answer) {
    const auto n_kept = revise(*target.active, target, answer);
    target.cache.truncate(answer.end ? n_kept : std::min(n_kept, target.text.size() - 1));
    if (answer.end) return finish(target, *answer.end);
    target.pending = target.text.back();
    change(target.state, target.is_in_prompt() ? slot_state::prefill : slot_state::decode);
}

std::size_t delivery::revise(const request& of, request_progress& progress, pass_answer& answer) {
    auto& ids = answer.ids;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const auto reason = of.end_by(model_, ids[i]);
        if (!reason) continue;
        ids.resize(i);
        answer.end = reason;
    }
    counters_.n_tokens += ids.size();
    progress.usage.completion_tokens += static_cast<int>(ids.size()) - answer.n_removed;
    auto& text = progress.text;
    if (text.empty()) text = of.prompt;
    const auto n_kept = text.size() - static_cast<std::size_t>(answer.n_removed);
    text.resize(n_kept);
    text.insert(text.end(), ids.begin(), ids.end());
    const auto n_evaluated = std::min(n_kept, std::max<std::size_t>(1, text.size()) - 1);
    progress.n_as_saved = std::min(progress.n_as_saved, n_evaluated);
    progress.edits.cut(n_evaluated);
    progress.edits.put(n_evaluated, answer.edits);
    if (!answer.end && n_left(of, progress, text.size()) == 0) answer.end = finish_reason::length;
    return n_kept;
}

// Number of ids that the request may still get after a text of `n_text` tokens, the last of which
// need not fit into the slot.
int delivery::n_left(const request& of, const request_progress& progress,
                     std::size_t n_text) const {
    const int n_due = of.max_tokens - progress.usage.completion_tokens;
    if (of.n_discard > 0) return std::max(0, n_due);
    const int n_room = model_.n_ctx() + 1 - static_cast<int>(n_text);
    return std::max(0, std::min(n_due, n_room));
}

void delivery::send(parcel one, transfer_id rows) {
    if (rows != 0) {
        rows_on_the_way_ = std::max(rows_on_the_way_, rows);
        parcels_.push_back(std::move(one));
        return;
    }
    const auto has_rows = [](const auto& content) { return content.rows.block != nullptr; };
    if (std::visit(has_rows, one.content)) count_view();
    one.to->box->put(std::move(one.content), std::move(one.end));
}

// Counts a view of the last step, before its consumer can see it.
void delivery::count_view() {
    if (!computed_) return;
    const auto now = clock::now();
    counters_.step_to_view_ns += nanoseconds(now - *std::exchange(computed_, now));
    if (!std::exchange(is_counted_, true)) ++counters_.n_captured_steps;
}

bool delivery::collect() {
    if (parcels_.empty()) return false;
    auto parcels = std::exchange(parcels_, {});
    std::optional<error> lost;
    try {
        model_.await(rows_on_the_way_);
    } catch (...) {
        lost = failure_of_request();
    }
    for (auto& one : parcels) {
        const auto to = one.to;
        const auto usage = one.end ? std::optional(one.end->usage) : std::nullopt;
        auto failure = lost;
        if (!failure) {
            try {
                send(std::move(one), 0);
                continue;
            } catch (...) {
                failure = failure_of_request();
            }
        }
        if (auto* const running = slots_.running(to)) {
            finish(*running, finish_reason::error, failure);
        } else if (usage) {  // the request had its last token and has left its slot
            to->box->finish({finish_reason::error, *usage, failure});
        }
    }
    return true;
}

int delivery::n_on_the_way(const std::shared_ptr<request>& wanted) const {
    return static_cast<int>(std::count_if(parcels_.begin(), parcels_.end(),
                                          [&](const parcel& one) { return one.to == wanted; }));
}

// ---- ends

end_event delivery::end_of(const request_progress& progress, finish_reason reason,
                           std::optional<error> failure) {
    const auto now = clock::now();
    auto usage = progress.usage;
    const bool is_prefilled = usage.completion_tokens > 0;
    usage.prefill_s = seconds((is_prefilled ? progress.prefilled : now) - progress.started);
    usage.decode_s = is_prefilled ? seconds(now - progress.prefilled) : 0.0;
    return {reason, usage, std::move(failure)};
}

// Called before the consumer can see the end, so that the counters it then reads include it.
void delivery::count_end(finish_reason reason) {
    ++(reason == finish_reason::error       ? counters_.n_failed
       : reason == finish_reason::cancelled ? counters_.n_cancelled
                                            : counters_.n_finished);
}

void delivery::finish(slot& target, finish_reason reason, std::optional<error> failure) {
    if (n_on_the_way(target.active) > 0) {
        const auto ending = target.active;
        collect();
        if (target.active != ending) return;  // missing rows ended it
    }
    const auto box = target.active->box;
    const bool is_cancelled = reason == finish_reason::cancelled;
    if (is_cancelled) slots_.roll_back(target, box->n_taken());
    auto end = end_of(target, reason, std::move(failure));
    count_end(reason);
    release(target);  // first: whoever sees the end finds the slot free
    if (is_cancelled) {
        box->settle(std::move(end));
    } else {
        box->finish(std::move(end));
    }
}

void delivery::release(slot& target) {
    if (target.ticket) lane_.abandon(*target.ticket);
    if (target.active->is_steered) target.active->picker->stop();
    if (target.has_rows()) slots_.await_rows(target);
    slots_.release(target);
}

void delivery::fail(slot& target, const std::shared_ptr<request>& asked) {
    auto failure = failure_of_request();
    if (target.active) {
        finish(target, finish_reason::error, std::move(failure));
    } else {  // that was its last token
        asked->box->finish(end_of(target, finish_reason::error, std::move(failure)));
    }
}

void delivery::fail_all(const error& failure) {
    collect();
    for (auto& target : slots_) {
        if (target.active) finish(target, finish_reason::error, failure);
    }
}

void delivery::end_parked(const parked_request& one, finish_reason reason,
                          std::optional<error> failure) {
    count_end(reason);
    if (one.of->is_steered) one.of->picker->stop();
    one.of->box->settle(end_of(one.progress, reason, std::move(failure)));
}

void delivery::cancel(const std::shared_ptr<request>& wanted) {
    if (auto* const running = slots_.running(wanted)) {
        finish(*running, finish_reason::cancelled);
    } else if (const auto id = wanted->slot.load(); id >= 0) {
        collect();
        // The request ended by itself, but its last tokens were never handed out.
        auto& target = slots_[static_cast<std::size_t>(id)];
        if (!target.active && target.last.request == wanted->id && !wanted->is_steered)
            slots_.roll_back(target, wanted->box->n_taken());
    }
    wanted->box->settle();
}

}  // namespace kqview
