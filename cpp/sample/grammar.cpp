#include "sample/grammar.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "sample/grammar_rules.h"

namespace kqview {
namespace {

constexpr std::size_t n_bytes_max = std::size_t{1} << 20;
constexpr std::size_t n_elements_max = 1'000'000;  // llama.cpp's rules: 8 bytes each, held twice
constexpr std::size_t nesting_max = 200;           // parentheses; llama.cpp's parser recurses
constexpr std::uint64_t n_repetitions_max = 2000;  // llama.cpp's own limit
constexpr std::uint64_t unlimited = UINT64_MAX;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_name_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || is_digit(c);
}

bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

// Of the UTF-8 character that begins with it.
std::size_t n_bytes_of(char first) {
    const auto byte = static_cast<unsigned char>(first);
    return byte < 0xC0 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

// Reads exactly the language of llama.cpp's parser and builds the same rules.
class gbnf_reader {
public:
    explicit gbnf_reader(std::string_view text) : text_(text) {}

    grammar_rules read() {
        space(true);
        while (pos_ < text_.size()) rule();
        return std::move(rules_);
    }

private:
    // What one sequence holds so far and which part of it a repetition sign would repeat.
    struct sequence_state {
        grammar_sequence symbols;
        std::size_t last_start = 0;
        std::uint64_t n_rules = 1;  // that a repetition of the last part would repeat
    };

    char at(std::size_t offset = 0) const {
        return pos_ + offset < text_.size() ? text_[pos_ + offset] : '\0';
    }

    [[noreturn]] void fail(const std::string& expected) const { fail_at(pos_, expected); }

    [[noreturn]] void fail_at(std::size_t pos, const std::string& expected) const {
        const std::string_view before = text_.substr(0, pos);
        const auto line = 1 + std::count(before.begin(), before.end(), '\n');
        const std::size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
        const std::string got =
            pos < text_.size() ? "'" + std::string(text_.substr(pos, n_bytes_of(text_[pos]))) + "'"
                               : "the end of the text";
        throw error(errc::invalid_sampling, "generate: grammar line " + std::to_string(line) +
                                                ", column " + std::to_string(pos - line_start + 1) +
                                                " has " + got + ", expected is " + expected +
                                                "; correct the grammar");
    }

    void expect(char c, const char* meaning) {
        if (at() != c) fail(std::string(1, c) + " " + meaning);
        ++pos_;
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

    std::uint64_t number() {
        if (!is_digit(at())) fail("a whole number");
        std::uint64_t value = 0;
        for (; is_digit(at()); ++pos_) {
            value = std::min<std::uint64_t>(value * 10 + static_cast<std::uint64_t>(at() - '0'),
                                            UINT32_MAX);
        }
        return value;
    }

    void character() {
        if (pos_ >= text_.size()) fail("a character");
        if (at() != '\\') {
            pos_ = std::min(text_.size(), pos_ + n_bytes_of(at()));
            return;
        }
        ++pos_;
        const char kind = at();
        const std::size_t n_digits = kind == 'x' ? 2 : kind == 'u' ? 4 : kind == 'U' ? 8 : 0;
        if (n_digits == 0 &&
            (kind == '\0' || std::string_view("trn\\\"[]-").find(kind) == std::string_view::npos)) {
            fail("one of x u U t r n \\ \" [ ] - after a backslash");
        }
        ++pos_;
        for (std::size_t i = 0; i < n_digits; ++i, ++pos_) {
            if (!is_hex(at())) fail(std::to_string(n_digits) + " hexadecimal digits");
        }
    }

    void add(sequence_state& state, std::int32_t rule, std::size_t n_elements) {
        count(n_elements);
        state.symbols.push_back({rule, static_cast<std::uint32_t>(n_elements)});
    }

    void count(std::uint64_t n_elements) {
        n_elements_ += n_elements;
        if (n_elements_ > n_elements_max) {
            throw error(errc::invalid_sampling,
                        "generate: grammar has more than " + std::to_string(n_elements_max) +
                            " elements, fewer are allowed; lower its repetition counts");
        }
    }

    void literal(sequence_state& state) {
        std::size_t n = 0;
        for (++pos_; at() != '"'; ++n) character();
        ++pos_;
        if (n > 0) add(state, grammar_symbol::terminal, n);
    }

    void char_class(sequence_state& state) {
        ++pos_;
        if (at() == '^') ++pos_;
        std::size_t n = 0;
        while (at() != ']') {
            character();
            ++n;
            if (at() == '-' && at(1) != ']') {
                ++pos_;
                character();
                ++n;
            }
        }
        ++pos_;
        if (n > 0) add(state, grammar_symbol::terminal, n);
    }

    void token(sequence_state& state) {
        if (at() == '!') ++pos_;
        expect('<', "and a token");
        if (at() == '[') {
            ++pos_;
            number();
            expect(']', "after a token id");
        } else {
            while (pos_ < text_.size() && at() != '>') ++pos_;
        }
        expect('>', "after a token");
        add(state, grammar_symbol::terminal, 1);
    }

    void group(sequence_state& state, const std::string& rule_name, std::size_t nesting) {
        ++pos_;
        space(true);
        const std::size_t n_names_before = rules_.n_names();
        const std::int32_t id = rules_.add_generated(rule_name);
        alternates(rule_name, id, nesting + 1);
        state.n_rules = std::max<std::uint64_t>(1, rules_.n_names() - n_names_before);
        expect(')', "after a group");
        state.last_start = state.symbols.size();
        add(state, id, 1);
    }

    // S{m,n} becomes S m times and a rule of n - m optional ones; see llama.cpp for the rewriting.
    // `sign` is where the repetition sign stands.
    void repeat(sequence_state& state, const std::string& rule_name, std::size_t sign,
                std::uint64_t least, std::uint64_t most) {
        if (state.last_start == state.symbols.size()) {
            fail_at(sign, "something to repeat before * + ? {");
        }
        const bool has_limit = most != unlimited;
        const std::uint64_t n_rules =
            has_limit && most > 0 ? most : std::max<std::uint64_t>(1, least);
        if (state.n_rules * n_rules > n_repetitions_max) {
            fail_at(sign, "at most " + std::to_string(n_repetitions_max) +
                              " repetitions, nested ones counted");
        }

        const auto first = state.symbols.begin() + static_cast<std::ptrdiff_t>(state.last_start);
        const grammar_sequence part(first, state.symbols.end());
        std::uint64_t n_part = 0;
        for (const grammar_symbol& symbol : part) n_part += symbol.n_elements;
        const std::uint64_t n_optional = has_limit ? most - least : 1;
        count((std::max<std::uint64_t>(least, 1) - 1) * n_part + n_optional * (n_part + 3));

        if (least == 0) state.symbols.resize(state.last_start);
        for (std::uint64_t i = 1; i < least; ++i) {
            state.symbols.insert(state.symbols.end(), part.begin(), part.end());
        }
        std::int32_t last_rule = 0;
        for (std::uint64_t i = 0; i < n_optional; ++i) {
            const std::int32_t id = rules_.add_generated(rule_name);
            grammar_sequence sequence = part;
            if (i > 0 || !has_limit) sequence.push_back({has_limit ? last_rule : id, 1});
            rules_.define(id, {std::move(sequence), {}});
            last_rule = id;
        }
        if (n_optional > 0) state.symbols.push_back({last_rule, 1});
        state.n_rules *= n_rules;
    }

    void counted_repetition(sequence_state& state, const std::string& rule_name, bool nested) {
        const std::size_t sign = pos_++;
        space(nested);
        const std::uint64_t least = number();
        space(nested);
        std::uint64_t most = least;
        if (at() == ',') {
            ++pos_;
            space(nested);
            most = unlimited;
            if (is_digit(at())) {
                most = number();
                space(nested);
            }
        }
        expect('}', "after a repetition");
        space(nested);
        if (least > n_repetitions_max) {
            fail_at(sign, "at most " + std::to_string(n_repetitions_max) + " repetitions");
        }
        if (most != unlimited && most < least) {
            fail_at(sign, "a repetition whose first number is not above its second");
        }
        repeat(state, rule_name, sign, least, most > n_repetitions_max ? unlimited : most);
    }

    grammar_sequence sequence(const std::string& rule_name, std::size_t nesting) {
        const bool nested = nesting > 0;
        sequence_state state;
        const auto begin_part = [&state] {
            state.last_start = state.symbols.size();
            state.n_rules = 1;
        };
        for (;;) {
            const char c = at();
            if (c == '"') {
                begin_part();
                literal(state);
            } else if (c == '[') {
                begin_part();
                char_class(state);
            } else if (c == '<' || c == '!') {
                begin_part();
                token(state);
            } else if (is_name_char(c)) {
                const std::int32_t id = rules_.find_or_add(name());
                begin_part();
                add(state, id, 1);
            } else if (c == '(') {
                if (nesting >= nesting_max) {
                    fail("at most " + std::to_string(nesting_max) + " nested parentheses");
                }
                group(state, rule_name, nesting);
            } else if (c == '.') {
                ++pos_;
                begin_part();
                add(state, grammar_symbol::terminal, 1);
            } else if (c == '*' || c == '+' || c == '?') {
                const std::size_t sign = pos_++;
                repeat(state, rule_name, sign, c == '+' ? 1 : 0, c == '?' ? 1 : unlimited);
            } else if (c == '{') {
                counted_repetition(state, rule_name, nested);
            } else {
                return std::move(state.symbols);
            }
            space(nested);
        }
    }

    void alternates(const std::string& rule_name, std::int32_t rule_id, std::size_t nesting) {
        std::vector<grammar_sequence> found;
        found.push_back(sequence(rule_name, nesting));
        while (at() == '|') {
            ++pos_;
            space(true);
            count(1);
            found.push_back(sequence(rule_name, nesting));
        }
        count(1);
        rules_.define(rule_id, std::move(found));
    }

    void rule() {
        const std::string rule_name(name());
        space(false);
        const std::int32_t id = rules_.find_or_add(rule_name);
        if (text_.substr(pos_, 3) != "::=") fail("::= after the name of a rule");
        pos_ += 3;
        space(true);
        alternates(rule_name, id, 0);
        if (pos_ < text_.size() && at() != '\r' && at() != '\n') fail("a newline after a rule");
        space(true);
    }

    std::string_view text_;
    std::size_t pos_ = 0;
    std::uint64_t n_elements_ = 0;
    grammar_rules rules_;
};

}  // namespace

void check_grammar(std::string_view text) {
    if (text.size() > n_bytes_max) {
        throw error(errc::invalid_sampling, "generate: grammar has " + std::to_string(text.size()) +
                                                " bytes, up to " + std::to_string(n_bytes_max) +
                                                " are allowed; shorten it");
    }
    if (text.find('\0') != std::string_view::npos) {
        throw error(errc::invalid_sampling,
                    "generate: grammar contains a zero byte, none is allowed; write \\x00");
    }
    gbnf_reader(text).read().check();
}

}  // namespace kqview
