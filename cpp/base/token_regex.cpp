#include "base/token_regex.h"

#include <algorithm>
#include <bitset>
#include <limits>
#include <map>
#include <mutex>
#include <regex>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

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
    void add(std::uint32_t first, std::uint32_t last) { ranges_.push_back({first, last}); }
    void add(const code_set& other) {
        ranges_.insert(ranges_.end(), other.ranges_.begin(), other.ranges_.end());
    }
    void finish(bool negated) {
        std::sort(ranges_.begin(), ranges_.end(),
                  [](const auto& a, const auto& b) { return a.first < b.first; });
        std::vector<code_range> joined;
        for (const auto& range : ranges_) {
            if (!joined.empty() && range.first <= joined.back().last + 1) {
                joined.back().last = std::max(joined.back().last, range.last);
            } else {
                joined.push_back(range);
            }
        }
        ranges_ = negated ? complement(joined) : std::move(joined);
        for (std::uint32_t code = 0; code < n_low; ++code) low_[code] = find(code);
    }
    code_set both(const code_set& other) const {
        code_set outside;
        for (const auto& range : complement(ranges_)) outside.add(range.first, range.last);
        for (const auto& range : complement(other.ranges_)) outside.add(range.first, range.last);
        outside.finish(true);
        return outside;
    }
    bool has(std::uint32_t code) const { return code < n_low ? low_[code] : find(code); }

private:
    static std::vector<code_range> complement(const std::vector<code_range>& ranges) {
        std::vector<code_range> gaps;
        std::uint32_t next = 0;
        for (const auto& range : ranges) {
            if (range.first > next) gaps.push_back({next, range.first - 1});
            next = range.last + 1;
        }
        if (next <= last_code) gaps.push_back({next, last_code});
        return gaps;
    }
    bool find(std::uint32_t code) const {
        const auto after =
            std::upper_bound(ranges_.begin(), ranges_.end(), code,
                             [](std::uint32_t value, const auto& r) { return value < r.first; });
        return after != ranges_.begin() && code <= std::prev(after)->last;
    }

    std::vector<code_range> ranges_;
    std::bitset<n_low> low_;
};

code_set ascii_spaces() {
    code_set spaces;
    spaces.add('\t', '\r');
    spaces.add(' ', ' ');
    spaces.finish(false);
    return spaces;
}

code_set complement_of(const code_set& set) {
    code_set outside;
    outside.add(set);
    outside.finish(true);
    return outside;
}

enum class node_kind { empty, set, sequence, alternatives, repeat, look, text_end };

struct node {
    node_kind kind = node_kind::empty;
    code_set set;                    // of set
    std::vector<node> parts;         // of sequence, alternatives; the one of repeat and look
    std::uint32_t min = 0, max = 0;  // of repeat
    bool negated = false;            // of look
};

bool can_be_empty(const node& n) {
    const auto part_can = [](const node& part) { return can_be_empty(part); };
    switch (n.kind) {
        case node_kind::set: return false;
        case node_kind::sequence: return std::all_of(n.parts.begin(), n.parts.end(), part_can);
        case node_kind::alternatives: return std::any_of(n.parts.begin(), n.parts.end(), part_can);
        case node_kind::repeat: return n.min == 0 || can_be_empty(n.parts[0]);
        case node_kind::empty:
        case node_kind::look:
        case node_kind::text_end: return true;
    }
    return true;
}

// ---- from text to nodes

class parser {
public:
    explicit parser(const std::u32string& pattern) : pattern_(pattern) {}

    node parse() {
        auto whole = alternatives();
        if (!at_end()) fail(std::regex_constants::error_paren);
        return whole;
    }

private:
    [[noreturn]] static void fail(std::regex_constants::error_type why) {
        throw std::regex_error(why);
    }
    bool at_end() const { return next_ == pattern_.size(); }
    char32_t peek() const { return at_end() ? U'\0' : pattern_[next_]; }
    char32_t take() {
        if (at_end()) fail(std::regex_constants::error_brack);
        return pattern_[next_++];
    }
    bool take_if(const char32_t* text) {
        const std::u32string_view wanted = text;
        if (pattern_.compare(next_, wanted.size(), wanted) != 0) return false;
        next_ += wanted.size();
        return true;
    }

    node alternatives() {
        node all;
        all.kind = node_kind::alternatives;
        do all.parts.push_back(sequence());
        while (take_if(U"|"));
        return all.parts.size() == 1 ? std::move(all.parts[0]) : all;
    }

    node sequence() {
        node all;
        all.kind = node_kind::sequence;
        while (!at_end() && peek() != U'|' && peek() != U')') all.parts.push_back(term());
        auto& parts = all.parts;
        // (?=[a])[b] is one character that is in both.
        if (parts.size() == 2 && parts[0].kind == node_kind::look && !parts[0].negated &&
            parts[0].parts[0].kind == node_kind::set && parts[1].kind == node_kind::set) {
            parts[1].set = parts[1].set.both(parts[0].parts[0].set);
            return std::move(parts[1]);
        }
        return parts.size() == 1 ? std::move(parts[0]) : all;
    }

    node term() {
        auto body = atom();
        std::uint32_t min = 0, max = 0;
        if (take_if(U"*")) {
            max = unlimited;
        } else if (take_if(U"+")) {
            min = 1;
            max = unlimited;
        } else if (take_if(U"?")) {
            max = 1;
        } else if (take_if(U"{")) {
            min = max = number();
            if (take_if(U",")) max = peek() == U'}' ? unlimited : number();
            if (!take_if(U"}") || max < min) fail(std::regex_constants::error_badbrace);
        } else {
            return body;
        }
        // Lazy and possessive repeats.
        if (peek() == U'*' || peek() == U'+' || peek() == U'?' || peek() == U'{') {
            fail(std::regex_constants::error_badrepeat);
        }
        if (max == unlimited && can_be_empty(body)) fail(std::regex_constants::error_badrepeat);
        node repeat;
        repeat.kind = node_kind::repeat;
        repeat.min = min;
        repeat.max = max;
        repeat.parts.push_back(std::move(body));
        return repeat;
    }

    std::uint32_t number() {
        std::uint32_t value = 0;
        if (peek() < U'0' || peek() > U'9') fail(std::regex_constants::error_badbrace);
        while (peek() >= U'0' && peek() <= U'9' && value < 10'000) {
            value = value * 10 + static_cast<std::uint32_t>(take() - U'0');
        }
        return value;
    }

    node atom() {
        if (take_if(U"(")) return group();
        if (take_if(U"[")) return bracket();
        if (take_if(U"$")) {
            node end;
            end.kind = node_kind::text_end;
            return end;
        }
        node one;
        one.kind = node_kind::set;
        if (take_if(U"\\")) {
            one.set = escape();
            return one;
        }
        const auto c = take();
        if (std::u32string_view(U".^*+?{}])").find(c) != std::u32string_view::npos) {
            fail(std::regex_constants::error_badrepeat);
        }
        one.set.add(c, c);
        one.set.finish(false);
        return one;
    }

    node group() {
        const bool looks = take_if(U"?="), looks_not = !looks && take_if(U"?!");
        if (!looks && !looks_not && !take_if(U"?:") && peek() == U'?') {
            fail(std::regex_constants::error_paren);
        }
        auto body = alternatives();
        if (!take_if(U")")) fail(std::regex_constants::error_paren);
        if (!looks && !looks_not) return body;
        node look;
        look.kind = node_kind::look;
        look.negated = looks_not;
        look.parts.push_back(std::move(body));
        return look;
    }

    code_set escape() {
        code_set set;
        const auto c = take();
        switch (c) {
            case U's': return ascii_spaces();
            case U'S': return complement_of(ascii_spaces());
            case U'd': set.add('0', '9'); break;
            case U't': set.add('\t', '\t'); break;
            case U'n': set.add('\n', '\n'); break;
            case U'r': set.add('\r', '\r'); break;
            default:
                if ((c >= U'0' && c <= U'9') || (c >= U'A' && c <= U'Z') ||
                    (c >= U'a' && c <= U'z')) {
                    fail(std::regex_constants::error_escape);
                }
                set.add(c, c);
        }
        set.finish(false);
        return set;
    }

    node bracket() {
        node one;
        one.kind = node_kind::set;
        const bool negated = take_if(U"^");
        while (!take_if(U"]")) {
            auto first = take();
            if (first == U'[' && (peek() == U':' || peek() == U'.' || peek() == U'=')) {
                fail(std::regex_constants::error_ctype);
            }
            if (first == U'\\') {
                const auto escaped = escape();
                first = pattern_[next_ - 1];
                if (std::u32string_view(U"sSd").find(first) != std::u32string_view::npos) {
                    one.set.add(escaped);
                    continue;
                }
                first = plain(first);
            }
            auto last = first;
            if (peek() == U'-' && next_ + 1 < pattern_.size() && pattern_[next_ + 1] != U']') {
                ++next_;
                last = take();
                if (last == U'\\') last = plain(take());
                if (last < first) fail(std::regex_constants::error_range);
            }
            one.set.add(first, last);
        }
        one.set.finish(negated);
        return one;
    }

    // What an escaped character stands for where it is one.
    static char32_t plain(char32_t c) {
        return c == U't' ? U'\t' : c == U'n' ? U'\n' : c == U'r' ? U'\r' : c;
    }

    const std::u32string& pattern_;
    std::size_t next_ = 0;
};

// ---- from nodes to instructions

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
    std::uint32_t set = 0, target = 0, min = 0, max = 0;
};

}  // namespace

struct token_regex::program {
    std::vector<instruction> code;
    std::vector<code_set> sets;

    void add(const node& n) {
        switch (n.kind) {
            case node_kind::empty: break;
            case node_kind::text_end: code.push_back({op_kind::text_end}); break;
            case node_kind::set: add_set(op_kind::set, n.set, 1, 1); break;
            case node_kind::sequence:
                for (const auto& part : n.parts) add(part);
                break;
            case node_kind::alternatives: add_alternatives(n); break;
            case node_kind::repeat: add_repeat(n); break;
            case node_kind::look: {
                const auto at = code.size();
                code.push_back({op_kind::look, n.negated});
                add(n.parts[0]);
                code.push_back({op_kind::accept});
                code[at].target = here();
            }
        }
        if (code.size() > 100'000) throw std::regex_error(std::regex_constants::error_space);
    }

private:
    std::uint32_t here() const { return static_cast<std::uint32_t>(code.size()); }

    void add_set(op_kind kind, const code_set& set, std::uint32_t min, std::uint32_t max) {
        instruction op{kind};
        op.set = static_cast<std::uint32_t>(sets.size());
        op.min = min;
        op.max = max;
        sets.push_back(set);
        code.push_back(op);
    }

    void add_alternatives(const node& n) {
        std::vector<std::size_t> jumps;
        for (std::size_t i = 0; i < n.parts.size(); ++i) {
            const bool is_last = i + 1 == n.parts.size();
            const auto fork = code.size();
            if (!is_last) code.push_back({op_kind::fork});
            add(n.parts[i]);
            if (is_last) break;
            jumps.push_back(code.size());
            code.push_back({op_kind::jump});
            code[fork].target = here();
        }
        for (const auto jump : jumps) code[jump].target = here();
    }

    void add_repeat(const node& n) {
        const auto& body = n.parts[0];
        if (body.kind == node_kind::set) return add_set(op_kind::run, body.set, n.min, n.max);
        for (std::uint32_t i = 0; i < n.min; ++i) add(body);
        if (n.max == unlimited) {
            const auto fork = code.size();
            code.push_back({op_kind::fork});
            add(body);
            code.push_back({op_kind::jump});
            code.back().target = static_cast<std::uint32_t>(fork);
            code[fork].target = here();
            return;
        }
        std::vector<std::size_t> forks;
        for (auto i = n.min; i < n.max; ++i) {
            forks.push_back(code.size());
            code.push_back({op_kind::fork});
            add(body);
        }
        for (const auto fork : forks) code[fork].target = here();
    }
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
        compiled->add(parser(pattern).parse());
        compiled->code.push_back({op_kind::accept});
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
