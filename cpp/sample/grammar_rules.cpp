#include "sample/grammar_rules.h"

#include <algorithm>

#include "base/error.h"
#include "sample/work_limit.h"

namespace kqview {
namespace {

using kind = grammar_element::kind;

[[noreturn]] void refuse(const std::string& what) {
    throw error(errc::invalid_sampling, "generate: grammar " + what);
}

struct left_corner {
    std::uint32_t rule;
    bool is_last;  // nothing follows it: expanding it does not make a stack grow
};

using left_corner_graph = std::vector<std::vector<left_corner>>;

// Tarjan's strongly connected components, without recursion: chains of rules may be long. A
// component's number is above those that it reaches.
class component_finder {
public:
    component_finder(const left_corner_graph& graph, work_limit& limit)
        : component(graph.size(), none),
          graph_(graph),
          order_(graph.size(), none),
          low_(graph.size()) {
        for (std::uint32_t rule = 0; rule < graph.size(); ++rule) {
            if (order_[rule] == none) visit(rule, limit);
        }
    }

    std::vector<std::uint32_t> component;
    std::uint32_t n_components = 0;

private:
    static constexpr std::uint32_t none = UINT32_MAX;
    struct frame {
        std::uint32_t rule;
        std::size_t i_edge;
    };

    void enter(std::uint32_t rule) {
        order_[rule] = low_[rule] = n_visited_++;
        stack_.push_back(rule);
        path_.push_back({rule, 0});
    }

    void visit(std::uint32_t first, work_limit& limit) {
        enter(first);
        while (!path_.empty()) {
            limit.spend();
            auto& [rule, i_edge] = path_.back();
            if (i_edge < graph_[rule].size()) {
                const std::uint32_t next = graph_[rule][i_edge++].rule;
                if (order_[next] == none) {
                    enter(next);
                } else if (component[next] == none) {
                    low_[rule] = std::min(low_[rule], order_[next]);
                }
                continue;
            }
            leave(rule);
        }
    }

    void leave(std::uint32_t rule) {
        path_.pop_back();
        if (!path_.empty()) {
            const std::uint32_t caller = path_.back().rule;
            low_[caller] = std::min(low_[caller], low_[rule]);
        }
        if (low_[rule] != order_[rule]) return;
        for (std::uint32_t member = none; member != rule;) {
            member = stack_.back();
            stack_.pop_back();
            component[member] = n_components;
        }
        ++n_components;
    }

    const left_corner_graph& graph_;
    std::vector<std::uint32_t> order_;
    std::vector<std::uint32_t> low_;
    std::vector<std::uint32_t> stack_;
    std::vector<frame> path_;
    std::uint32_t n_visited_ = 0;
};

}  // namespace

std::uint32_t grammar_rules::find_or_add(std::string_view name) {
    if (const auto found = ids_.find(name); found != ids_.end()) return found->second;
    const auto id = static_cast<std::uint32_t>(bases_.size());
    ids_.emplace(name, id);
    bases_.push_back(id);
    return id;
}

std::uint32_t grammar_rules::add_generated(std::uint32_t base) {
    bases_.push_back(base);
    return static_cast<std::uint32_t>(bases_.size() - 1);
}

std::uint32_t grammar_rules::add_set(character_set set) {
    sets_.push_back(std::move(set));
    return static_cast<std::uint32_t>(sets_.size() - 1);
}

void grammar_rules::define(std::uint32_t rule, std::vector<grammar_sequence> alternates) {
    if (rules_.size() < bases_.size()) rules_.resize(bases_.size());
    rules_[rule] = {true, std::move(alternates)};
}

const std::string& grammar_rules::name_of(std::uint32_t rule) const {
    const auto found = std::find_if(
        ids_.begin(), ids_.end(), [&](const auto& entry) { return entry.second == bases_[rule]; });
    return found->first;
}

// Rules that derive some text (with terminals) or the empty text (without).
std::vector<bool> grammar_rules::rules_that_derive(bool with_terminals, work_limit& limit) const {
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
            limit.spend(1 + sequence.size());
            alternate entry{rule, 0};
            for (const grammar_element& element : sequence) {
                if (element.type == kind::rule) {
                    users[element.value].push_back(alternates.size());
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
        limit.spend(1 + users[rule].size());
        for (const std::size_t user : users[rule]) {
            if (--alternates[user].n_missing == 0) ready.push_back(user);
        }
    }
    return derives;
}

void grammar_rules::check_defined() const {
    const auto root = ids_.find("root");
    if (root == ids_.end() || !rules_[root->second].is_defined) {
        refuse("has no rule root, the output starts there; add root ::= ...");
    }
    for (const auto& [name, id] : ids_) {
        if (!rules_[id].is_defined)
            refuse("uses the rule " + name + ", which it does not define; add it");
    }
}

void grammar_rules::find_components(grammar& made, work_limit& limit) const {
    left_corner_graph graph(rules_.size());
    for (std::size_t rule = 0; rule < rules_.size(); ++rule) {
        for (const grammar_sequence& sequence : rules_[rule].alternates) {
            for (std::size_t i = 0; i < sequence.size() && sequence[i].type == kind::rule; ++i) {
                limit.spend();
                graph[rule].push_back({sequence[i].value, i + 1 == sequence.size()});
                if (!made.is_nullable[sequence[i].value]) break;
            }
        }
    }
    component_finder found(graph, limit);
    for (std::uint32_t rule = 0; rule < graph.size(); ++rule) {
        for (const left_corner& edge : graph[rule]) {
            if (!edge.is_last && found.component[edge.rule] == found.component[rule]) {
                refuse("rule " + name_of(rule) +
                       " is left-recursive, it has to begin with something else than itself; "
                       "put the recursion last");
            }
        }
    }
    made.members.resize(found.n_components);
    for (std::uint32_t rule = 0; rule < graph.size(); ++rule) {
        made.members[found.component[rule]].push_back(rule);
    }
    made.component = std::move(found.component);
}

grammar grammar_rules::finish(work_limit& limit) {
    rules_.resize(bases_.size());
    check_defined();
    const std::vector<bool> can_end = rules_that_derive(true, limit);
    for (std::uint32_t rule = 0; rule < rules_.size(); ++rule) {
        if (!can_end[rule]) {
            refuse("rule " + name_of(rule) +
                   " never ends, every rule needs an alternate without recursion; add one");
        }
    }
    grammar made;
    made.is_nullable = rules_that_derive(false, limit);
    find_components(made, limit);
    made.root = ids_.find("root")->second;
    made.sets = std::move(sets_);
    made.elements.push_back({kind::accept, 0});
    for (const rule_text& rule : rules_) {
        made.first_start.push_back(static_cast<std::uint32_t>(made.starts.size()));
        for (const grammar_sequence& sequence : rule.alternates) {
            limit.spend(1 + sequence.size());
            made.starts.push_back(static_cast<std::uint32_t>(made.elements.size()));
            made.elements.insert(made.elements.end(), sequence.begin(), sequence.end());
            made.elements.push_back({kind::end, 0});
        }
    }
    made.first_start.push_back(static_cast<std::uint32_t>(made.starts.size()));
    return made;
}

}  // namespace kqview
