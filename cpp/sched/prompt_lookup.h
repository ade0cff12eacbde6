// Guesses how a text goes on from how it went on before: where its last tokens have been in it
// already, what followed them there. And how many tokens of a guess will come true, from how many
// did of those before.
// Owner:   the slot.
// Threads: the engine thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/ids.h"

namespace kqview {

// How often guessed tokens have come true, those of late above all.
class hit_rate {
public:
    // Of a run of `n` guesses, so many.
    double n_expected(std::size_t n) const;
    // Of a run of guesses the first `n_true` came true.
    void note(std::size_t n_guessed, std::size_t n_true);
    // Nothing was guessed for a token: what is known ages.
    void fade() {
        n_true_ += (first_rate * n_seen_ - n_true_) / 256;
        ++n_silent_;
    }
    // Whether hardly anything is known: then a guess is worth it for what it tells.
    bool is_untried() const { return n_seen_ < n_first + n_trials || n_silent_ >= n_silent_most; }

private:
    static constexpr double n_remembered = 64;
    static constexpr double n_first = 2, first_rate = 0.7;  // as if that had been seen
    static constexpr double n_trials = 3;
    static constexpr int n_silent_most = 128;

    double n_true_ = n_first * first_rate;
    double n_seen_ = n_first;
    int n_silent_ = 0;  // tokens since the last guess
};

class prompt_lookup {
public:
    // Another text begins: `prompt` and what will be generated. `prediction`: what may be.
    void restart(std::span<const token_id> prompt, std::span<const token_id> prediction);

    // The tokens that may follow `tokens` and `last`, at most `n_most`; empty if the text has not
    // ended like this before. Valid until the next call. Without a note() about it, the `last` of
    // the next call says whether its first token came true.
    // Cost: what has been added to the text since the call before; all of it after restart().
    std::span<const token_id> guess(const std::vector<token_id>& tokens, token_id last,
                                    std::size_t n_most);
    // How many of the last guess's first `n` tokens will come true, as it was with guesses after
    // as long a match.
    double n_expected(std::size_t n) const { return rates_[i_rate_].n_expected(n); }
    // The last guess was evaluated as far as this, and so many tokens came true.
    void note(std::size_t n_guessed, std::size_t n_true);

private:
    // Places are looked up by the tokens that end there.
    static constexpr std::size_t n_key = 2;
    static constexpr std::size_t n_places_max = 16;  // that are looked at, the last ones
    static constexpr std::size_t n_match_max = 32;   // longer matches are as good

    void clear();
    void add(token_id id);
    std::size_t n_matching(std::size_t place) const;

    std::vector<token_id> text_;
    std::vector<token_id> prediction_;  // what the text begins with that is no part of it
    std::unordered_map<std::uint64_t, std::uint32_t> last_place_;  // by key: behind its last token
    std::vector<std::uint32_t>
        place_before_;  // by place: the one before with the same key; 0: none
    std::vector<token_id> guess_;
    std::array<hit_rate, 7> rates_;  // by the bits of the length of the match
    std::size_t i_rate_ = 0;         // of the last guess
};

}  // namespace kqview
