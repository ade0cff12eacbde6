#include "sched/engine_loop.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "tap/plan.h"

namespace kqview {

namespace {

// Constructed in advance, while memory is available.
const error lost_error(
    errc::closed, "the engine was closed while a step hung, which did not end; make a new Engine");
const error no_memory_for_work(errc::out_of_memory, "no memory left; the slot holds what it held");

// The nodes that the running requests want in every graph. Those of an
// ended request stay until the next one arrives: alternating requests with the same plan then share
// their graphs.
graph_plan plan_of(const slot_table& slots) {
    graph_plan all;
    for (const auto& one : slots) {
        if (!one.active) continue;
        if (one.active->capture) {
            all.add(*one.active->capture, one.active->n_prompt_rows > 0, one.id());
        }
        one.edits.each([&](const edit_plan& edits) { all.add(edits); });
    }
    return all;
}

// The scores that the step's logits give for one slot's part of it.
prompt_event scores_of(runner& model, const batch_part& part) {
    const auto& asked = *part.target->active;
    const auto n_tokens = static_cast<std::size_t>(part.n_tokens);
    const auto i_first = part.target->cache.size() - n_tokens;
    prompt_event scored;
    for (std::size_t i = 0; i < n_tokens; ++i) {
        const auto i_scored = i_first + i + 1;
        if (!asked.is_scored(i_scored)) continue;
        if (scored.scores.empty()) scored.start = static_cast<int>(i_scored);
        const int i_token = part.i_token - part.n_tokens + 1 + static_cast<int>(i);
        scored.scores.push_back(model.score(i_token, asked.prompt[i_scored], asked.n_top_scores));
    }
    scored.n_rows = static_cast<int>(scored.scores.size());
    return scored;
}

}  // namespace

engine_loop::engine_loop(runner& model, std::shared_ptr<block_pool> pool,
                         std::shared_ptr<heartbeat> heart, std::shared_ptr<doorbell> bell,
                         command_queue& queue, const pace& given)
    : model_(model),
      pool_(std::move(pool)),
      heart_(std::move(heart)),
      bell_(std::move(bell)),
      queue_(queue),
      slots_(model, given.least_turn, given.kept),
      lane_(2 * static_cast<std::size_t>(model.n_slots()), bell_),
      out_(model, slots_, lane_, counters_),
      sampling_(model, slots_, lane_, out_, counters_),
      batch_(model, *pool_, slots_, out_, counters_, given.max_gap) {}

void engine_loop::run() {
    for (;;) {
        try {
            if (!take_commands()) break;
            admit();
            if (const auto until = batch_.company_until()) {
                heart_->enter(engine_phase::waiting);
                bell_->wait(until);
                continue;
            }
            const bool has_stepped = step();
            if (make_way() || has_stepped || !tell_stalled()) continue;
        } catch (...) {
            // Memory ran out outside any request: ending all requests frees what they hold.
            out_.fail_all(running_failure("engine", errc::internal, no_memory_error));
            continue;
        }
        heart_->enter(engine_phase::waiting);
        bell_->wait(next_deadline());
    }
    heart_->enter(engine_phase::closing);
    out_.fail_all(closed_error);
    end_queued();
    lane_.close();
    heart_->enter(engine_phase::ended);
}

// ---- commands

// Executes cancellations, answers and work on idle slots. False: the engine closes.
bool engine_loop::take_commands() {
    heart_->enter(engine_phase::ordering);
    using kind = command_queue::command::kind;
    for (;;) {
        auto next = queue_.take();
        switch (next.what) {
            case kind::none: return true;
            case kind::close: return false;
            case kind::cancel:
                if (const auto parked = parked_.take(next.of)) {
                    out_.end_parked(*parked, finish_reason::cancelled);
                } else {
                    out_.cancel(next.of);
                }
                break;
            case kind::answer: take_answer(next.of, std::move(next.answer)); break;
            case kind::work: {
                std::optional<error> failure;
                try {
                    next.work->work(slots_);
                } catch (...) {
                    failure = running_failure("slot", errc::internal, no_memory_for_work);
                }
                queue_.finish(*next.work, std::move(failure));
            }
        }
    }
}

void engine_loop::take_answer(const std::shared_ptr<request>& of, pass_answer answer) {
    if (auto* const target = slots_.running(of)) {
        try {
            const bool has_edits = answer.edits != nullptr;
            out_.begin_step();  // what follows waited for the answer, and not for a step
            out_.take(*target, std::move(answer));
            if (has_edits) model_.want(plan_of(slots_));
            sampling_.follow_draft(*target);
        } catch (...) {
            out_.fail(*target, of);
        }
        return;
    }
    auto parked = parked_.take(of);
    if (!parked) return;  // it has ended since
    std::optional<error> failure;
    try {
        out_.revise(*of, parked->progress, answer);
    } catch (...) {
        failure = failure_of_request();
        answer.end = finish_reason::error;
    }
    if (answer.end) return out_.end_parked(*parked, *answer.end, std::move(failure));
    // From here on it waits for a slot.
    parked->progress.awaits_answer = false;
    of->waits_since = clock::now();
    parked_.add(std::move(*parked));
}

// Ends the commands and requests that are left without a slot. Running requests have ended before.
void engine_loop::end_queued() {
    for (;;) {
        const auto next = queue_.take_left();
        if (next.what == command_queue::command::kind::none) break;
        if (next.what == command_queue::command::kind::cancel) next.of->box->settle();
        if (next.work) queue_.finish(*next.work, closed_error);
    }
    while (const auto parked = parked_.take_any()) {
        out_.end_parked(*parked, finish_reason::error, closed_error);
    }
    while (const auto wanted = queue_.take_waiting([](const request&) { return true; })) {
        fail(*wanted, closed_error);
    }
}

// Ends a request that has no slot and never had one, or whose slot is lost.
void engine_loop::fail(const request& wanted, const error& failure) {
    ++counters_.n_failed;
    wanted.box->settle(end_without_slot(wanted, finish_reason::error, failure));
}

void engine_loop::abandon() {
    for (const auto& wanted : slots_.active()) fail(*wanted, lost_error);
    end_queued();
}

// ---- admit

// Free slots go to parked requests that can go on, then to those in the queue, unless it is the
// turn of these by priority and owner.
void engine_loop::admit() {
    heart_->enter(engine_phase::admitting);
    for (;;) {
        const auto parked = parked_.first([this](const parked_request& one) {
            return !one.progress.awaits_answer && slots_.can_admit(*one.of) &&
                   one.of->box->has_room(one.n_left_max);
        });
        const auto queued = queue_.take_waiting([&](const request& one) {
            return slots_.can_admit(one) && (!parked || one.rank() < parked->rank());
        });
        if (queued) {
            start(queued);
        } else if (parked) {
            go_on(std::move(*parked_.take(parked)));
        } else {
            return;
        }
    }
}

void engine_loop::start(const std::shared_ptr<request>& wanted) {
    ++counters_.n_requests;
    auto [target, plan] = slots_.admit(wanted);
    try {
        target.edits.put(0, wanted->edits);
        model_.want(plan_of(slots_));
        slots_.take_over(target, std::move(plan));
        if (!wanted->is_steered) target.picker = std::move(wanted->picker);
    } catch (...) {
        out_.fail(target, wanted);
    }
}

void engine_loop::go_on(parked_request one) {
    auto& target = slots_.readmit(one.of, std::move(one.progress));
    try {
        model_.want(plan_of(slots_));
        slots_.take_over_text(target);
    } catch (...) {
        out_.fail(target, one.of);
    }
}

// ---- a step

// False: no slot could go on, and none became free.
bool engine_loop::step() {
    const auto started = clock::now();
    heart_->enter(engine_phase::filling);
    const bool has_picked = sampling_.take_picked(last_decode_);
    if (batch_.fill()) {
        const bool is_prefill = batch_.is_prefill();
        decode();
        last_decode_ = clock::now() - started;
        batch_.note(last_decode_);
        (is_prefill ? counters_.prefill_ns : counters_.decode_ns) += nanoseconds(last_decode_);
        return true;
    }
    // No slot can go on before these are taken.
    const bool has_delivered = out_.collect();
    // A request that ended before its decode leaves its slot to a waiting one.
    return slots_.take_released() || has_delivered || has_picked;
}

void engine_loop::decode() {
    const auto& parts = batch_.step().parts;
    const bool reads_logits = std::ranges::any_of(parts, [](const batch_part& part) {
        return part.samples || part.target->active->n_scores > 0;
    });
    auto output = reads_logits ? step_output::logits : step_output::none;
    // A step that ends an embedded prompt has only such prompts.
    if (parts.front().ends_embedding()) output = step_output::embeddings;
    step_result result;
    heart_->enter(engine_phase::decoding);
    try {
        model_.use(parts.front().target->cache.lora());  // the same for all parts
        result = model_.decode(batch_.step().tokens, batch_.step().rows, output);
    } catch (...) {
        const auto failure = failure_of_request();
        for (const auto& part : parts) {
            part.target->cache.drop_unknown();
            // Skips a request that has already ended: its rows were found missing while another one
            // was ended.
            if (part.target->active) out_.finish(*part.target, finish_reason::error, failure);
        }
        return;
    }
    slots_.append(batch_.step().tokens, batch_.step().n_guessed);
    batch_.keep_up();
    out_.collect();  // the rows of the step before came while this one was started
    out_.begin_step();
    // The CPU's rows are there; a device's compute is known to have ended once the logits are
    // there.
    if (!batch_.step().rows.empty() && result.transfer == 0) out_.note_computed();
    ++counters_.n_decodes;
    for (const auto& part : parts) {
        (part.is_prompt() ? counters_.n_prompt_tokens : counters_.n_decoded_tokens) +=
            static_cast<std::uint64_t>(part.n_tokens);
    }
    for (const auto& part : parts) {
        heart_->enter(engine_phase::sampling);
        // What filled its run up.
        if (batch_.step().n_guessed > 0 && part.target->draft.ids.empty())
            slots_.drop_draft(*part.target);
        const auto asked = part.target->active;
        if (!asked) continue;  // its rows of the previous step did not arrive
        try {
            if (const auto failure = part.target->edits.failure()) throw error(*failure);
            if (slots_.keeps_checkpoints()) slots_.keep_checkpoint(*part.target);
            hand_out(part, result);
        } catch (...) {
            out_.fail(*part.target, asked);
        }
    }
}

// Hands out one slot's results of a step: rows or scores of its prompt, an embedding, a token.
void engine_loop::hand_out(const batch_part& part, const step_result& result) {
    auto& target = *part.target;
    // Everything waits for the rows: results without rows must not overtake those with rows.
    target.transfer = target.has_rows() ? result.transfer : 0;
    if (part.n_rows > 0) {
        if (target.prompt_rows.block) target.prompt_rows.written_at = result.written_at;
        out_.put(target, prompt_event{static_cast<int>(target.cache.size()) - part.n_rows,
                                      part.n_rows, std::exchange(target.prompt_rows, {})});
    }
    if (target.active->n_scores > 0) {
        if (auto scored = scores_of(model_, part); scored.n_rows > 0)
            out_.put(target, std::move(scored));
    }
    if (part.is_end()) {
        if (target.active->embeds) {
            auto [n_rows, values] =
                model_.embedding(target.id(), part.i_token - part.n_tokens + 1, part.n_tokens);
            out_.put(target, prompt_event{0, n_rows, {}, std::move(values)});
        }
        return out_.finish(target, finish_reason::stop);
    }
    if (!part.samples) return;
    if (target.usage.completion_tokens == 0 && target.text.empty() && !part.is_ahead)
        target.prefilled = clock::now();
    float* const logits = model_.logits(part.i_token);
    if (result.transfer != 0) out_.note_computed();
    if (target.rows.block && batch_.step().rows.size() == 1)
        target.rows.written_at = result.written_at;
    if (part.is_ahead) return sampling_.keep_ahead(target, logits);
    sampling_.go_on(target, logits, batch_.step().n_guessed > 0);
}

// ---- wait for a slot

// May a request be parked for this queued one? What is computed ahead of parked requests takes
// memory: those of an owner are as many at most as its queued ones, and a request that captures
// rows is let in while theirs take no more of the pool than all parked ones leave. One that was
// parked itself takes the place of another.
bool engine_loop::may_displace(const request& queued) const {
    const auto own = parked_.count(queued.share.get());
    if (own.n_requests >= queue_.n_waiting_max()) return false;
    return !queued.capture ||
           own.n_bytes_ahead + parked_.count().n_bytes_ahead <= pool_->stats().budget_bytes;
}

// Parks a request whose consumer is behind, or whose owner holds more slots than another, if the
// consumer of another request waits, which gets its slot: the one that comes before the others.
// False: there is none.
bool engine_loop::make_way() {
    looked_for_way_ = clock::now();
    for (auto& one : slots_) one.was_left_out = std::exchange(one.gives_way, false);
    // Was a slot kept out of the last step for a request that does not want it any more?
    const auto is_back = [this] {
        return std::any_of(slots_.begin(), slots_.end(), [](const slot& one) {
            return one.active && one.was_left_out && !one.gives_way;
        });
    };
    if (queue_.n_waiting() == 0 && parked_.size() == 0) return is_back();
    if (!slots_.has_held() && !queue_.has_owners()) return is_back();
    const auto slot_for = [this](const request& one) -> slot* {
        // One that a slot is free for came after admit(), and rang the doorbell.
        if (!one.box->is_starving() || slots_.can_admit(one)) return nullptr;
        auto* const found = slots_.parkable_for(one, looked_for_way_);
        if (!found) return nullptr;
        // What its last step gave is handed out first.
        found->gives_way =
            found->state == slot_state::sampling || out_.n_on_the_way(found->active) > 0;
        return found->gives_way ? nullptr : found;
    };
    slot *for_queued = nullptr, *for_returning = nullptr;
    const auto finds_for_queued = [&](const request& one) {
        auto* const found = may_displace(one) ? slot_for(one) : nullptr;
        if (found) for_queued = found;
        return found != nullptr;
    };
    const auto finds_for_returning = [&](const parked_request& one) {
        auto* const found = one.progress.awaits_answer ? nullptr : slot_for(*one.of);
        if (found) for_returning = found;
        return found != nullptr;
    };
    // By reference: a copy would need memory, and no request answers for it.
    const auto queued = queue_.first_waiting(std::ref(finds_for_queued));
    const auto returning = parked_.first(std::ref(finds_for_returning));
    if (!queued && !returning) return is_back();
    const bool is_queued = !returning || (queued && queued->comes_before(*returning));
    const auto& wanted = is_queued ? queued : returning;
    auto& freed = is_queued ? *for_queued : *for_returning;
    std::optional<error> failure;
    try {
        if (!slots_.keep_cells(freed, parked_.n_bytes_left_for_cells())) return true;
        park(freed);
    } catch (...) {
        failure = failure_of_request();
    }
    if (is_queued && queue_.take(wanted)) {
        failure ? fail(*wanted, *failure) : start(wanted);
    } else if (is_queued) {
        // It was cancelled just now. No request's slot is this one any more, so nobody may read it.
        if (!failure) freed.cache.clear();
    } else {
        auto one = std::move(*parked_.take(wanted));
        failure ? out_.end_parked(one, finish_reason::error, std::move(failure))
                : go_on(std::move(one));
    }
    return true;
}

// Changes nothing if it raises.
void engine_loop::park(slot& target) {
    const auto of = target.active;
    const int n_ahead = slots_.n_ahead(target);
    parked_.make_place();
    auto progress = slots_.vacate(target);
    of->waits_since = clock::now();
    // Half of what it runs ahead: its text is evaluated again, which is not worth it for one token.
    parked_.add({of, std::move(progress), n_ahead / 2 + n_ahead % 2, of->box->n_bytes_ahead()});
    ++counters_.n_parkings;
}

// ---- wait

// If every slot waits for its consumer, and none can be freed, that consumer may be the very thread
// that waits here for a request without a slot. Only the consumers can know. False: one has begun
// to wait since this round began; what it did just before that may free a slot in the next one.
bool engine_loop::tell_stalled() {
    bool has_told_all = true;
    const auto tell = [&](request& wanted, bool is_queued) {
        // Its consumer has begun to wait since make_way(), and rang the doorbell; or somebody's
        // turn ends soon.
        const bool will_have_slot = slots_.parkable_for(wanted, clock::time_point::max());
        if (will_have_slot && (!is_queued || may_displace(wanted))) return;
        const auto holders = slots_.stalled_on(wanted);
        if (!holders.empty() && !wanted.box->stall(holders)) has_told_all = false;
    };
    if (queue_.n_waiting() > 0) {
        for (const auto& wanted : queue_.waiting()) tell(*wanted, true);
    }
    if (parked_.size() > 0) {
        for (const auto& wanted : parked_.requests()) tell(*wanted, false);
    }
    return has_told_all;
}

std::optional<engine_loop::clock::time_point> engine_loop::next_deadline() const {
    std::optional<clock::time_point> first;
    for (const auto& one : slots_) {
        if (one.deadline) first = std::min(first.value_or(*one.deadline), *one.deadline);
    }
    if (queue_.n_waiting() == 0 && parked_.size() == 0) return first;
    // Those that have ended since make_way() too: it looks again at once.
    const auto turn = slots_.next_turn(looked_for_way_);
    return first && turn ? std::min(first, turn) : std::max(first, turn);
}

}  // namespace kqview
