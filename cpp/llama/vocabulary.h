// Text to ids and back, for one model. Safe for any text: no recursion, time proportional to its
// length, and a typed error where llama.cpp would abort or throw.
// Threads: immutable; any thread, while the engine thread decodes.
#pragma once

#include <llama.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"

namespace kqview {

class vocabulary {
public:
    // The most bytes of one text. While tokenizing, llama.cpp may use a hundred times as much
    // memory.
    static constexpr std::size_t max_text_bytes = std::size_t{16} << 20;
    // Texts of this size or more are split at their special tokens before llama.cpp sees them.
    static constexpr std::size_t long_text_bytes = 16 * 1024;

    vocabulary() = default;
    explicit vocabulary(const llama_vocab* handle);

    const llama_vocab* get() const { return handle_; }
    int size() const { return size_; }
    bool exists() const { return llama_vocab_type(handle_) != LLAMA_VOCAB_TYPE_NONE; }

    // Raise unsupported_model if there is no vocabulary or llama.cpp fails with it, invalid_token
    // for ids outside it, request for a text that is too long, out_of_memory. Only tests set
    // `apart_bytes`: the ids do not depend on it.
    std::vector<token_id> tokenize(std::string_view text, bool add_special, bool parse_special,
                                   std::size_t apart_bytes = long_text_bytes) const;
    // The bytes of all tokens, joined. No space is dropped, so detokenizing parts gives parts of
    // the text.
    std::string detokenize(std::span<const token_id> ids) const;
    std::string token_bytes(token_id id) const;

    // Ids of the tokens that `tokenize` finds only with parse_special.
    std::vector<token_id> control_tokens() const;

    void check_token(token_id id, const char* who) const;

private:
    struct special_token {
        token_id id;
        std::string text;
        llama_token_attr attributes;
    };
    struct piece;
    struct neighbours;

    void require(const char* who) const;
    void append_bytes(token_id id, std::string& to) const;
    std::vector<token_id> tokenize_whole(std::string_view text, bool add_special,
                                         bool parse_special) const;
    std::vector<token_id> tokenize_apart(std::string_view text, bool add_special,
                                         bool parse_special) const;
    std::vector<piece> pieces_of(std::string_view text, bool parse_special) const;
    void append_ids(std::string_view text, bool parse_special, std::vector<token_id>& ids) const;
    std::size_t end_of_part(std::string_view text) const;

    const llama_vocab* handle_ = nullptr;
    int size_ = 0;
    std::vector<special_token> specials_;     // in llama.cpp's search order
    std::shared_ptr<neighbours> neighbours_;  // for SentencePiece vocabularies
};

}  // namespace kqview
