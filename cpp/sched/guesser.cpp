#include "sched/guesser.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

namespace kqview {

namespace {

// Guesses have to make a step's tokens come faster by this, and to no text of the step by less than
// the other.
constexpr double least_gain = 1.05;
constexpr double most_held_up = 1.5;

// Whether guesses may follow its token: not behind a prompt, nor where its row has no block.
bool may_guess(const batch_part& part) {
    const auto& target = *part.target;
    const auto& active = *target.active;
    return active.n_draft_max > 0 && target.usage.completion_tokens > 0 &&
           (target.text.empty() || active.is_steered) && (!active.capture || target.rows.block);
}

// A model whose guesses are not made tells nothing about them.
bool is_untried(const batch_part& part) {
    const auto& target = *part.target;
    return target.draft.is_of_model && !target.draft.ids.empty() && target.draft_rate.is_untried();
}

// Blocks for the rows of the guesses, which the pool may have fewer of. They are the token's once
// its guess has come true, and go back before the next step otherwise.
void take_draft_rows(block_pool& pool, slot& target) {
    auto& draft = target.draft;
    const auto& plan = target.active->capture;
    draft.rows.reserve(draft.ids.size());
    while (draft.rows.size() < draft.ids.size()) {
        const auto n_before = target.cache.size() + 1 + draft.rows.size();
        const auto layout = plan->layout(static_cast<int>(n_before) + 1);
        auto block = pool.try_take(layout.size_bytes);
        if (!block) break;
        draft.rows.push_back({std::move(block), plan, layout, nullptr});
    }
    draft.ids.resize(draft.rows.size());
}

// Makes a run of each part's token: `n_each` tokens behind it. Requires room in tokens and rows.
void widen(batch& step, std::size_t n_each) {
    step.n_guessed = n_each;
    // A row of the last layer is found by its distance from the end of the step.
    const bool needs_outputs = std::ranges::any_of(
        step.rows, [](const step_rows& one) { return one.plan->needs_outputs(); });
    for (auto& row : step.rows) row.i_token *= static_cast<int>(1 + n_each);
    for (auto i_part = step.parts.size(); i_part-- > 0;) {
        auto& part = step.parts[i_part];
        auto& draft = part.target->draft;
        auto token = step.tokens[i_part];
        part.i_token = static_cast<int>(i_part * (1 + n_each));
        auto to = step.tokens.begin() + part.i_token;
        *to = token;
        draft.i_token = part.i_token + 1;
        for (std::size_t i = 0; i < n_each; ++i) {
            const bool is_guess = i < draft.ids.size();
            if (is_guess) token.id = draft.ids[i];
            token.wants_logits = is_guess || needs_outputs;
            ++token.position;
            *++to = token;
            if (i >= draft.rows.size()) continue;
            const auto& rows = draft.rows[i];
            step.rows.push_back({rows.plan, draft.i_token + static_cast<int>(i), token.position + 1,
                                 rows.layout, rows.block->data()});
        }
        part.target->cache.expect_unknown();
    }
}

}  // namespace

void guesser::add_to(batch& step) {
    drafting_ = {};
    const auto has_ended = [](const batch_part& part) { return !part.target->active; };
    if (std::ranges::any_of(step.parts, has_ended) || std::ranges::none_of(step.parts, may_guess))
        return;
    std::size_t n_each = 0, n_rows = step.rows.size();
    try {
        collect(step);
        for (const auto& part : step.parts) {
            auto& target = *part.target;
            auto& draft = target.draft;
            if (target.active->capture) take_draft_rows(pool_, target);
            draft.edits = target.edits.at(target.cache.size());
            target.cache.make_place(1 + draft.ids.size());
            n_each = std::max(n_each, draft.ids.size());
            n_rows += draft.rows.size();
        }
        step.rows.reserve(n_rows);
        step.tokens.resize(step.parts.size() * (1 + n_each));
    } catch (const std::bad_alloc&) {
        step.tokens.resize(step.parts.size());
        for (const auto& part : step.parts) part.target->draft = {};
        return;
    }
    if (n_each > 0) widen(step, n_each);
}

void guesser::keep_up(const batch& step) {
    if (!drafter_) return;
    try {
        for (const auto& part : step.parts) {
            const auto& target = *part.target;
            if (part.is_prompt() && target.active && target.active->n_draft_max > 0)
                drafter_->keep_up(target.id(), target.cache.tokens());
        }
    } catch (const std::bad_alloc&) {  // guesses are worse then
    }
}

// Leaves the guesses of each part in its draft: as many as are worth their time.
void guesser::collect(const batch& step) {
    const auto n_parts = static_cast<int>(step.parts.size());
    int n_most = std::min(model_.n_chunk(), model_.n_outputs()) / n_parts - 1;
    n_most = std::min(n_most, model_.n_taken_back_most());
    bool has_rows = false;
    for (const auto& part : step.parts) {
        const auto& target = *part.target;
        const auto* const edits = target.edits.at(target.cache.size());
        n_most = std::min(n_most, model_.n_ctx() - static_cast<int>(target.cache.size()) - 1);
        has_rows = has_rows || target.active->capture;
        // Whoever watches its steps would see guesses.
        if (target.is_unclear || (edits && edits->is_watched())) n_most = 0;
        // Steps of others lose the states that are kept for its guesses.
        if (!model_.can_truncate() && target.is_chosen_beside()) n_most = 0;
    }
    if (n_most <= 0 || (has_rows && !model_.can_draft_rows(step.parts.size()))) return;
    guessed_.clear();
    for (const auto& part : step.parts) {
        auto& target = *part.target;
        auto& draft = target.draft;
        const auto n = static_cast<std::size_t>(n_guessable(part, n_most));
        if (n == 0) continue;
        draft.is_of_model = drafter_ && target.active->prediction.empty();
        if (draft.is_of_model) {
            draft.ids.resize(std::min(n, drafter_->n_most()));  // how many there may be
            guessed_.push_back(
                {target.id(), target.cache.tokens(), target.pending, draft.ids.size(), draft.ids});
        } else {
            const auto guess = target.lookup.guess(target.cache.tokens(), target.pending, n);
            draft.ids.assign(guess.begin(), guess.end());
        }
    }
    const auto n_worth = n_worth_guessing(step);
    for (const auto& part : step.parts) {
        auto& ids = part.target->draft.ids;
        ids.resize(std::min(ids.size(), n_worth));
    }
    if (guessed_.empty()) return;
    for (auto& one : guessed_) {
        one.n_most = std::min(one.n_most, n_worth);
        if (n_worth == 0) slots_[static_cast<std::size_t>(one.slot)].draft_rate.fade();
    }
    if (n_worth == 0) return costs_.fade_draft();
    const auto started = clock::now();
    const int n_chunk = model_.n_chunk();
    const int n_catch_up = step.parts.size() == 1 ? n_chunk : costs_.n_between(n_chunk);
    costs_.note_draft(drafter_->guess(guessed_, static_cast<std::size_t>(n_catch_up)));
    drafting_ = clock::now() - started;
}

// The most tokens that may be guessed behind this part's: not more than its consumer may be behind.
// Where tokens that it leaves cannot be dropped it is behind by none, and guesses are few.
int guesser::n_guessable(const batch_part& part, int n_most) const {
    if (!may_guess(part)) return 0;
    const auto& target = *part.target;
    const auto& active = *target.active;
    const int n_ahead = static_cast<int>(active.box->n_ahead()) + out_.n_on_the_way(target.active);
    const int n_more = model_.can_truncate() ? slots_.n_ahead(active, false) - n_ahead : n_most;
    return std::max(0, std::min({n_most, active.n_draft_max, n_more, out_.n_left(target) - 1}));
}

// How many guesses behind each text make the step's tokens come fastest; one where that is not
// known. What they cost the others of the step counts as well: a text of which nothing is guessed
// may not be held up for long.
std::size_t guesser::n_worth_guessing(const batch& step) const {
    std::size_t n_longest = 0, n_best = 0;
    for (const auto& part : step.parts)
        n_longest = std::max(n_longest, part.target->draft.ids.size());
    const double alone = costs_.of_texts(step.parts.size());
    double best = static_cast<double>(step.parts.size()) * least_gain;
    for (std::size_t n = 1; n <= n_longest; ++n) {
        double time = costs_.of_texts(step.parts.size() * (1 + n));
        if (!guessed_.empty()) time += costs_.of_draft() * static_cast<double>(n);
        double sum = 0, least = std::numeric_limits<double>::max();
        for (const auto& part : step.parts) {
            const auto& target = *part.target;
            const auto n_own = std::min(n, target.draft.ids.size());
            const double n_true = n_own == 0                 ? 0
                                  : target.draft.is_of_model ? target.draft_rate.n_expected(n_own)
                                                             : target.lookup.n_expected(n_own);
            sum += 1 + n_true;
            least = std::min(least, 1 + n_true);
        }
        if (time > most_held_up * least * alone) break;
        if (sum * alone / time > best) best = sum * alone / time, n_best = n;
        if (n == 1 && n_best == 0 && std::ranges::any_of(step.parts, is_untried)) n_best = 1;
    }
    return n_best;
}

}  // namespace kqview
