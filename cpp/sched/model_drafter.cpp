#include "sched/model_drafter.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>

#include "base/error.h"
#include "base/log.h"
#include "sched/reuse_plan.h"

namespace kqview {

namespace {

// Fewer tokens are evaluated as fast as a sequence is copied.
constexpr std::size_t n_copied_min = 64;

}  // namespace

std::chrono::duration<double> model_drafter::guess(std::span<text> texts, std::size_t n_catch_up) {
    for (auto& one : texts) one.guess.clear();
    if (is_broken_) return {};
    try {
        ready_.clear();
        std::size_t n_most = 0;
        for (auto& one : texts) {
            one.guess.reserve(one.n_most);
            follow(one.slot, one.tokens, n_catch_up);
            if (held(one.slot).size() < one.tokens.size()) continue;
            ready_.push_back(&one);
            n_most = std::max(n_most, one.n_most);
        }
        const auto started = std::chrono::steady_clock::now();
        std::size_t n = 0;
        for (; n < n_most; ++n) {
            if (is_chain()) model_.predict_with(static_cast<int>(n));
            std::erase_if(ready_, [&](const text* one) {
                // A further layer has not seen the last token and what is guessed so far.
                if (is_chain()) cut(one->slot, one->tokens.size());
                const bool has_ended = one->guess.size() < n || one->n_most <= n;
                return has_ended || held(one->slot).size() < one->tokens.size();
            });
            // llama.cpp computes adjacent sequences together.
            adjacent_.clear();
            for (auto* const one : ready_) {
                if (!adjacent_.empty() && one->slot != adjacent_.back()->slot + 1) {
                    extend(adjacent_);
                    adjacent_.clear();
                }
                adjacent_.push_back(one);
            }
            if (adjacent_.empty()) break;
            extend(adjacent_);
        }
        // What it made of guesses gives way to what it will make of the tokens. Of several layers
        // not all have seen the last token.
        const std::size_t n_sound = is_chain() ? 0 : 1;
        for (std::size_t i = 0; model_.needs_states() && i < texts.size(); ++i) {
            const auto& one = texts[i];
            cut(one.slot, std::min(held(one.slot).size(), one.tokens.size() + n_sound));
        }
        if (n > 0) return (std::chrono::steady_clock::now() - started) / static_cast<double>(n);
    } catch (const error& failure) {
        for (auto& one : texts) one.guess.clear();
        give_up(failure);
    }
    return {};
}

std::size_t model_drafter::n_most() const {
    return is_chain() ? static_cast<std::size_t>(model_.n_predicting())
                      : std::numeric_limits<std::size_t>::max();
}

void model_drafter::keep_up(slot_id slot, std::span<const token_id> tokens) {
    if (is_broken_ || !model_.needs_states()) return;
    try {
        follow(slot, tokens, tokens.size());
    } catch (const error& failure) {
        give_up(failure);
    }
}

void model_drafter::give_up(const error& failure) {
    is_broken_ = true;
    log_ring::instance().write(
        log_level::warning,
        text_of("the draft model guesses nothing any more: ", failure.what(), "\n").c_str());
}

// Brings a slot's sequence to the tokens of its text, or nearer.
void model_drafter::follow(slot_id slot, std::span<const token_id> tokens, std::size_t n_catch_up) {
    take_over(slot, tokens);
    auto& ids = held(slot);
    ids.reserve(tokens.size() + 1);
    // Tokens that it can no longer evaluate count as held: no query will see them.
    if (const auto n_untold = model_.n_untold(slot, tokens.size()); n_untold > ids.size()) {
        cut(slot, 0);
        ids.assign(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(n_untold));
    }
    const auto n_step = std::min(n_catch_up, static_cast<std::size_t>(model_.n_chunk()));
    const auto n_end = std::min(tokens.size(), ids.size() + n_step);
    if (ids.size() == n_end) return;
    step_.clear();
    const auto n_held = ids.size();
    for (auto i = n_held; i < n_end; ++i)
        step_.push_back({slot, tokens[i], static_cast<std::int32_t>(i), false});
    for (int i = 0; i < model_.n_predicting() && ids.size() == n_held; ++i) {
        if (is_chain()) model_.predict_with(i);
        decode();
        if (i + 1 < model_.n_predicting()) cut(slot, n_held);  // for the next layer
    }
}

// Keeps what the sequence has of these tokens, or copies one that has much more of them.
void model_drafter::take_over(slot_id slot, std::span<const token_id> tokens) {
    const auto n_alike = [&](const ids& one) {
        return static_cast<std::size_t>(std::ranges::mismatch(one, tokens).in1 - one.begin());
    };
    const auto n_own = n_alike(held(slot));
    slot_id best = slot;
    std::size_t n_best = n_own + n_copied_min;
    for (slot_id other = 0; other < model_.n_slots(); ++other) {
        if (const auto n = n_alike(held(other)); n > n_best) best = other, n_best = n;
    }
    if (best == slot) return cut(slot, n_own);
    const auto source = held(best);
    cut(slot, 0);
    model_.copy(best, slot);
    held(slot) = source;
    cut(slot, n_best);
}

void model_drafter::cut(slot_id slot, std::size_t n_kept) {
    auto& ids = held(slot);
    if (n_kept == ids.size()) return;
    if (!model_.truncate(slot, static_cast<int>(n_kept))) {
        model_.truncate(slot, 0);
        n_kept = 0;
    }
    ids.resize(n_kept);
}

// One more guessed token for each text; they have equally many.
void model_drafter::extend(std::span<text* const> texts) {
    step_.clear();
    for (const auto* const one : texts) {
        for (auto i = held(one->slot).size(); i <= one->tokens.size() + one->guess.size(); ++i) {
            const auto n_before = i - one->tokens.size();
            const auto id = n_before == 0 ? one->last : one->guess[n_before - 1];
            step_.push_back({one->slot, id, static_cast<std::int32_t>(i), true});
        }
    }
    decode();
    const auto n_each = step_.size() / texts.size();
    for (std::size_t i = 0; i < texts.size(); ++i) {
        const auto id = model_.likeliest(static_cast<int>((i + 1) * n_each - 1));
        // The end of a text is not guessed: nothing could follow it.
        if (!model_.is_end_of_generation(id)) texts[i]->guess.push_back(id);
    }
}

void model_drafter::decode() {
    // Before llama.cpp has the tokens: nothing may fail afterwards.
    for (const auto& token : step_) held(token.slot).reserve(held(token.slot).size() + 1);
    (void)model_.decode(step_, {}, step_output::logits);
    for (const auto& token : step_) held(token.slot).push_back(token.id);
}

}  // namespace kqview
