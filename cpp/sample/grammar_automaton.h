// Matches texts against a grammar, one code point after another. The automaton is built lazily:
// repeated steps are look-ups.
//
// A state is the set of all stacks that are possible after the text so far. Stacks share their
// tails: a frame represents every way to continue after a rule that began at a given place is
// complete, so an ambiguous grammar has few frames although it has exponentially many stacks. Equal
// frames share one number, and so do equal states.
// Owner:   owns its frames and states, up to n_bytes_max; beyond that it drops all but the first
//          state and the current one.
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "sample/grammar.h"
#include "sample/work_limit.h"

namespace kqview {

// A place in the grammar, and the frame that it returns to.
struct grammar_item {
    std::uint32_t position;
    std::uint32_t frame;
    bool operator==(const grammar_item&) const = default;
    auto operator<=>(const grammar_item&) const = default;
};

// Numbers sets of items: equal sets get the same number, a new set a number above all earlier ones.
class grammar_item_sets {
public:
    std::uint32_t add(std::span<const grammar_item> sorted);
    std::span<const grammar_item> operator[](std::uint32_t id) const {
        return {items_.data() + starts_[id], items_.data() + starts_[id + 1]};
    }
    std::size_t size() const { return starts_.size() - 1; }
    std::size_t n_bytes() const;
    void clear();

private:
    std::vector<grammar_item> items_;
    std::vector<std::size_t> starts_{0};
    std::unordered_multimap<std::size_t, std::uint32_t> ids_;
};

// A character whose bytes are still incomplete.
struct partial_character {
    std::uint32_t value = 0;     // of the bits so far
    std::int32_t n_missing = 0;  // bytes; -1: invalid
};

class grammar_automaton {
public:
    // Limits beyond which a request's grammar is refused.
    static constexpr std::size_t n_items_max = 20'000;                 // of one state
    static constexpr std::size_t n_bytes_max = std::size_t{32} << 20;  // of frames and states

    grammar_automaton(std::shared_ptr<const grammar> rules, work_limit& limit);

    using state = std::uint32_t;
    static constexpr state dead = 0;  // no stack is left

    // The state before the next token. Other states are valid until the next set_current().
    state current() const { return current_; }
    // The state before any text.
    state first() const { return first_; }
    void set_current(state next);

    // All of these raise invalid_sampling when the limit is exhausted or a limit above is reached.
    state after(state from, std::uint32_t code_point, work_limit& limit);
    // after_token steps by a token as such; without_tokens keeps only ways to go on by characters.
    state after_token(state from, std::uint32_t token, work_limit& limit);
    state without_tokens(state from, work_limit& limit);
    state either(state a, state b, work_limit& limit);

    bool is_complete(state of) const { return states_of_[of].is_complete; }
    bool has_token_items(state of) const { return states_of_[of].has_token_items; }
    bool matches_token(state of, std::uint32_t token) const;
    // Can a code point that begins like `part` come next? Same answer as llama.cpp's.
    bool matches_partial(state of, partial_character part, work_limit& limit) const;

    std::size_t n_states() const { return states_.size(); }
    std::size_t n_forgotten() const { return n_forgotten_; }

private:
    struct state_facts {
        bool is_complete = false;
        bool has_token_items = false;
        std::unique_ptr<state[]> next;  // by class of code points; unknown if not computed yet
    };
    struct call {
        std::vector<grammar_item> returns;
        bool is_done = false;
    };
    static constexpr state unknown = UINT32_MAX;

    void find_classes(work_limit& limit);
    std::uint32_t class_of(std::uint32_t code_point) const;
    bool matches(const grammar_element& element, std::uint32_t code_point) const;

    void push(grammar_item item) { pending_.push_back(item); }
    state close(work_limit& limit);
    void settle(work_limit& limit);
    void settle_rule(grammar_item item, work_limit& limit);
    void expand(std::uint32_t component, work_limit& limit);
    state add_state(std::vector<grammar_item>& items);
    std::size_t n_bytes() const;
    void check_size(std::size_t n_bytes_allowed) const;
    void forget();

    const std::shared_ptr<const grammar> rules_;
    std::vector<std::uint32_t> class_starts_;  // code points at which a class begins
    std::vector<std::uint32_t> ascii_classes_;

    grammar_item_sets frames_;
    grammar_item_sets states_;
    std::vector<state_facts> states_of_;
    std::size_t n_tables_ = 0;
    state first_ = dead;
    state current_ = dead;
    std::size_t n_forgotten_ = 0;

    // Scratch of close(), kept to reuse its memory.
    std::vector<grammar_item> pending_;
    std::vector<grammar_item> found_;
    std::unordered_set<std::uint64_t> seen_;
    std::unordered_map<std::uint32_t, call> calls_;
    std::vector<std::uint32_t> uncalled_;  // a heap of components
};

}  // namespace kqview
