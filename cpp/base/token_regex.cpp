#include "base/token_regex.h"

#include <algorithm>
#include <bitset>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <regex>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

using namespace std::regex_constants;

constexpr std::uint32_t unlimited = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint32_t last_code = 0x7fffffff;
constexpr std::uint32_t n_low = 256;
constexpr std::uint32_t fork_mark = unlimited;  // in place of a choice's `low`
// Ordinary text takes some ten steps for a character.
constexpr std::uint64_t min_steps_allowed = 10'000'000;
constexpr std::uint64_t steps_per_character = 1'000;

struct code_range {
    std::uint32_t first, last;
};

// Characters, as ranges in ascending order that do not touch.
class code_set {
public:
    explicit code_set(std::vector<code_range> ranges, bool negated = false) {
        std::ranges::sort(ranges, {}, &code_range::first);
        for (const auto& range : ranges) {
            if (!ranges_.empty() && range.first <= ranges_.back().last + 1) {
                ranges_.back().last = std::max(ranges_.back().last, range.last);
            } else {
                ranges_.push_back(range);
            }
        }
        if (negated) ranges_ = gaps();
        for (std::uint32_t code = 0; code < n_low; ++code) low_[code] = find(code);
    }
    const std::vector<code_range>& ranges() const { return ranges_; }
    code_set both(const code_set& other) const {
        auto outside = gaps();
        for (const auto& range : other.gaps()) outside.push_back(range);
        return code_set(std::move(outside), true);
    }
    bool has(std::uint32_t code) const { return code < n_low ? low_[code] : find(code); }

private:
    std::vector<code_range> gaps() const {
        std::vector<code_range> gaps;
        std::uint32_t next = 0;
        for (const auto& range : ranges_) {
            if (range.first > next) gaps.push_back({next, range.first - 1});
            next = range.last + 1;
        }
        if (next <= last_code) gaps.push_back({next, last_code});
        return gaps;
    }
    bool find(std::uint32_t code) const {
        const auto after = std::ranges::upper_bound(ranges_, code, {}, &code_range::first);
        return after != ranges_.begin() && code <= std::prev(after)->last;
    }

    std::vector<code_range> ranges_;
    std::bitset<n_low> low_;
};

// ---- compiling

enum class op_kind : std::uint8_t {
    set,       // one character of `set`
    run,       // min..max characters of `set`, as many as there are
    fork,      // goes on; where that fails, at `target`
    jump,      // to `target`
    look,      // the instructions behind match here, or with `negated` do not; goes on at `target`
    text_end,  // the text is over
    accept,
};

struct instruction {
    op_kind kind;
    bool negated = false;
    std::uint32_t set = 0, min = 0, max = 0;
    // In a fragment, the distance from this instruction, modulo 2^32.
    std::uint32_t target = 0;
};

// What one part of an expression compiles to.
struct fragment {
    std::vector<instruction> code;
    bool can_be_empty = true;

    std::uint32_t size() const { return static_cast<std::uint32_t>(code.size()); }
    bool is_set() const { return code.size() == 1 && code[0].kind == op_kind::set; }
    void add(op_kind kind, std::uint32_t target) {
        code.push_back({.kind = kind, .target = target});
    }
    void add(const fragment& other) {
        if (code.size() + other.code.size() > 100'000) {
            throw std::regex_error(error_space);
        }
        code.insert(code.end(), other.code.begin(), other.code.end());
    }
};

[[noreturn]] void fail(std::regex_constants::error_type why) { throw std::regex_error(why); }

fragment repeated(const fragment& body, std::uint32_t min, std::uint32_t max) {
    fragment all{{}, min == 0 || body.can_be_empty};
    if (body.is_set()) {
        all.code = {{.kind = op_kind::run, .set = body.code[0].set, .min = min, .max = max}};
        return all;
    }
    for (std::uint32_t i = 0; i < min; ++i) all.add(body);
    if (max == unlimited) {
        all.add(op_kind::fork, body.size() + 2);
        all.add(body);
        all.add(op_kind::jump, 0 - body.size() - 1);
        return all;
    }
    for (auto n_left = max - min; n_left > 0; --n_left) {
        all.add(op_kind::fork, n_left * (body.size() + 1));
        all.add(body);
    }
    return all;
}

// What an escaped character stands for where it is one.
char32_t plain(char32_t c) { return c == U't' ? U'\t' : c == U'n' ? U'\n' : c == U'r' ? U'\r' : c; }

class parser {
public:
    parser(const std::u32string& pattern, std::vector<code_set>& sets)
        : pattern_(pattern), sets_(sets) {}

    std::vector<instruction> parse() {
        auto whole = alternatives();
        if (!at_end()) fail(error_paren);
        whole.add(op_kind::accept, 0);
        for (std::uint32_t i = 0; i < whole.size(); ++i) whole.code[i].target += i;
        return std::move(whole.code);
    }

private:
    bool at_end() const { return next_ == pattern_.size(); }
    char32_t peek() const { return at_end() ? U'\0' : pattern_[next_]; }
    char32_t take() {
        if (at_end()) fail(error_brack);
        return pattern_[next_++];
    }
    bool take_if(const char32_t* text) {
        const std::u32string_view wanted = text;
        if (pattern_.compare(next_, wanted.size(), wanted) != 0) return false;
        next_ += wanted.size();
        return true;
    }

    fragment one(code_set set) {
        sets_.push_back(std::move(set));
        const auto index = static_cast<std::uint32_t>(sets_.size() - 1);
        return {{{.kind = op_kind::set, .set = index}}, false};
    }

    fragment alternatives() {
        const auto first = sequence();
        if (!take_if(U"|")) return first;
        const auto others = alternatives();
        fragment all{{}, first.can_be_empty || others.can_be_empty};
        all.add(op_kind::fork, first.size() + 2);
        all.add(first);
        all.add(op_kind::jump, others.size() + 1);
        all.add(others);
        return all;
    }

    fragment sequence() {
        fragment all;
        while (!at_end() && peek() != U'|' && peek() != U')') {
            const auto next = term();
            all.can_be_empty = all.can_be_empty && next.can_be_empty;
            all.add(next);
        }
        // (?=[a])[b] is one character that is in both.
        const auto& code = all.code;
        if (code.size() == 4 && code[0].kind == op_kind::look && !code[0].negated &&
            code[1].kind == op_kind::set && code[2].kind == op_kind::accept &&
            code[3].kind == op_kind::set) {
            return one(sets_[code[1].set].both(sets_[code[3].set]));
        }
        return all;
    }

    fragment term() {
        const auto body = atom();
        constexpr std::u32string_view signs = U"*+?{";
        const auto sign = peek();
        if (at_end() || signs.find(sign) == signs.npos) return body;
        ++next_;
        std::uint32_t min = sign == U'+' ? 1 : 0, max = sign == U'?' ? 1 : unlimited;
        if (sign == U'{') {
            min = max = number();
            if (take_if(U",")) max = peek() == U'}' ? unlimited : number();
            if (!take_if(U"}") || max < min) fail(error_badbrace);
        }
        // Lazy and possessive repeats.
        if (!at_end() && signs.find(peek()) != signs.npos) fail(error_badrepeat);
        if (max == unlimited && body.can_be_empty) fail(error_badrepeat);
        return repeated(body, min, max);
    }

    std::uint32_t number() {
        std::uint32_t value = 0;
        if (peek() < U'0' || peek() > U'9') fail(error_badbrace);
        while (peek() >= U'0' && peek() <= U'9' && value < 10'000) {
            value = value * 10 + static_cast<std::uint32_t>(take() - U'0');
        }
        return value;
    }

    fragment atom() {
        if (take_if(U"(")) return group();
        if (take_if(U"[")) return one(bracket());
        if (take_if(U"$")) return {{{op_kind::text_end}}};
        if (take_if(U"\\")) return one(escape());
        const auto c = take();
        if (std::u32string_view(U".^*+?{}])").find(c) != std::u32string_view::npos) {
            fail(error_badrepeat);
        }
        return one(code_set({{c, c}}));
    }

    fragment group() {
        const bool looks = take_if(U"?="), looks_not = !looks && take_if(U"?!");
        if (!looks && !looks_not && !take_if(U"?:") && peek() == U'?') {
            fail(error_paren);
        }
        const auto body = alternatives();
        if (!take_if(U")")) fail(error_paren);
        if (!looks && !looks_not) return body;
        fragment look;
        look.add(op_kind::look, body.size() + 2);
        look.code[0].negated = looks_not;
        look.add(body);
        look.add(op_kind::accept, 0);
        return look;
    }

    code_set escape() {
        const auto c = take();
        if (c == U's' || c == U'S') return code_set({{'\t', '\r'}, {' ', ' '}}, c == U'S');
        if (c == U'd') return code_set({{'0', '9'}});
        const auto code = plain(c);
        const bool is_alphanumeric =
            (c >= U'0' && c <= U'9') || (c >= U'A' && c <= U'Z') || (c >= U'a' && c <= U'z');
        if (is_alphanumeric && code == c) fail(error_escape);
        return code_set({{code, code}});
    }

    code_set bracket() {
        std::vector<code_range> ranges;
        const bool negated = take_if(U"^");
        while (!take_if(U"]")) {
            auto first = take();
            if (first == U'[' && (peek() == U':' || peek() == U'.' || peek() == U'=')) {
                fail(error_ctype);
            }
            if (first == U'\\') {
                const auto escaped = escape().ranges();
                first = pattern_[next_ - 1];
                if (std::u32string_view(U"sSd").find(first) != std::u32string_view::npos) {
                    ranges.insert(ranges.end(), escaped.begin(), escaped.end());
                    continue;
                }
                first = plain(first);
            }
            auto last = first;
            if (peek() == U'-' && next_ + 1 < pattern_.size() && pattern_[next_ + 1] != U']') {
                ++next_;
                last = take();
                if (last == U'\\') last = plain(take());
                if (last < first) fail(error_range);
            }
            ranges.push_back({first, last});
        }
        return code_set(std::move(ranges), negated);
    }

    const std::u32string& pattern_;
    std::vector<code_set>& sets_;
    std::size_t next_ = 0;
};

}  // namespace

struct token_regex::program {
    std::vector<instruction> code;
    std::vector<code_set> sets;
};

token_regex::token_regex(std::unique_ptr<const program> compiled) : program_(std::move(compiled)) {}
token_regex::~token_regex() = default;

std::shared_ptr<const token_regex> token_regex::of(const std::u32string& pattern) {
    // As many as llama.cpp has patterns; never destroyed, as a thread may tokenize while the
    // process exits.
    static auto& known = *new std::map<std::u32string, std::shared_ptr<const token_regex>>;
    static auto& mutex = *new std::mutex;
    const std::lock_guard lock(mutex);
    auto& entry = known[pattern];
    if (!entry) {
        auto compiled = std::make_unique<program>();
        compiled->code = parser(pattern, compiled->sets).parse();
        entry = std::make_shared<const token_regex>(std::move(compiled));
    }
    return entry;
}

// ---- matching

template <typename Char>
token_search<Char>::token_search(std::shared_ptr<const token_regex> expression, const Char* text,
                                 std::size_t size)
    : expression_(std::move(expression)), text_(text), size_(size) {
    if (size >= unlimited) throw std::length_error("token_search: the text is too long");
    max_steps_ = min_steps_allowed + steps_per_character * size;
    failures_.resize(expression_->code().code.size());
}

template <typename Char>
bool token_search<Char>::next(token_match& found) {
    if (after_empty_) {
        after_empty_ = false;
        if (next_ == size_) return false;
        // What was learned counts for matches that may be empty, and the other way round.
        std::fill(failures_.begin(), failures_.end(), failures{});
        refuses_empty_ = true;
        std::size_t end = 0;
        const bool is_match = match(0, next_, 0, end);
        refuses_empty_ = false;
        std::fill(failures_.begin(), failures_.end(), failures{});
        if (is_match) {
            found = {next_, end - next_};
            next_ = end;
            return true;
        }
        ++next_;
    }
    for (auto start = next_; start <= size_; ++start) {
        std::size_t end = 0;
        if (!match(0, start, 0, end)) continue;
        found = {start, end - start};
        next_ = end;
        after_empty_ = end == start;
        return true;
    }
    next_ = size_ + 1;
    return false;
}

// The end of a lookahead, and of a match, whose open choices are given up. All that a failed one
// came by fails; a successful one matches from each fork whose first way it is on.
template <typename Char>
void token_search<Char>::learn(std::size_t first_choice, std::size_t first_passed, bool is_match) {
    if (is_match && passed_.size() > first_passed) {
        for (auto i = first_choice; i < choices_.size(); ++i) {
            const auto& one = choices_[i];
            if (one.low == fork_mark) outcomes_[one.high][one.position] = outcome::matches;
        }
    }
    if (!is_match) {
        for (auto i = first_passed; i < passed_.size(); ++i) {
            outcomes_[passed_[i].pc][passed_[i].position] = outcome::fails;
        }
    }
    passed_.resize(first_passed);
    choices_.resize(first_choice);
}

template <typename Char>
bool token_search<Char>::match(std::uint32_t pc, std::size_t start, std::size_t depth,
                               std::size_t& end) {
    const auto& [code, sets] = expression_->code();
    const auto is_in = [&](std::uint32_t set, std::size_t position) {
        return sets[set].has(
            static_cast<std::uint32_t>(static_cast<std::make_unsigned_t<Char>>(text_[position])));
    };
    const auto base = choices_.size(), base_passed = passed_.size();
    auto position = start;
    for (;;) {
        if (++n_steps_ > max_steps_) {
            throw error(errc::request,
                        "cutting this text into words takes too long with this model's vocabulary; "
                        "split the text at its longest words");
        }
        const auto& op = code[pc];
        bool goes_on = true;
        switch (op.kind) {
            case op_kind::set:
                goes_on = position < size_ && is_in(op.set, position);
                ++position;
                ++pc;
                break;
            case op_kind::run: {
                const auto& known = failures_[pc];
                const auto low = position + op.min;
                if (op.max == unlimited && known.low <= low && low <= known.high) {
                    goes_on = false;
                    break;
                }
                const auto most = op.max == unlimited ? size_ : std::min(size_, position + op.max);
                auto high = position;
                while (high < most && is_in(op.set, high)) ++high;
                n_steps_ += high - position;
                goes_on = high >= low;
                if (high > low) {
                    choices_.push_back({pc, static_cast<std::uint32_t>(high),
                                        static_cast<std::uint32_t>(low),
                                        static_cast<std::uint32_t>(high)});
                }
                position = high;
                ++pc;
                break;
            }
            case op_kind::fork:
                if (depth > 0) {
                    auto& known = outcomes_[pc];
                    if (known.empty()) known.resize(size_ + 1);
                    if (known[position] == outcome::matches) {
                        learn(base, base_passed, true);
                        return true;
                    }
                    goes_on = known[position] == outcome::unknown;
                    if (!goes_on) break;
                    passed_.push_back({pc, static_cast<std::uint32_t>(position)});
                }
                choices_.push_back(
                    {op.target, static_cast<std::uint32_t>(position), fork_mark, pc});
                ++pc;
                break;
            case op_kind::jump: pc = op.target; break;
            case op_kind::look: {
                std::size_t ignored = 0;
                goes_on = match(pc + 1, position, depth + 1, ignored) != op.negated;
                pc = op.target;
                break;
            }
            case op_kind::text_end:
                goes_on = position == size_;
                ++pc;
                break;
            case op_kind::accept:
                goes_on = depth > 0 || !refuses_empty_ || position != start;
                if (!goes_on) break;
                end = position;
                learn(base, base_passed, true);
                return true;
        }
        while (!goes_on) {
            if (choices_.size() == base) {
                learn(base, base_passed, false);
                return false;
            }
            auto& last = choices_.back();
            const auto& owner = code[last.pc];
            if (last.low == fork_mark) {
                pc = last.pc;
                position = last.position;
                choices_.pop_back();
                break;
            }
            if (last.position > last.low) {
                pc = last.pc + 1;
                position = --last.position;
                break;
            }
            if (owner.max == unlimited) failures_[last.pc] = {last.low, last.high};
            choices_.pop_back();
        }
    }
}

template class token_search<char>;
template class token_search<wchar_t>;

}  // namespace kqview
