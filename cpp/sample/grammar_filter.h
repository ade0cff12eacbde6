// Allows the tokens that a GBNF grammar allows, by the same rules as llama.cpp's own matcher, with
// two exceptions: tokens that llama.cpp's matcher allows but then fails to accept are not allowed
// here, and rules that begin with themselves in tail position are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "sample/grammar.h"
#include "sample/grammar_automaton.h"
#include "sample/token_filter.h"
#include "sample/work_limit.h"

namespace kqview {

// The texts of a model's tokens, sorted so that common prefixes are walked once.
// Threads: any; immutable.
class token_texts {
public:
    // The bytes of each id, and whether it ends the text.
    token_texts(const std::vector<std::string>& texts, std::vector<bool> is_end);

    std::size_t n_vocab() const { return is_end_.size(); }
    bool is_end(token_id id) const { return is_end_[static_cast<std::size_t>(id)]; }
    // The text up to a zero byte, as llama.cpp reads it.
    std::string_view of(token_id id) const;

    // Tokens that have a text and do not end the output, sorted by text; n_shared: number of
    // leading bytes shared with the previous text.
    struct entry {
        token_id id;
        std::uint32_t n_shared;
    };
    const std::vector<entry>& sorted() const { return sorted_; }

private:
    std::string bytes_;
    std::vector<std::size_t> starts_;
    std::vector<bool> is_end_;
    std::vector<entry> sorted_;
};

class grammar_filter final : public token_filter {
public:
    static constexpr std::size_t n_mask_bytes_max = std::size_t{16} << 20;

    grammar_filter(std::shared_ptr<const token_texts> texts, std::shared_ptr<const grammar> rules,
                   work_limit& limit)
        : texts_(std::move(texts)), automaton_(std::move(rules), limit) {}

    void prepare(std::size_t n_calls, work_limit& limit) override;
    bool allows(token_id id, work_limit& limit) override;
    void accept(token_id id, work_limit& limit) override;
    void restart() override;

    const grammar_automaton& automaton() const { return automaton_; }

private:
    using mask = std::vector<std::uint64_t>;

    // The match after some bytes of a token.
    struct cursor {
        grammar_automaton::state state;
        partial_character part;
        std::uint32_t first = 0;   // first code point so far; 0: none
        bool was_partial = false;  // `part` began in an earlier token
    };

    cursor start() const { return {automaton_.current(), partial_, 0, partial_.n_missing > 0}; }
    static bool decode(cursor& at, char byte);
    bool advance(cursor& at, char byte, work_limit& limit);
    bool fits(const cursor& at, work_limit& limit) const;
    bool is_whole(std::string_view text) const;
    bool allows_as_token(token_id id, std::string_view text) const;
    mask make_mask(work_limit& limit);
    void go_to(grammar_automaton::state next, partial_character part);

    const std::shared_ptr<const token_texts> texts_;
    grammar_automaton automaton_;
    partial_character partial_;  // at the end of the last token

    std::unordered_map<grammar_automaton::state, mask>
        masks_;  // by state; only if nothing is partial
    std::size_t n_forgotten_ = 0;
    const mask* current_mask_ = nullptr;
    mask partial_mask_;  // otherwise
};

}  // namespace kqview
