// Parses GBNF text into the checked grammar that grammar_automaton.h matches.
//
// It builds the same rules as llama.cpp's own parser. That parser, however, prints errors to stderr
// without a position, and hangs, overflows the stack or aborts on grammars that are refused here:
// too large, too deeply nested, or with a rule that can never end or that begins with itself.
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

// An element of a rule's alternate.
struct grammar_element {
    enum class kind : std::uint8_t {
        end,        // of the alternate
        rule,       // value: the referenced rule
        character,  // value: a code point
        set,        // value: index into grammar::sets
        any,        // any code point
        token,      // value: the one token that matches
        token_not,  // value: the one token that does not
        accept,     // the output is complete; only after the root
    };
    kind type;
    std::uint32_t value;
};

// [a-z0] or [^a-z0]; a single character is a range of one. A reversed range matches nothing.
struct character_set {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> ranges;
    bool is_negated = false;
};

// A checked grammar in one array: alternates in sequence, each with its end. Positions are indices
// into `elements`.
struct grammar {
    static constexpr std::uint32_t accept_position = 0;

    std::vector<grammar_element> elements;
    std::vector<character_set> sets;
    // Rule r's alternates begin at starts[first_start[r]] .. starts[first_start[r + 1] - 1].
    std::vector<std::uint32_t> starts;
    std::vector<std::uint32_t> first_start;
    std::vector<bool> is_nullable;
    // Rules that can begin with one another, all in tail position, share a component. A rule has a
    // lower component than the rules that can begin with it.
    std::vector<std::uint32_t> component;
    std::vector<std::vector<std::uint32_t>> members;  // of a component
    std::uint32_t root = 0;
};

// The token that a <text>, brackets included, denotes; none unless it is exactly one token of the
// vocabulary.
using token_finder = std::function<std::optional<token_id>(std::string_view)>;

// Raises invalid_sampling for text that is not GBNF (with line and column) or that is refused as
// above, and when `limit` is exhausted.
grammar read_grammar(std::string_view text, const token_finder& find_token, work_limit& limit);

}  // namespace kqview
