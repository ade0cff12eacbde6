// The rules of a GBNF grammar while it is read, and the grammar they are checked and laid out into.
// Threads: any; a `grammar` is immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

using grammar_sequence = std::vector<grammar_element>;

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

class grammar_rules {
public:
    std::uint32_t find_or_add(std::string_view name);
    std::uint32_t add_generated(std::uint32_t base);  // for a group or a repetition in rule `base`
    std::uint32_t add_set(character_set set);
    void define(std::uint32_t rule, std::vector<grammar_sequence> alternates);

    std::size_t n_rules() const { return bases_.size(); }

    // Raises invalid_sampling for a rule that is missing ("root" among them) or can never end, and
    // for left recursion that grows without end.
    grammar finish(work_limit& limit);

private:
    struct rule_text {
        bool is_defined = false;
        std::vector<grammar_sequence> alternates;
    };

    const std::string& name_of(std::uint32_t rule) const;
    std::vector<bool> rules_that_derive(bool with_terminals, work_limit& limit) const;
    void check_defined() const;
    void find_components(grammar& made, work_limit& limit) const;

    std::map<std::string, std::uint32_t, std::less<>> ids_;
    std::vector<std::uint32_t> bases_;  // of each rule: itself, or the rule it was generated for
    std::vector<rule_text> rules_;
    std::vector<character_set> sets_;
};

}  // namespace kqview
