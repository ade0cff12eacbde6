#include "sample/grammar_automaton.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace kqview {
namespace {

using kind = grammar_element::kind;

constexpr std::uint32_t root_frame = 0;
constexpr const char* ways = " open ways to read the text";

[[noreturn]] void refuse_size(const char* before, std::size_t n, const char* what,
                              std::size_t limit) {
    throw error(errc::invalid_sampling, "grammar needs ", before, n, what,
                " for one token, the limit is ", limit, "; make it less ambiguous");
}

void make_unique(std::vector<grammar_item>& items) {
    std::sort(items.begin(), items.end());
    items.erase(std::unique(items.begin(), items.end()), items.end());
}

}  // namespace

// ---- sets

std::uint32_t grammar_item_sets::add(std::span<const grammar_item> sorted) {
    std::size_t hash = sorted.size();
    for (const auto& [position, frame] : sorted) {
        hash = (hash ^ (std::size_t{position} << 32 | frame)) * 0x9E3779B97F4A7C15U;
        hash ^= hash >> 29;
    }
    const auto [first, last] = ids_.equal_range(hash);
    for (auto same = first; same != last; ++same) {
        const auto found = (*this)[same->second];
        if (std::equal(found.begin(), found.end(), sorted.begin(), sorted.end()))
            return same->second;
    }
    const auto id = static_cast<std::uint32_t>(size());
    items_.insert(items_.end(), sorted.begin(), sorted.end());
    starts_.push_back(items_.size());
    ids_.emplace(hash, id);
    return id;
}

std::size_t grammar_item_sets::n_bytes() const {
    constexpr std::size_t n_per_set = 64;  // entries in `starts_` and `ids_`
    return items_.size() * sizeof(grammar_item) + size() * n_per_set;
}

void grammar_item_sets::clear() {
    items_.clear();
    starts_.resize(1);
    ids_.clear();
}

// ---- building

grammar_automaton::grammar_automaton(std::shared_ptr<const grammar> rules, work_limit& limit)
    : rules_(std::move(rules)) {
    find_classes(limit);
    const grammar_item done{grammar::accept_position, root_frame};
    frames_.add({&done, 1});
    states_.add({});
    states_of_.emplace_back();
    const std::uint32_t root = rules_->root;
    for (auto i = rules_->first_start[root]; i < rules_->first_start[root + 1]; ++i) {
        push({rules_->starts[i], root_frame});
    }
    first_ = current_ = close(limit);
}

// Code points that every element of the grammar treats alike form one class.
void grammar_automaton::find_classes(work_limit& limit) {
    auto& starts = class_starts_;
    starts.push_back(0);
    const auto add = [&](std::uint32_t first, std::uint32_t last) {
        if (first > last) return;
        starts.push_back(first);
        if (last != UINT32_MAX) starts.push_back(last + 1);
    };
    for (const grammar_element& element : rules_->elements) {
        limit.spend();
        if (element.type == kind::character) add(element.value, element.value);
    }
    for (const character_set& set : rules_->sets) {
        limit.spend(1 + set.ranges.size());
        for (const auto& [first, last] : set.ranges) add(first, last);
    }
    std::sort(starts.begin(), starts.end());
    starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
    for (std::uint32_t c = 0; c < 128; ++c) {
        ascii_classes_.push_back(static_cast<std::uint32_t>(
            std::upper_bound(starts.begin(), starts.end(), c) - starts.begin() - 1));
    }
}

std::uint32_t grammar_automaton::class_of(std::uint32_t code_point) const {
    if (code_point < ascii_classes_.size()) return ascii_classes_[code_point];
    const auto& starts = class_starts_;
    return static_cast<std::uint32_t>(std::upper_bound(starts.begin(), starts.end(), code_point) -
                                      starts.begin() - 1);
}

bool grammar_automaton::matches(const grammar_element& element, std::uint32_t code_point) const {
    switch (element.type) {
        case kind::character: return element.value == code_point;
        case kind::any: return true;
        case kind::set: {
            const character_set& set = rules_->sets[element.value];
            const bool is_in =
                std::any_of(set.ranges.begin(), set.ranges.end(), [&](const auto& range) {
                    return range.first <= code_point && code_point <= range.second;
                });
            return is_in != set.is_negated;
        }
        default: return false;
    }
}

// ---- from state to state

grammar_automaton::state grammar_automaton::after(state from, std::uint32_t code_point,
                                                  work_limit& limit) {
    limit.spend();
    if (from == dead) return dead;
    const std::uint32_t i_class = class_of(code_point);
    auto& facts = states_of_[from];
    if (!facts.next) {
        facts.next = std::make_unique_for_overwrite<state[]>(class_starts_.size());
        std::fill_n(facts.next.get(), class_starts_.size(), unknown);
        ++n_tables_;
        limit.spend(class_starts_.size() / 16);
        check_size(2 * n_bytes_max);
    } else if (facts.next[i_class] != unknown) {
        return facts.next[i_class];
    }
    for (const auto& [position, frame] : states_[from]) {
        const grammar_element& element = rules_->elements[position];
        limit.spend(element.type == kind::set ? rules_->sets[element.value].ranges.size() : 1);
        // Any code point of the class represents all of them.
        if (matches(element, code_point)) push({position + 1, frame});
    }
    const state next = close(limit);
    states_of_[from].next[i_class] = next;
    return next;
}

grammar_automaton::state grammar_automaton::after_token(state from, std::uint32_t token,
                                                        work_limit& limit) {
    for (const auto& [position, frame] : states_[from]) {
        limit.spend();
        const auto& [type, value] = rules_->elements[position];
        if ((type == kind::token && value == token) || (type == kind::token_not && value != token))
            push({position + 1, frame});
    }
    return close(limit);
}

grammar_automaton::state grammar_automaton::without_tokens(state from, work_limit& limit) {
    found_.clear();
    for (const grammar_item& item : states_[from]) {
        limit.spend();
        const kind type = rules_->elements[item.position].type;
        if (type == kind::character || type == kind::set || type == kind::any)
            found_.push_back(item);
    }
    return add_state(found_);
}

grammar_automaton::state grammar_automaton::either(state a, state b, work_limit& limit) {
    if (a == b || b == dead) return a;
    if (a == dead) return b;
    found_.assign(states_[a].begin(), states_[a].end());
    found_.insert(found_.end(), states_[b].begin(), states_[b].end());
    limit.spend(found_.size());
    return add_state(found_);
}

bool grammar_automaton::matches_token(state of, std::uint32_t token) const {
    const auto items = states_[of];
    return std::any_of(items.begin(), items.end(), [&](const grammar_item& item) {
        const auto& [type, value] = rules_->elements[item.position];
        return (type == kind::token && value == token) ||
               (type == kind::token_not && value != token);
    });
}

bool grammar_automaton::matches_partial(state of, partial_character part, work_limit& limit) const {
    if (part.n_missing < 0 || (part.n_missing == 1 && part.value < 2)) return false;
    const auto n_bits = static_cast<std::uint32_t>(part.n_missing) * 6;
    std::uint32_t low = part.value << n_bits;
    const std::uint32_t high = low | ((1U << n_bits) - 1);
    if (low == 0 && part.n_missing == 2) low = 1U << 11;  // smaller ones have a shorter encoding
    if (low == 0 && part.n_missing == 3) low = 1U << 16;
    const auto overlaps = [&](std::uint32_t first, std::uint32_t last) {
        return first <= high && low <= last;
    };
    const auto items = states_[of];
    return std::any_of(items.begin(), items.end(), [&](const grammar_item& item) {
        const auto& [type, value] = rules_->elements[item.position];
        if (type == kind::any) return true;
        if (type == kind::character) return overlaps(value, value);
        if (type != kind::set) return false;
        const character_set& set = rules_->sets[value];
        limit.spend(1 + set.ranges.size());
        const bool is_in =
            std::any_of(set.ranges.begin(), set.ranges.end(),
                        [&](const auto& range) { return overlaps(range.first, range.second); });
        return is_in != set.is_negated;
    });
}

// ---- closing: from positions after a match to all positions where something can match next

grammar_automaton::state grammar_automaton::close(work_limit& limit) {
    seen_.clear();
    calls_.clear();
    uncalled_.clear();
    found_.clear();
    try {
        settle(limit);
        // A rule is expanded after all its callers, so that its frame has every way to continue.
        while (!uncalled_.empty()) {
            std::pop_heap(uncalled_.begin(), uncalled_.end());
            const std::uint32_t component = uncalled_.back();
            uncalled_.pop_back();
            expand(component, limit);
            settle(limit);
        }
    } catch (...) {
        pending_.clear();
        throw;
    }
    return add_state(found_);
}

void grammar_automaton::settle(work_limit& limit) {
    while (!pending_.empty()) {
        const grammar_item item = pending_.back();
        pending_.pop_back();
        limit.spend();
        if (!seen_.insert(std::uint64_t{item.position} << 32 | item.frame).second) continue;
        switch (rules_->elements[item.position].type) {
            case kind::end:
                for (const grammar_item& next : frames_[item.frame]) push(next);
                limit.spend(frames_[item.frame].size());
                break;
            case kind::rule: settle_rule(item, limit); break;
            default: found_.push_back(item);
        }
        if (seen_.size() > 2 * n_items_max) {
            refuse_size("more than ", 2 * n_items_max, ways, 2 * n_items_max);
        }
    }
}

void grammar_automaton::settle_rule(grammar_item item, work_limit& limit) {
    const std::uint32_t rule = rules_->elements[item.position].value;
    const std::uint32_t component = rules_->component[rule];
    const auto [entry, is_new] = calls_.try_emplace(component);
    auto& [returns, is_done] = entry->second;
    if (is_new) {
        uncalled_.push_back(component);
        std::push_heap(uncalled_.begin(), uncalled_.end());
    }
    const bool is_last = rules_->elements[item.position + 1].type == kind::end;
    // A component calls itself only in tail position: it returns to where it returns anyway.
    if (!is_done) {
        if (is_last) {  // nothing to come back for
            const auto frame = frames_[item.frame];
            returns.insert(returns.end(), frame.begin(), frame.end());
            limit.spend(frame.size());
        } else {
            returns.push_back({item.position + 1, item.frame});
        }
        if (returns.size() > 2 * n_items_max) make_unique(returns);
        if (returns.size() > 2 * n_items_max) {
            refuse_size("more than ", 2 * n_items_max, ways, 2 * n_items_max);
        }
    }
    if (rules_->is_nullable[rule]) push({item.position + 1, item.frame});
}

void grammar_automaton::expand(std::uint32_t component, work_limit& limit) {
    auto& [returns, is_done] = calls_.at(component);
    make_unique(returns);
    limit.spend(returns.size());
    is_done = true;
    const std::uint32_t frame = frames_.add(returns);
    check_size(2 * n_bytes_max);
    for (const std::uint32_t rule : rules_->members[component]) {
        for (auto i = rules_->first_start[rule]; i < rules_->first_start[rule + 1]; ++i) {
            push({rules_->starts[i], frame});
        }
    }
}

grammar_automaton::state grammar_automaton::add_state(std::vector<grammar_item>& items) {
    make_unique(items);
    if (items.size() > n_items_max) {
        refuse_size("", items.size(), ways, n_items_max);
    }
    const state id = states_.add(items);
    if (id < states_of_.size()) return id;
    state_facts facts;
    for (const grammar_item& item : items) {
        const kind type = rules_->elements[item.position].type;
        facts.is_complete |= type == kind::accept;
        facts.has_token_items |= type == kind::token || type == kind::token_not;
    }
    states_of_.push_back(std::move(facts));
    check_size(2 * n_bytes_max);
    return id;
}

// ---- memory

std::size_t grammar_automaton::n_bytes() const {
    return frames_.n_bytes() + states_.n_bytes() + states_of_.size() * sizeof(state_facts) +
           n_tables_ * class_starts_.size() * sizeof(state);
}

void grammar_automaton::check_size(std::size_t n_bytes_allowed) const {
    if (n_bytes() > n_bytes_allowed) {
        refuse_size("", n_bytes(), " bytes", n_bytes_allowed);
    }
}

void grammar_automaton::set_current(state next) {
    current_ = next;
    if (n_bytes() <= n_bytes_max) return;
    forget();
    check_size(n_bytes_max);
}

// Keeps only the first and the current state and the frames reachable from them, with new numbers.
void grammar_automaton::forget() {
    const auto items_of = [this](state id) {
        return std::vector<grammar_item>(states_[id].begin(), states_[id].end());
    };
    auto first = items_of(first_);
    auto current = items_of(current_);
    std::vector<bool> is_needed(frames_.size());
    is_needed[root_frame] = true;
    for (const auto* const kept : {&first, &current}) {
        for (const grammar_item& item : *kept) is_needed[item.frame] = true;
    }
    for (std::size_t id = frames_.size(); id-- > 1;) {  // a frame leads to older ones only
        if (!is_needed[id]) continue;
        for (const grammar_item& item : frames_[static_cast<std::uint32_t>(id)])
            is_needed[item.frame] = true;
    }
    const grammar_item_sets old = std::exchange(frames_, {});
    std::vector<std::uint32_t> renamed(old.size());
    std::vector<grammar_item> items;
    for (std::uint32_t id = 0; id < old.size(); ++id) {
        if (!is_needed[id]) continue;
        items.assign(old[id].begin(), old[id].end());
        for (grammar_item& item : items) item.frame = renamed[item.frame];
        make_unique(items);
        renamed[id] = frames_.add(items);
    }
    states_.clear();
    states_of_.clear();
    n_tables_ = 0;
    states_.add({});
    states_of_.emplace_back();
    const auto add = [&](std::vector<grammar_item>& kept) {
        for (grammar_item& item : kept) item.frame = renamed[item.frame];
        return add_state(kept);
    };
    first_ = add(first);
    current_ = add(current);
    ++n_forgotten_;
}

}  // namespace kqview
