// The rules of a GBNF grammar as far as llama.cpp's matcher can hang or abort on them: which rule
// refers to which, in what order. Characters and tokens are all alike here.
// Threads: any. Never: touches llama.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace kqview {

struct grammar_symbol {
    static constexpr std::int32_t terminal = -1;
    std::int32_t rule;         // index of the rule referred to, or terminal
    std::uint32_t n_elements;  // of llama.cpp's representation
};

using grammar_sequence = std::vector<grammar_symbol>;

struct grammar_rule {
    bool is_defined = false;
    std::vector<grammar_sequence> alternates;
};

// Numbers rules as llama.cpp does and holds those that it generates for groups and repetitions:
// the check is worth something only if it sees the rules that llama.cpp will build.
class grammar_rules {
public:
    std::int32_t find_or_add(std::string_view name);
    std::int32_t add_generated(const std::string& base_name);
    void define(std::int32_t rule, std::vector<grammar_sequence> alternates);

    std::size_t n_names() const { return ids_.size(); }

    // Raises invalid_sampling as check_grammar() says, syntax errors aside.
    void check() const;

private:
    std::string name_of(std::int32_t rule) const;
    std::vector<bool> rules_that_derive(bool with_terminals) const;
    void check_defined() const;
    void check_left_corners() const;

    std::map<std::string, std::int32_t, std::less<>> ids_;
    std::vector<grammar_rule> rules_;
};

}  // namespace kqview
