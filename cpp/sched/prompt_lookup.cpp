#include "sched/prompt_lookup.h"

#include <algorithm>
#include <utility>

namespace kqview {

namespace {

std::uint64_t key_of(token_id before, token_id last) {
    return (std::uint64_t{static_cast<std::uint32_t>(before)} << 32) |
           static_cast<std::uint32_t>(last);
}

}  // namespace

void prompt_lookup::clear() {
    text_.clear();
    last_place_.clear();
    place_before_.clear();
}

void prompt_lookup::forget() {
    clear();
    n_worth_ = n_first;
    n_pause_ = n_pause_left_ = 0;
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
    guess_.clear();
    // All of `tokens` but what came since is known. A text that has been changed is not.
    const auto n_known = std::min(text_.size(), tokens.size());
    if (text_.size() > tokens.size() ||
        (n_known > 0 && text_[n_known - 1] != tokens[n_known - 1])) {
        clear();
    }
    text_.reserve(tokens.size() + 1);
    for (auto i = text_.size(); i < tokens.size(); ++i) add(tokens[i]);
    add(last);
    if (n_pause_left_ > 0) {
        --n_pause_left_;
        return {};
    }
    n_most = std::min(n_most, n_worth_);
    std::size_t best = 0, n_best = 0, n_seen = 0;
    for (std::size_t place = place_before_.back(); place > 0 && n_seen < n_places_max; ++n_seen) {
        // The last one of equals: a text repeats what it has said of late.
        if (const auto n = n_matching(place); n > n_best) best = place, n_best = n;
        place = place_before_[place - 1];
    }
    if (best == 0) return {};
    // Beyond the end of the text its guess goes on: a text that repeats a phrase.
    for (std::size_t i = 0; i < n_most; ++i) {
        const auto at = best + i;
        guess_.push_back(at < text_.size() ? text_[at] : guess_[at - text_.size()]);
    }
    return guess_;
}

void prompt_lookup::note(std::size_t n_guessed, std::size_t n_true) {
    n_worth_ = std::min(n_worth_max, n_true == n_guessed ? 2 * n_worth_ : n_true + 1);
    if (n_true > 0) {
        n_pause_ = 0;
        return;
    }
    n_pause_ = std::min(n_pause_max, std::max<std::size_t>(1, 2 * n_pause_));
    n_pause_left_ = n_pause_;
}

}  // namespace kqview
