#include "sched/prompt_lookup.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace kqview {

namespace {

constexpr token_id no_token = -1;

std::uint64_t key_of(token_id before, token_id last) {
    return (std::uint64_t{static_cast<std::uint32_t>(before)} << 32) |
           static_cast<std::uint32_t>(last);
}

}  // namespace

double hit_rate::n_expected(std::size_t n) const {
    // After a long run of true guesses, rounding would make it 1.
    const double rate = std::min(n_true_ / n_seen_, 0.999);
    return rate * (1 - std::pow(rate, static_cast<double>(n))) / (1 - rate);
}

void hit_rate::note(std::size_t n_guessed, std::size_t n_true) {
    n_silent_ = 0;
    n_true_ += static_cast<double>(n_true);
    n_seen_ += static_cast<double>(std::min(n_true + 1, n_guessed));
    if (n_seen_ <= n_remembered) return;
    n_true_ *= n_remembered / n_seen_;
    n_seen_ = n_remembered;
}

void prompt_lookup::restart(std::span<const token_id> prompt,
                            std::span<const token_id> prediction) {
    clear();
    guess_.clear();
    rates_.fill({});
    prediction_.clear();
    if (prediction.empty()) return;
    // As if it had followed the prompt once.
    const auto end = prompt.last(std::min(prompt.size(), n_key));
    prediction_.assign(end.begin(), end.end());
    prediction_.insert(prediction_.end(), prediction.begin(), prediction.end());
    prediction_.push_back(no_token);
}

void prompt_lookup::clear() {
    text_.clear();
    last_place_.clear();
    place_before_.clear();
}

void prompt_lookup::add(token_id id) {
    text_.push_back(id);
    const auto place = static_cast<std::uint32_t>(text_.size());
    place_before_.push_back(0);
    if (place < n_key) return;
    auto& last = last_place_[key_of(text_[place - 2], id)];
    place_before_.back() = std::exchange(last, place);
}

// How many tokens before this place are those that the text ends with.
std::size_t prompt_lookup::n_matching(std::size_t place) const {
    std::size_t n = 0;
    while (n < std::min(place, n_match_max) &&
           text_[place - 1 - n] == text_[text_.size() - 1 - n]) {
        ++n;
    }
    return n;
}

std::span<const token_id> prompt_lookup::guess(const std::vector<token_id>& tokens, token_id last,
                                               std::size_t n_most) {
    const auto n_before = prediction_.size();
    // All of `tokens` but what came since is known. A text that has been changed is not.
    auto n_known = std::max(text_.size(), n_before) - n_before;
    if (n_known > tokens.size() ||
        (n_known > 0 && text_[n_before + n_known - 1] != tokens[n_known - 1])) {
        clear();
        n_known = 0;
        guess_.clear();
    }
    if (!guess_.empty() && n_known == tokens.size()) note(1, guess_.front() == last ? 1 : 0);
    guess_.clear();
    text_.reserve(n_before + tokens.size() + 1);
    if (text_.empty()) std::ranges::for_each(prediction_, [this](token_id id) { add(id); });
    for (auto i = n_known; i < tokens.size(); ++i) add(tokens[i]);
    add(last);
    std::size_t best = 0, n_best = 0, n_seen = 0;
    for (std::size_t place = place_before_.back(); place > 0 && n_seen < n_places_max; ++n_seen) {
        // The last one of equals: a text repeats what it has said of late.
        if (const auto n = n_matching(place); n > n_best) best = place, n_best = n;
        place = place_before_[place - 1];
    }
    i_rate_ = static_cast<std::size_t>(std::bit_width(n_best));
    // Beyond the end of the text its guess goes on: a text that repeats a phrase.
    for (std::size_t i = 0; best > 0 && i < n_most; ++i) {
        const auto at = best + i;
        const auto id = at < text_.size() ? text_[at] : guess_[at - text_.size()];
        if (id == no_token) break;
        guess_.push_back(id);
    }
    return guess_;
}

void prompt_lookup::note(std::size_t n_guessed, std::size_t n_true) {
    rates_[i_rate_].note(n_guessed, n_true);
    guess_.clear();
}

}  // namespace kqview
