// Matches the regular expressions that cut a text into words before it is tokenized; replaces
// std::regex.
// Why: libstdc++'s matcher calls itself for every character of a run, so a run of 30,000 letters
// overflows the stack, and it compiles its expression again for every text. This one keeps its open
// choices in a vector. It matches what ECMAScript says, for the syntax that llama.cpp's
// vocabularies use: alternatives, groups, sets, greedy repeats, lookahead and `$`. Other syntax is
// refused when an expression is compiled.
// Threads: an expression is immutable, any thread; a search belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kqview {

class token_regex {
public:
    // Compiled once for each pattern. Raises std::regex_error for syntax that is not known.
    static std::shared_ptr<const token_regex> of(const std::u32string& pattern);

    struct program;
    explicit token_regex(std::unique_ptr<const program> compiled);
    ~token_regex();
    const program& code() const { return *program_; }

private:
    std::unique_ptr<const program> program_;
};

struct token_match {
    std::size_t start = 0;
    std::size_t size = 0;
};

// Finds the matches in one text, from left to right, as std::regex_iterator does. The text has to
// outlive it. Char: char (a byte is a character of its own) or wchar_t.
template <typename Char>
class token_search {
public:
    token_search(std::shared_ptr<const token_regex> expression, const Char* text, std::size_t size);

    // False when there are no more. Raises errc::request if the expression is so ambiguous that the
    // text takes more than a thousand steps per character; none of llama.cpp's is.
    bool next(token_match& found);

private:
    // A place to go back to. For a run: it has taken the text up to `position` and can give back
    // down to `low`. For a fork, whose number is `high`: continue at `pc`.
    struct choice {
        std::uint32_t pc, position, low, high;
    };
    // For a run without a limit: what follows it fails everywhere from `low` to `high`, where its
    // characters end. That does not depend on the path taken, so it holds for the whole search.
    struct failures {
        std::uint32_t low = 1, high = 0;
    };
    // For a fork that a lookahead passed, at a place: the lookahead's result from there.
    enum class outcome : std::uint8_t { unknown, fails, matches };
    struct passed {
        std::uint32_t pc, position;
    };
    void learn(std::size_t first_choice, std::size_t first_passed, bool is_match);
    bool match(std::uint32_t pc, std::size_t start, std::size_t depth, std::size_t& end);

    std::shared_ptr<const token_regex> expression_;
    const Char* text_;
    std::size_t size_;
    std::size_t next_ = 0;      // where the search goes on
    bool after_empty_ = false;  // the last match was empty: another one here has to be longer
    bool refuses_empty_ = false;
    std::uint64_t n_steps_ = 0;
    std::uint64_t max_steps_;
    std::vector<choice> choices_;
    std::vector<failures> failures_;
    std::map<std::uint32_t, std::vector<outcome>> outcomes_;
    std::vector<passed> passed_;
};

}  // namespace kqview
