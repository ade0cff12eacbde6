#include "sched/slot_sampler.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/ids.h"

namespace kqview {

namespace {

constexpr std::chrono::milliseconds longest_lane_wait{2};
// The likeliest logits of a token that was evaluated with others differ by less from those of the
// token alone, as far as tests/engine/test_speculation.py knows.
constexpr float tie_tolerance = 0.02F;
constexpr float no_tie = -1.0F;

}  // namespace

void slot_sampler::go_on(slot& target, float* logits, bool is_wide) {
    target.is_unclear = false;
    if (auto& draft = target.draft; !draft.ids.empty()) {
        target.usage.draft_tokens += static_cast<int>(draft.ids.size());
        ++counters_.n_drafts;
        counters_.n_draft_tokens += draft.ids.size();
        // Copies those that are not looked at before the next step.
        if (target.is_chosen_beside()) {
            const auto n_vocab = static_cast<std::size_t>(model_.n_vocab());
            draft.logits.reserve(draft.ids.size() * n_vocab);
            for (std::size_t i = 0; i < draft.ids.size(); ++i) {
                const auto* const row = model_.logits(draft.i_token + static_cast<int>(i));
                draft.logits.insert(draft.logits.end(), row, row + n_vocab);
            }
        }
    }
    // The step's first token cannot be taken back from recurrent state.
    sample(target, logits, is_wide && model_.can_truncate());
    follow_draft(target);
}

void slot_sampler::keep_ahead(slot& target, const float* logits) {
    auto& draft = target.draft;
    draft.is_ahead = true;
    draft.edits = target.edits.at(target.cache.size());
    draft.logits.assign(logits, logits + model_.n_vocab());
    draft.rows.push_back(std::exchange(target.rows, {}));
    draft.ids.push_back(*target.likely);
    target.asked = clock::now();  // its answer may have waited for this step
}

// Samples here, or in the lane if the picker may take long, or leaves it to the consumer of a
// steered request: in both cases the slot then stays out of steps.
void slot_sampler::sample(slot& target, float* logits, bool is_wide) {
    const std::span row(logits, static_cast<std::size_t>(model_.n_vocab()));
    if (const auto& rows = target.rows; rows.block && rows.layout.has_logits)  // with the rows
        std::memcpy(rows.block->data() + rows.layout.logits_offset, logits, row.size_bytes());
    if (target.picker && target.picker->is_slow())
        target.ticket = std::make_shared<sampler_lane::ticket>(std::move(target.picker));
    if (!target.ticket) {
        const bool is_steered = target.active->is_steered;
        auto& picker = is_steered ? *target.active->picker : *target.picker;
        if (is_wide && !picker.is_slow() && picker.is_tied(row, tie_tolerance))
            return evaluate_alone(target);
        return is_steered ? out_.put(target, row) : out_.put(target, picker.pick(logits));
    }
    lane_.start(target.ticket, row, is_wide ? tie_tolerance : no_tie);
    target.deadline =
        clock::now() + std::chrono::duration_cast<clock::duration>(target.active->pick_limit);
    ++counters_.n_handed_over;
    change(target.state, slot_state::sampling);
}

void slot_sampler::follow_draft(slot& target) {
    while (take_guess(target)) {
        auto& draft = target.draft;
        const auto i = draft.n_true - 1;
        const auto n_vocab = static_cast<std::size_t>(model_.n_vocab());
        const bool is_ahead = draft.is_ahead;
        sample(target,
               draft.logits.empty() ? model_.logits(draft.i_token + static_cast<int>(i))
                                    : draft.logits.data() + i * n_vocab,
               !is_ahead);
        if (is_ahead) draft = {};
    }
}

// True: the slot's last token is the one that was guessed, and the cache has it now. Otherwise, or
// if it was evaluated with other edits than it should be, the guesses are dropped.
bool slot_sampler::take_guess(slot& target) {
    auto& draft = target.draft;
    if (draft.ids.empty() || target.state == slot_state::sampling ||
        target.state == slot_state::steered) {
        return false;
    }
    const auto i = draft.n_true;
    const auto n_cached = target.cache.size();
    const bool is_true = i < draft.ids.size() && target.pending == draft.ids[i] &&
                         target.cache.has_unknown() && !target.is_in_prompt() &&
                         target.edits.at(n_cached) == draft.edits;
    if (!is_true) {
        slots_.drop_draft(target);
        return false;
    }
    target.cache.go_on_with(draft.edits);
    const step_token known{target.id(), target.pending, static_cast<std::int32_t>(n_cached), true,
                           draft.edits};
    slots_.append({&known, 1});
    if (!draft.rows.empty()) target.rows = std::move(draft.rows[i]);
    ++draft.n_true;
    if (draft.is_ahead) {
        if (target.transfer != 0) model_.await(std::exchange(target.transfer, 0));
        return true;
    }
    ++target.usage.accepted_tokens;
    ++counters_.n_accepted_tokens;
    ++counters_.n_decoded_tokens;
    return true;
}

// Takes the slot's last token back into the next step, which has no guesses: what rounding decides
// is decided as without them.
void slot_sampler::evaluate_alone(slot& target) {
    ++counters_.n_ties;
    target.cache.truncate(target.cache.size() - 1);
    slots_.drop_draft(target);
    target.is_unclear = true;
}

bool slot_sampler::take_picked(clock::duration last_step) {
    const auto is_sampling = [](const slot& one) { return one.state == slot_state::sampling; };
    if (std::none_of(slots_.begin(), slots_.end(), is_sampling)) return false;
    // Waiting for a picker that is nearly done keeps its slot in the batch. Costs less than a step,
    // and at most once per token.
    lane_.await_quick(std::min<clock::duration>(longest_lane_wait, last_step / 2));
    bool has_picked = false;
    for (auto& target : slots_) {
        if (!is_sampling(target)) continue;
        const bool is_done = lane_.is_done(*target.ticket);
        if (!is_done && clock::now() < target.deadline) continue;
        has_picked = true;
        target.deadline.reset();
        const auto asked = target.active;
        try {
            if (!is_done) {
                throw error(errc::invalid_sampling, "choosing one token took more than ",
                            asked->pick_limit.count(),
                            " s, which is the limit; simplify the grammar, json_schema or regex");
            }
            change(target.state, slot_state::decode);
            if (auto picked = lane_.take(*target.ticket)) {
                out_.put(target, std::move(*picked));
                follow_draft(target);
            } else {
                evaluate_alone(target);
            }
        } catch (...) {
            out_.fail(target, asked);
        }
    }
    return has_picked;
}

}  // namespace kqview
