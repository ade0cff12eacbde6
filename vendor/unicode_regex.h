// Included before llama.cpp's unicode.cpp, by vendor/llama.cmake: provides cpp/base/token_regex
// under names that replace three of std's. std::regex recurses for every character of a run, so a
// long word ends the process. Tested by tests/engine/test_text.py.
#pragma once

#include <iterator>
#include <regex>
#include <string>

#include "base/token_regex.h"

namespace kqview::standing_in {

template <typename Char>
struct basic_regex {
    basic_regex(const std::basic_string<Char>& pattern, std::regex_constants::syntax_option_type) {
        std::u32string codes;
        codes.reserve(pattern.size());
        for (const Char c : pattern) {
            codes.push_back(static_cast<char32_t>(static_cast<std::make_unsigned_t<Char>>(c)));
        }
        compiled = token_regex::of(codes);
    }

    std::shared_ptr<const token_regex> compiled;
};

template <typename Iterator>
struct match_results {
    std::ptrdiff_t position() const { return static_cast<std::ptrdiff_t>(found.start); }
    std::ptrdiff_t length() const { return static_cast<std::ptrdiff_t>(found.size); }

    token_match found;
};

// Two iterators are equal if both are at their end: all that a loop over matches needs.
template <typename Iterator>
class regex_iterator {
    using char_type = typename std::iterator_traits<Iterator>::value_type;

public:
    regex_iterator() = default;
    regex_iterator(Iterator first, Iterator last, const basic_regex<char_type>& expression)
        : search_(std::make_shared<token_search<char_type>>(
              expression.compiled, first == last ? nullptr : &*first,
              static_cast<std::size_t>(last - first))) {
        ++*this;
    }
    const match_results<Iterator>& operator*() const { return match_; }
    regex_iterator& operator++() {
        if (!search_->next(match_.found)) search_.reset();
        return *this;
    }
    bool operator!=(const regex_iterator& other) const { return search_ != other.search_; }

private:
    std::shared_ptr<token_search<char_type>> search_;
    match_results<Iterator> match_;
};

}  // namespace kqview::standing_in

// unicode.cpp writes std:: in front of each.
namespace std {
template <typename Char>
using kqview_basic_regex = kqview::standing_in::basic_regex<Char>;
template <typename Iterator>
using kqview_match_results = kqview::standing_in::match_results<Iterator>;
template <typename Iterator>
using kqview_regex_iterator = kqview::standing_in::regex_iterator<Iterator>;
}  // namespace std

#define basic_regex kqview_basic_regex
#define match_results kqview_match_results
#define regex_iterator kqview_regex_iterator
