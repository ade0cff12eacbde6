#include "sample/grammar.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <string>

#include "base/error.h"
#include "sample/work_limit.h"

namespace kqview {
namespace {

constexpr std::size_t n_bytes_max = std::size_t{1} << 20;
constexpr std::size_t n_elements_max = 1'000'000;  // with repetitions written out; 8 bytes each
constexpr std::size_t nesting_max = 200;           // parentheses; the reader recurses
constexpr std::uint64_t n_repetitions_max = 2000;  // llama.cpp's own limit
constexpr std::size_t n_token_bytes_max = 256;     // of a <token>, which gets tokenized
using kind = grammar_element::kind;

template <typename... Parts>
[[noreturn]] void refuse_grammar(const Parts&... what) {
    throw error(errc::invalid_sampling, "grammar ", what...);
}

using grammar_sequence = std::vector<grammar_element>;

// ---- the rules, from reading to layout

struct left_corner {
    std::uint32_t rule;
    bool is_last;  // last element: expanding it does not grow the stack
};

using left_corner_graph = std::vector<std::vector<left_corner>>;

// Tarjan's strongly connected components, without recursion: chains of rules may be long. A
// component has a higher number than those it reaches.
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

class grammar_rules {
public:
    std::uint32_t find_or_add(std::string_view name) {
        if (const auto found = ids_.find(name); found != ids_.end()) return found->second;
        const auto id = static_cast<std::uint32_t>(bases_.size());
        ids_.emplace(name, id);
        bases_.push_back(id);
        return id;
    }
    // For a group or a repetition in rule `base`.
    std::uint32_t add_generated(std::uint32_t base) {
        bases_.push_back(base);
        return static_cast<std::uint32_t>(bases_.size() - 1);
    }
    std::uint32_t add_set(character_set set) {
        sets_.push_back(std::move(set));
        return static_cast<std::uint32_t>(sets_.size() - 1);
    }
    void define(std::uint32_t rule, std::vector<grammar_sequence> alternates) {
        if (rules_.size() < bases_.size()) rules_.resize(bases_.size());
        rules_[rule] = std::move(alternates);
    }

    std::size_t n_rules() const { return bases_.size(); }

    // Raises invalid_sampling for a rule that is missing ("root" among them) or can never end, and
    // for left recursion that grows without bound.
    grammar finish(work_limit& limit);

private:
    const std::string& name_of(std::uint32_t rule) const {
        const auto found = std::find_if(
            ids_.begin(), ids_.end(), [&](const auto& one) { return one.second == bases_[rule]; });
        return found->first;
    }
    std::vector<bool> rules_that_derive(bool with_terminals, work_limit& limit) const;
    void check_defined() const;
    void find_components(grammar& made, work_limit& limit) const;

    std::map<std::string, std::uint32_t, std::less<>> ids_;
    std::vector<std::uint32_t> bases_;  // of each rule: itself, or the rule it was generated for
    std::vector<std::vector<grammar_sequence>> rules_;  // alternates; none: not defined
    std::vector<character_set> sets_;
};

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
        for (const grammar_sequence& sequence : rules_[rule]) {
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
    if (root == ids_.end() || rules_[root->second].empty()) {
        refuse_grammar("has no rule named root, where the output starts; add root ::= ...");
    }
    for (const auto& [name, id] : ids_) {
        if (rules_[id].empty())
            refuse_grammar("uses the rule ", name, " but does not define it; add it");
    }
}

void grammar_rules::find_components(grammar& made, work_limit& limit) const {
    left_corner_graph graph(rules_.size());
    for (std::size_t rule = 0; rule < rules_.size(); ++rule) {
        for (const grammar_sequence& sequence : rules_[rule]) {
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
                refuse_grammar(
                    "rule ", name_of(rule),
                    " is left-recursive: it can begin with itself; put the recursion last");
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
            refuse_grammar("rule ", name_of(rule),
                           " never ends; add an alternate without recursion");
        }
    }
    grammar made;
    made.is_nullable = rules_that_derive(false, limit);
    find_components(made, limit);
    made.root = ids_.find("root")->second;
    made.sets = std::move(sets_);
    made.elements.push_back({kind::accept, 0});
    for (const auto& alternates : rules_) {
        made.first_start.push_back(static_cast<std::uint32_t>(made.starts.size()));
        for (const grammar_sequence& sequence : alternates) {
            limit.spend(1 + sequence.size());
            made.starts.push_back(static_cast<std::uint32_t>(made.elements.size()));
            made.elements.insert(made.elements.end(), sequence.begin(), sequence.end());
            made.elements.push_back({kind::end, 0});
        }
    }
    made.first_start.push_back(static_cast<std::uint32_t>(made.starts.size()));
    return made;
}

// ---- the text

constexpr std::uint64_t unlimited = UINT64_MAX;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_name_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || is_digit(c);
}

// Number of bytes of the UTF-8 character that begins with `first`.
std::size_t n_bytes_of(char first) {
    const auto byte = static_cast<unsigned char>(first);
    return byte < 0xC0 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

// The text, the current position, and what is there.
class gbnf_text {
protected:
    explicit gbnf_text(std::string_view text) : text_(text) {}

    char at(std::size_t offset = 0) const {
        return pos_ + offset < text_.size() ? text_[pos_ + offset] : '\0';
    }

    template <typename... Parts>
    [[noreturn]] void fail(const Parts&... expected) const {
        fail_at(pos_, expected...);
    }

    template <typename... Parts>
    [[noreturn]] void fail_at(std::size_t pos, const Parts&... expected) const {
        const std::string_view before = text_.substr(0, pos);
        const auto line = 1 + std::count(before.begin(), before.end(), '\n');
        const std::size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
        const std::string got = pos < text_.size()
                                    ? text_of("'", text_.substr(pos, n_bytes_of(text_[pos])), "'")
                                    : "the end of the text";
        refuse_grammar("line ", line, ", column ", pos - line_start + 1, ": expected ", expected...,
                       ", got ", got);
    }

    bool take_if(char c) {
        if (at() != c) return false;
        ++pos_;
        return true;
    }

    void expect(char c, const char* meaning) {
        if (!take_if(c)) fail(std::string(1, c), " ", meaning);
    }

    void space(bool with_newlines) {
        for (;;) {
            const char c = at();
            if (c == '#') {
                while (pos_ < text_.size() && at() != '\r' && at() != '\n') ++pos_;
            } else if (c == ' ' || c == '\t' || (with_newlines && (c == '\r' || c == '\n'))) {
                ++pos_;
            } else {
                return;
            }
        }
    }

    std::string_view name() {
        const std::size_t start = pos_;
        while (is_name_char(at())) ++pos_;
        if (pos_ == start) fail("the name of a rule");
        return text_.substr(start, pos_ - start);
    }

    // Takes a number of at most `n_most` digits and returns how many it has. One that is too large
    // for `value` leaves it as it is.
    template <typename Number>
    std::size_t digits(Number& value, std::size_t n_most, int base) {
        const auto rest = text_.substr(pos_, n_most);
        const auto* const end =
            std::from_chars(rest.data(), rest.data() + rest.size(), value, base).ptr;
        const auto n = static_cast<std::size_t>(end - rest.data());
        pos_ += n;
        return n;
    }

    std::uint64_t number() {
        std::uint64_t value = UINT32_MAX;
        if (digits(value, text_.npos, 10) == 0) fail("a whole number");
        return std::min<std::uint64_t>(value, UINT32_MAX);
    }

    std::uint32_t character() {
        if (pos_ >= text_.size()) fail("a character");
        if (!take_if('\\')) return code_point();
        const char sign = at();
        const std::size_t n_digits = sign == 'x' ? 2 : sign == 'u' ? 4 : sign == 'U' ? 8 : 0;
        if (n_digits == 0 &&
            (sign == '\0' || std::string_view("trn\\\"[]-").find(sign) == std::string_view::npos)) {
            fail("one of x u U t r n \\ \" [ ] - after a backslash");
        }
        ++pos_;
        if (n_digits == 0) {
            const char value = sign == 't' ? '\t' : sign == 'r' ? '\r' : sign == 'n' ? '\n' : sign;
            return static_cast<unsigned char>(value);
        }
        std::uint32_t value = 0;
        if (digits(value, n_digits, 16) < n_digits) fail(n_digits, " hexadecimal digits");
        return value;
    }

    std::uint32_t code_point() {
        const std::size_t n_bytes = n_bytes_of(at());
        std::uint32_t value = static_cast<unsigned char>(at()) & ((1U << (8 - n_bytes)) - 1);
        ++pos_;
        for (std::size_t i = 1; i < n_bytes && pos_ < text_.size(); ++i, ++pos_) {
            value = value << 6 | (static_cast<unsigned char>(at()) & 0x3FU);
        }
        return value;
    }

    const std::string_view text_;
    std::size_t pos_ = 0;
};

// Accepts exactly the language of llama.cpp's parser and builds the same rules.
class gbnf_reader : gbnf_text {
public:
    gbnf_reader(std::string_view text, const token_finder& find_token, work_limit& limit)
        : gbnf_text(text), find_token_(find_token), limit_(limit) {}

    grammar read() {
        space(true);
        while (pos_ < text_.size()) rule();
        return rules_.finish(limit_);
    }

private:
    // The elements of one sequence so far, and the part of it that a repetition sign would repeat.
    struct sequence_state {
        grammar_sequence elements;
        std::size_t last_start = 0;
        std::uint64_t n_rules = 1;  // that a repetition of the last part would repeat
    };

    void add(sequence_state& state, grammar_element element) {
        count(1);
        state.elements.push_back(element);
    }

    void count(std::uint64_t n_elements) {
        limit_.spend(n_elements);
        n_elements_ += n_elements;
        if (n_elements_ > n_elements_max) {
            refuse_grammar("has more than ", n_elements_max,
                           " elements with its repetitions written out; lower their counts");
        }
    }

    void literal(sequence_state& state) {
        ++pos_;
        while (!take_if('"')) add(state, {kind::character, character()});
    }

    void char_class(sequence_state& state) {
        ++pos_;
        character_set set;
        set.is_negated = take_if('^');
        while (!take_if(']')) {
            const std::uint32_t first = character();
            std::uint32_t last = first;
            if (at() == '-' && at(1) != ']') {
                ++pos_;
                last = character();
            }
            count(1);
            set.ranges.emplace_back(first, last);
        }
        if (!set.ranges.empty()) add(state, {kind::set, rules_.add_set(std::move(set))});
    }

    void token(sequence_state& state) {
        const kind type = take_if('!') ? kind::token_not : kind::token;
        const std::size_t start = pos_;
        expect('<', "and a token");
        if (take_if('[')) {
            const auto id = static_cast<std::uint32_t>(number());
            expect(']', "after a token id");
            expect('>', "after a token");
            return add(state, {type, id});
        }
        while (pos_ < text_.size() && at() != '>') ++pos_;
        expect('>', "after a token");
        const std::string_view name = text_.substr(start, pos_ - start);
        const auto id = name.size() <= n_token_bytes_max ? find_token_(name) : std::nullopt;
        if (!id) fail_at(start, "a <token> that is one token of the vocabulary");
        add(state, {type, static_cast<std::uint32_t>(*id)});
    }

    void group(sequence_state& state, std::uint32_t base, std::size_t nesting) {
        if (nesting >= nesting_max) fail("at most ", nesting_max, " nested parentheses");
        ++pos_;
        space(true);
        const std::size_t n_rules_before = rules_.n_rules();
        const std::uint32_t id = rules_.add_generated(base);
        alternates(base, id, nesting + 1);
        state.n_rules = std::max<std::uint64_t>(1, rules_.n_rules() - n_rules_before);
        expect(')', "after a group");
        add(state, {kind::rule, id});
    }

    // S{m,n} becomes m times S and a rule of n - m optional ones; see llama.cpp for the rewriting.
    // `sign` is the position of the repetition sign.
    void repeat(sequence_state& state, std::uint32_t base, std::size_t sign, std::uint64_t least,
                std::uint64_t most) {
        if (state.last_start == state.elements.size()) {
            fail_at(sign, "something to repeat before * + ? {");
        }
        const bool has_limit = most != unlimited;
        const std::uint64_t n_rules =
            has_limit && most > 0 ? most : std::max<std::uint64_t>(1, least);
        if (state.n_rules * n_rules > n_repetitions_max) {
            fail_at(sign, "at most ", n_repetitions_max, " repetitions, nested ones counted");
        }

        const auto first = state.elements.begin() + static_cast<std::ptrdiff_t>(state.last_start);
        const grammar_sequence part(first, state.elements.end());
        const std::uint64_t n_optional = has_limit ? most - least : 1;
        count((std::max<std::uint64_t>(least, 1) - 1) * part.size() +
              n_optional * (part.size() + 3));

        if (least == 0) state.elements.resize(state.last_start);
        for (std::uint64_t i = 1; i < least; ++i) {
            state.elements.insert(state.elements.end(), part.begin(), part.end());
        }
        std::uint32_t last_rule = 0;
        for (std::uint64_t i = 0; i < n_optional; ++i) {
            const std::uint32_t id = rules_.add_generated(base);
            grammar_sequence sequence = part;
            if (i > 0 || !has_limit) sequence.push_back({kind::rule, has_limit ? last_rule : id});
            rules_.define(id, {std::move(sequence), {}});
            last_rule = id;
        }
        if (n_optional > 0) state.elements.push_back({kind::rule, last_rule});
        state.n_rules *= n_rules;
    }

    void counted_repetition(sequence_state& state, std::uint32_t base, bool nested) {
        const std::size_t sign = pos_++;
        space(nested);
        const std::uint64_t least = number();
        space(nested);
        std::uint64_t most = least;
        if (take_if(',')) {
            space(nested);
            most = unlimited;
            if (is_digit(at())) {
                most = number();
                space(nested);
            }
        }
        expect('}', "after a repetition");
        space(nested);
        if (least > n_repetitions_max) fail_at(sign, "at most ", n_repetitions_max, " repetitions");
        if (most != unlimited && most < least) {
            fail_at(sign, "a repetition whose first number is not above its second");
        }
        repeat(state, base, sign, least, most > n_repetitions_max ? unlimited : most);
    }

    grammar_sequence sequence(std::uint32_t base, std::size_t nesting) {
        const bool nested = nesting > 0;
        sequence_state state;
        for (;;) {
            const char c = at();
            const bool repeats = c == '*' || c == '+' || c == '?' || c == '{';
            if (!repeats) state.last_start = state.elements.size(), state.n_rules = 1;
            if (c == '"') {
                literal(state);
            } else if (c == '[') {
                char_class(state);
            } else if (c == '<' || c == '!') {
                token(state);
            } else if (is_name_char(c)) {
                add(state, {kind::rule, rules_.find_or_add(name())});
            } else if (c == '(') {
                group(state, base, nesting);
            } else if (c == '.') {
                ++pos_;
                add(state, {kind::any, 0});
            } else if (c == '{') {
                counted_repetition(state, base, nested);
            } else if (repeats) {
                const std::size_t sign = pos_++;
                repeat(state, base, sign, c == '+' ? 1 : 0, c == '?' ? 1 : unlimited);
            } else {
                return std::move(state.elements);
            }
            space(nested);
        }
    }

    void alternates(std::uint32_t base, std::uint32_t rule_id, std::size_t nesting) {
        std::vector<grammar_sequence> found;
        found.push_back(sequence(base, nesting));
        while (take_if('|')) {
            space(true);
            count(1);
            found.push_back(sequence(base, nesting));
        }
        count(1);
        rules_.define(rule_id, std::move(found));
    }

    void rule() {
        const std::uint32_t id = rules_.find_or_add(name());
        space(false);
        if (text_.substr(pos_, 3) != "::=") fail("::= after the name of a rule");
        pos_ += 3;
        space(true);
        alternates(id, id, 0);
        if (pos_ < text_.size() && at() != '\r' && at() != '\n') fail("a newline after a rule");
        space(true);
    }

    const token_finder& find_token_;
    work_limit& limit_;
    std::uint64_t n_elements_ = 0;
    grammar_rules rules_;
};

}  // namespace

grammar read_grammar(std::string_view text, const token_finder& find_token, work_limit& limit) {
    if (text.size() > n_bytes_max) {
        refuse_grammar("has ", text.size(), " bytes, the limit is ", n_bytes_max, "; shorten it");
    }
    if (text.find('\0') != std::string_view::npos) {
        refuse_grammar("contains a zero byte; write it as \\x00");
    }
    return gbnf_reader(text, find_token, limit).read();
}

}  // namespace kqview
