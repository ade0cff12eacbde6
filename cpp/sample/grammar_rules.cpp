#include "sample/grammar_rules.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace kqview {
namespace {

// llama.cpp walks left corners recursively; this many frames fit any thread's stack.
constexpr std::size_t depth_max = 4000;
// Chains of rules that lead from one rule to a first character. llama.cpp follows each of them for
// every character, and compares the results with one another.
constexpr std::uint64_t n_paths_max = 1000;

[[noreturn]] void refuse(const std::string& what) {
    throw error(errc::invalid_sampling, "generate: grammar " + what);
}

[[noreturn]] void refuse_depth() {
    refuse("begins rules inside rules more than " + std::to_string(depth_max) +
           " deep, fewer are allowed; shorten repetitions or chains of rules");
}

struct left_corner {
    std::int32_t rule;
    bool is_last;  // nothing follows it, so expanding it leaves llama.cpp's stack as it is
};

bool begins_itself(const grammar_sequence& sequence) {
    return sequence.empty() || sequence.front().rule == grammar_symbol::terminal;
}

using left_corner_graph = std::vector<std::vector<left_corner>>;

// Tarjan's strongly connected components; a component's number is above those that it reaches.
class component_finder {
public:
    explicit component_finder(const left_corner_graph& graph)
        : component(graph.size(), -1), graph_(graph), order_(graph.size(), -1), low_(graph.size()) {
        for (std::size_t i = 0; i < graph.size(); ++i) {
            if (order_[i] < 0) visit(i, 0);
        }
    }

    std::vector<std::int32_t> component;
    std::int32_t n_components = 0;

private:
    void visit(std::size_t rule, std::size_t depth) {
        if (depth > depth_max) {
            refuse_depth();
        }
        order_[rule] = low_[rule] = n_visited_++;
        stack_.push_back(rule);
        for (const left_corner& edge : graph_[rule]) {
            const auto next = static_cast<std::size_t>(edge.rule);
            if (order_[next] < 0) {
                visit(next, depth + 1);
                low_[rule] = std::min(low_[rule], low_[next]);
            } else if (component[next] < 0) {
                low_[rule] = std::min(low_[rule], order_[next]);
            }
        }
        if (low_[rule] != order_[rule]) return;
        for (std::size_t member = graph_.size(); member != rule;) {
            member = stack_.back();
            stack_.pop_back();
            component[member] = n_components;
        }
        ++n_components;
    }

    const left_corner_graph& graph_;
    std::vector<std::int32_t> order_;
    std::vector<std::int32_t> low_;
    std::vector<std::size_t> stack_;
    std::int32_t n_visited_ = 0;
};

}  // namespace

std::int32_t grammar_rules::find_or_add(std::string_view name) {
    if (const auto found = ids_.find(name); found != ids_.end()) return found->second;
    const auto id = static_cast<std::int32_t>(ids_.size());
    ids_.emplace(name, id);
    return id;
}

std::int32_t grammar_rules::add_generated(const std::string& base_name) {
    const auto id = static_cast<std::int32_t>(ids_.size());
    ids_[base_name + '_' + std::to_string(id)] = id;
    return id;
}

void grammar_rules::define(std::int32_t rule, std::vector<grammar_sequence> alternates) {
    const auto index = static_cast<std::size_t>(rule);
    if (rules_.size() <= index) rules_.resize(index + 1);
    rules_[index] = {true, std::move(alternates)};
}

std::string grammar_rules::name_of(std::int32_t rule) const {
    for (const auto& [name, id] : ids_) {
        if (id == rule) return name;
    }
    return "?";
}

// Rules that derive some text (with terminals) or the empty text (without).
std::vector<bool> grammar_rules::rules_that_derive(bool with_terminals) const {
    struct alternate {
        std::size_t rule;
        std::size_t n_missing;
    };
    std::vector<bool> derives(rules_.size());
    std::vector<alternate> alternates;
    std::vector<std::vector<std::size_t>> users(rules_.size());
    std::vector<std::size_t> ready;
    for (std::size_t rule = 0; rule < rules_.size(); ++rule) {
        for (const grammar_sequence& sequence : rules_[rule].alternates) {
            alternate entry{rule, 0};
            for (const grammar_symbol& symbol : sequence) {
                if (symbol.rule != grammar_symbol::terminal) {
                    users[static_cast<std::size_t>(symbol.rule)].push_back(alternates.size());
                } else if (with_terminals) {
                    continue;
                }
                ++entry.n_missing;
            }
            if (entry.n_missing == 0) ready.push_back(alternates.size());
            alternates.push_back(entry);
        }
    }
    while (!ready.empty()) {
        const std::size_t rule = alternates[ready.back()].rule;
        ready.pop_back();
        if (derives[rule]) continue;
        derives[rule] = true;
        for (const std::size_t user : users[rule]) {
            if (--alternates[user].n_missing == 0) ready.push_back(user);
        }
    }
    return derives;
}

void grammar_rules::check_defined() const {
    const auto is_defined = [this](std::int32_t rule) {
        const auto index = static_cast<std::size_t>(rule);
        return index < rules_.size() && rules_[index].is_defined;
    };
    const auto root = ids_.find("root");
    if (root == ids_.end() || !is_defined(root->second)) {
        refuse("has no rule root, the output starts there; add root ::= ...");
    }
    for (const auto& [name, id] : ids_) {
        if (!is_defined(id)) refuse("uses the rule " + name + ", which it does not define; add it");
    }
}

void grammar_rules::check_left_corners() const {
    const std::vector<bool> is_nullable = rules_that_derive(false);
    left_corner_graph graph(rules_.size());
    for (std::size_t rule = 0; rule < rules_.size(); ++rule) {
        for (const grammar_sequence& sequence : rules_[rule].alternates) {
            for (std::size_t i = 0; i < sequence.size(); ++i) {
                if (sequence[i].rule == grammar_symbol::terminal) break;
                graph[rule].push_back({sequence[i].rule, i + 1 == sequence.size()});
                if (!is_nullable[static_cast<std::size_t>(sequence[i].rule)]) break;
            }
        }
    }

    const component_finder found(graph);
    const auto component_of = [&found](std::size_t rule) {
        return static_cast<std::size_t>(found.component[rule]);
    };
    std::vector<std::vector<std::size_t>> members(static_cast<std::size_t>(found.n_components));
    for (std::size_t rule = 0; rule < rules_.size(); ++rule) {
        members[component_of(rule)].push_back(rule);
    }
    std::vector<std::uint64_t> n_paths(members.size());
    std::vector<std::size_t> depth(members.size());
    for (std::size_t component = 0; component < members.size(); ++component) {
        std::uint64_t n = 0;
        std::size_t depth_below = 0;
        for (const std::size_t rule : members[component]) {
            // Alternates that begin with a character are cheap: one more way for all of them.
            const auto& alternates = rules_[rule].alternates;
            n += std::any_of(alternates.begin(), alternates.end(), begins_itself) ? 1U : 0U;
            for (const left_corner& edge : graph[rule]) {
                const std::size_t next = component_of(static_cast<std::size_t>(edge.rule));
                if (next != component) {
                    n += n_paths[next];
                    depth_below = std::max(depth_below, depth[next]);
                } else if (!edge.is_last) {
                    refuse("rule " + name_of(static_cast<std::int32_t>(rule)) +
                           " is left-recursive, it has to begin with something else than itself; "
                           "put the recursion last");
                }
                if (n > n_paths_max) {
                    refuse("rule " + name_of(static_cast<std::int32_t>(rule)) +
                           " can begin in more than " + std::to_string(n_paths_max) +
                           " ways, fewer are allowed; make its alternates differ early");
                }
            }
        }
        n_paths[component] = n;
        depth[component] = depth_below + members[component].size();
        if (depth[component] > depth_max) refuse_depth();
    }
}

void grammar_rules::check() const {
    check_defined();
    const std::vector<bool> can_end = rules_that_derive(true);
    for (std::size_t rule = 0; rule < rules_.size(); ++rule) {
        if (!can_end[rule]) {
            refuse("rule " + name_of(static_cast<std::int32_t>(rule)) +
                   " never ends, every rule needs an alternate without recursion; add one");
        }
    }
    check_left_corners();
}

}  // namespace kqview
