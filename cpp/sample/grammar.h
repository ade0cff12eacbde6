// Reads GBNF text into the checked grammar that grammar_automaton.h matches.
//
// It builds the rules that llama.cpp's own parser would build, but that parser prints its errors to
// stderr without saying where, and runs without end, overflows the stack or aborts on grammars that
// are refused here: too large, too deeply nested, with a rule that can never end or one that begins
// with itself.
// Threads: any; keeps no state, and a `grammar` is immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace kqview {

class work_limit;

// What a rule's alternate consists of.
struct grammar_element {
    enum class kind : std::uint8_t {
        end,        // of the alternate
        rule,       // value: the rule referred to
        character,  // value: a code point
        set,        // value: an index of grammar::sets
        any,        // any code point
        token,      // value: the one token that matches
        token_not,  // value: the one token that does not
        accept,     // the output is complete; only behind the root
    };
    kind type;
    std::uint32_t value;
};

// [a-z0] or [^a-z0]; a single character is a range of one. A range whose ends are swapped matches
// nothing.
struct character_set {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> ranges;
    bool is_negated = false;
};

// A checked grammar in one array: alternates one behind the other, each with its end.
// Positions are indices of `elements`.
struct grammar {
    static constexpr std::uint32_t accept_position = 0;

    std::vector<grammar_element> elements;
    std::vector<character_set> sets;
    // Rule r's alternates begin at starts[first_start[r]] .. starts[first_start[r + 1] - 1].
    std::vector<std::uint32_t> starts;
    std::vector<std::uint32_t> first_start;
    std::vector<bool> is_nullable;
    // Rules that can begin with one another, all in tail position, have one component; a rule that
    // another one can begin with has a lower component than that.
    std::vector<std::uint32_t> component;
    std::vector<std::vector<std::uint32_t>> members;  // of a component
    std::uint32_t root = 0;
};

// The token that a <text>, brackets included, stands for; none if it is not exactly one token of
// the vocabulary.
using token_finder = std::function<std::optional<token_id>(std::string_view)>;

// Raises invalid_sampling, with line and column for a syntax error, for text that is not GBNF or
// that is refused as above, and when `limit` is spent.
grammar read_grammar(std::string_view text, const token_finder& find_token, work_limit& limit);

}  // namespace kqview
