// Guesses how a text goes on from how it went on before: where its last tokens have been in it
// already, what followed them there. And how many tokens a guess is worth, from how many of those
// before came true.
// Owner:   the slot.
// Threads: the engine thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/ids.h"

namespace kqview {

class prompt_lookup {
public:
    // The tokens that may follow `tokens` and `last`, at most `n_most`; empty if the text has not
    // ended like this before, or if guessing has not been worth it. Valid until the next call.
    // Cost: what has been added to the text since the call before; all of it after forget().
    std::span<const token_id> guess(const std::vector<token_id>& tokens, token_id last,
                                    std::size_t n_most);
    // Of the last guess, so many tokens came true.
    void note(std::size_t n_guessed, std::size_t n_true);
    // The text is another one.
    void forget();

private:
    // Places are looked up by the tokens that end there.
    static constexpr std::size_t n_key = 2;
    static constexpr std::size_t n_places_max = 16;  // that are looked at, the last ones
    static constexpr std::size_t n_match_max = 32;   // longer matches are as good
    static constexpr std::size_t n_first = 4;        // tokens of the first guess
    static constexpr std::size_t n_worth_max = 64;   // of any
    static constexpr std::size_t n_pause_max = 64;   // tokens without a guess

    void clear();
    void add(token_id id);
    std::size_t n_matching(std::size_t place) const;

    std::vector<token_id> text_;
    std::unordered_map<std::uint64_t, std::uint32_t> last_place_;  // by key: behind its last token
    std::vector<std::uint32_t>
        place_before_;  // by place: the one before with the same key; 0: none
    std::vector<token_id> guess_;
    std::size_t n_worth_ = n_first;
    std::size_t n_pause_ = 0;       // after the next guess of which nothing comes true
    std::size_t n_pause_left_ = 0;  // tokens that are not guessed
};

}  // namespace kqview
