// That it finds what std::regex finds for the expressions of llama.cpp is
// tests/engine/test_text.py.
#include <doctest/doctest.h>

#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/token_regex.h"

namespace kqview {
namespace {

using matches = std::vector<std::pair<std::size_t, std::size_t>>;

matches ours(const std::string& pattern, const std::string& text) {
    const std::u32string codes(pattern.begin(), pattern.end());
    token_search<char> search(token_regex::of(codes), text.data(), text.size());
    matches found;
    for (token_match match; search.next(match);) found.emplace_back(match.start, match.size);
    return found;
}

}  // namespace

TEST_CASE("token_regex: a run of a million characters and an ambiguous expression end") {
    const std::string run(1'000'000, 'a');
    CHECK(ours("(?:a|b)+", run) == matches{{0, run.size()}});
    CHECK(ours("\\s*b|a{512}(?!\\S)|a", std::string(100'000, 'a')).size() > 90'000);
    CHECK(ours("(?=(aaa)+(?!a))", std::string(30'000, 'a')).size() == 10'000);
    CHECK_THROWS_AS(ours("(?:a|aa)*b", std::string(1'000, 'a')), error);
}

TEST_CASE("token_regex: other syntax is refused when it is compiled") {
    for (const char* const pattern : {"(a", "a)", "a**", "a+?", "a++", "[a", "(?<=a)", "\\w", "\\1",
                                      "^a", ".", "(a*)*", "a{2,1}", "[[:alpha:]]", "\\"}) {
        CAPTURE(pattern);
        CHECK_THROWS_AS(ours(pattern, "a"), std::regex_error);
    }
}

}  // namespace kqview
