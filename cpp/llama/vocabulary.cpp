#include "llama/vocabulary.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "llama/backend.h"

namespace kqview {

namespace {

constexpr const char* remedy = "use another model file, or work with token ids";

// Converts llama.cpp's exceptions and aborts to errors, for calls that change nothing.
template <typename Call>
auto checked(const char* doing, Call&& call) {
    try {
        return guarded(doing, errc::unsupported_model, remedy, std::forward<Call>(call));
    } catch (const error&) {
        throw;
    } catch (const std::bad_alloc&) {
        throw error(errc::out_of_memory, "no memory left while ", doing, "; shorten the text");
    } catch (const std::exception& failure) {
        throw error(errc::unsupported_model, "llama.cpp failed while ", doing,
                    " with this model's vocabulary: ", failure.what(), "; ", remedy);
    }
}

bool has(llama_token_attr attributes, int wanted) { return (attributes & wanted) != 0; }

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

// Size of the parts of a text for SentencePiece, and the sign put in front of them.
constexpr std::size_t part_bytes = 8 * 1024;
constexpr char part_sign = '\x01';

// Number of bytes of the character that begins with this byte, as llama.cpp counts them.
std::size_t char_size(char first) {
    const auto high = static_cast<unsigned char>(first) >> 4;
    return high < 12 ? 1 : high < 14 ? 2 : high == 14 ? 3 : 4;
}

// A number for each character; the sign that SentencePiece writes for a space counts as a space.
std::uint32_t code_of(std::string_view character) {
    if (character == "\xe2\x96\x81") return ' ';
    std::uint32_t code = 0;
    for (const char byte : character) code = code << 8 | static_cast<unsigned char>(byte);
    return code;
}

}  // namespace

// Which pairs of characters are adjacent in some token.
struct vocabulary::neighbours {
    std::once_flag once;
    bool can_part = true;
    std::unordered_set<std::uint64_t> pairs;

    static std::uint64_t key(std::uint32_t left, std::uint32_t right) {
        return std::uint64_t{left} << 32 | right;
    }
    void add(std::string_view token) {
        std::uint32_t last = 0;
        for (std::size_t i = 0; i < token.size();) {
            const auto n = std::min(char_size(token[i]), token.size() - i);
            const auto code = code_of(token.substr(i, n));
            if (i > 0) pairs.insert(key(last, code));
            if (code == part_sign && token.size() > 1) can_part = false;
            last = code;
            i += n;
        }
    }
    bool has(std::uint32_t left, std::uint32_t right) const {
        return pairs.contains(key(left, right));
    }
};

// A special token or, with `id` -1, the text between two of them.
struct vocabulary::piece {
    token_id id;
    std::size_t start, size;
};

vocabulary::vocabulary(const llama_vocab* handle)
    : handle_(handle), size_(llama_vocab_n_tokens(handle)) {
    if (!exists()) return;
    constexpr int special =
        LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;
    const auto type = llama_vocab_type(handle_);
    if (type == LLAMA_VOCAB_TYPE_SPM) neighbours_ = std::make_shared<neighbours>();
    const bool has_own_bytes = type == LLAMA_VOCAB_TYPE_RWKV || type == LLAMA_VOCAB_TYPE_PLAMO2;
    for (token_id id = 0; id < size_; ++id) {
        const auto attributes = llama_vocab_get_attr(handle_, id);
        if (!has(attributes, special)) continue;
        special_token token{id, {}, attributes};
        // The bytes of a special token are its text, even if that contains a zero byte.
        if (has_own_bytes) {
            token.text = llama_vocab_get_text(handle_, id);
        } else {
            append_bytes(id, token.text);
        }
        specials_.push_back(std::move(token));
    }
    // llama.cpp's own order, for equal lengths too: the same sort of the same sequence.
    std::sort(specials_.begin(), specials_.end(),
              [](const auto& a, const auto& b) { return a.text.size() > b.text.size(); });
}

void vocabulary::require(const char* who) const {
    if (exists()) return;
    throw error(errc::unsupported_model, who, ": this model has no vocabulary; use token ids");
}

void vocabulary::check_token(token_id id, const char* who) const {
    if (id >= 0 && id < size_) return;
    throw error(errc::invalid_token, who, " has token id ", id, ", but ids go from 0 to ",
                size_ - 1);
}

std::vector<token_id> vocabulary::tokenize(std::string_view text, bool add_special,
                                           bool parse_special, std::size_t apart_bytes) const {
    require("tokenize");
    if (text.size() > max_text_bytes) {
        throw error(errc::request, "text has ", text.size(), " bytes, the limit is ",
                    max_text_bytes, " (16 MiB); split it");
    }
    return checked("tokenizing", [&] {
        return text.size() < apart_bytes ? tokenize_whole(text, add_special, parse_special)
                                         : tokenize_apart(text, add_special, parse_special);
    });
}

std::vector<token_id> vocabulary::tokenize_whole(std::string_view text, bool add_special,
                                                 bool parse_special) const {
    std::vector<token_id> ids(text.size() + 8);
    const auto call = [&] {
        return llama_tokenize(handle_, text.data(), static_cast<std::int32_t>(text.size()),
                              ids.data(), static_cast<std::int32_t>(ids.size()), add_special,
                              parse_special);
    };
    auto n = call();
    if (n < 0) {
        ids.resize(static_cast<std::size_t>(-n));
        n = call();
    }
    ids.resize(static_cast<std::size_t>(n));
    return ids;
}

// llama.cpp cuts a text at its special tokens first and tokenizes each piece separately. To find a
// place in the list of pieces it walks the list from the start, which takes minutes for a text of
// 300,000 special tokens.
std::vector<token_id> vocabulary::tokenize_apart(std::string_view text, bool add_special,
                                                 bool parse_special) const {
    auto around = add_special ? tokenize_whole({}, true, false) : std::vector<token_id>{};
    const bool has_first =
        llama_vocab_type(handle_) == LLAMA_VOCAB_TYPE_WPM || llama_vocab_get_add_bos(handle_);
    const auto n_before = std::min<std::size_t>(around.size(), has_first ? 1 : 0);
    const auto before = around.begin() + static_cast<std::ptrdiff_t>(n_before);
    std::vector<token_id> ids(around.begin(), before);
    for (const auto& piece : pieces_of(text, parse_special)) {
        if (piece.id >= 0) {
            ids.push_back(piece.id);
        } else {
            append_ids(text.substr(piece.start, piece.size), parse_special, ids);
        }
    }
    ids.insert(ids.end(), before, around.end());
    return ids;
}

// llama.cpp's SentencePiece tokenizer copies all ids found so far for each character that is not a
// token, so a text of line ends takes minutes. This function gives it parts of the text, cut
// between characters that are not adjacent in any token: no merge ever crosses such a cut.
// llama.cpp puts a space in front of a text; a sign in front of each part keeps it away from the
// part's own text, and the ids of both are removed from the result.
void vocabulary::append_ids(std::string_view text, bool parse_special,
                            std::vector<token_id>& ids) const {
    auto size = end_of_part(text);
    auto found = tokenize_whole(text.substr(0, size), false, parse_special);
    ids.insert(ids.end(), found.begin(), found.end());
    if (size == text.size()) return;
    const auto of_sign = tokenize_whole({&part_sign, 1}, false, parse_special);
    const auto n_sign = static_cast<std::ptrdiff_t>(of_sign.size());
    for (text.remove_prefix(size); !text.empty(); text.remove_prefix(size)) {
        size = end_of_part(text);
        found = tokenize_whole(part_sign + std::string(text.substr(0, size)), false, parse_special);
        ids.insert(ids.end(), found.begin() + n_sign, found.end());
    }
}

std::size_t vocabulary::end_of_part(std::string_view text) const {
    if (!neighbours_ || text.size() <= part_bytes) return text.size();
    std::call_once(neighbours_->once, [&] {
        for (const auto& token : specials_) {
            if (token.text.find(part_sign) != std::string::npos) neighbours_->can_part = false;
        }
        std::string bytes;
        for (token_id id = 0; id < size_; ++id) {
            neighbours_->add(llama_vocab_get_text(handle_, id));
            bytes.clear();
            append_bytes(id, bytes);
            neighbours_->add(bytes);
        }
    });
    // The sign must never merge with the text that follows it.
    if (!neighbours_->can_part) return text.size();
    std::uint32_t last = 0;
    for (std::size_t i = 0; i < text.size();) {
        const auto n = std::min(char_size(text[i]), text.size() - i);
        const auto code = code_of(text.substr(i, n));
        if (i >= part_bytes && !neighbours_->has(last, code)) return i;
        last = code;
        i += n;
    }
    return text.size();
}

std::vector<vocabulary::piece> vocabulary::pieces_of(std::string_view text,
                                                     bool parse_special) const {
    std::vector<piece> pieces{{-1, 0, text.size()}};
    if (text.empty()) pieces.clear();
    std::vector<piece> next;
    for (const auto& token : specials_) {
        if (!parse_special &&
            has(token.attributes, LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN)) {
            continue;
        }
        if (token.text.empty() || text.find(token.text) == std::string_view::npos) continue;
        next.clear();
        for (const auto& piece : pieces) {
            if (piece.id >= 0) {
                next.push_back(piece);
                continue;
            }
            auto start = piece.start;
            const auto end = piece.start + piece.size;
            while (start < end) {
                const auto found = text.substr(0, end).find(token.text, start);
                if (found == std::string_view::npos) break;
                auto left = found;
                if (has(token.attributes, LLAMA_TOKEN_ATTR_LSTRIP)) {
                    while (left > start && is_space(text[left - 1])) --left;
                }
                if (left > start) next.push_back({-1, start, left - start});
                next.push_back({token.id, found, token.text.size()});
                start = found + token.text.size();
                if (has(token.attributes, LLAMA_TOKEN_ATTR_RSTRIP)) {
                    while (start < end && is_space(text[start])) ++start;
                }
            }
            if (start < end) next.push_back({-1, start, end - start});
        }
        pieces.swap(next);
    }
    return pieces;
}

void vocabulary::append_bytes(token_id id, std::string& to) const {
    constexpr std::int32_t n_usual = 32;
    const auto start = to.size();
    const auto call = [&](std::int32_t size) {
        to.resize(start + static_cast<std::size_t>(size));
        return llama_token_to_piece(handle_, id, to.data() + start, size, 0, true);
    };
    auto n = call(n_usual);
    if (n < 0) n = call(-n);
    to.resize(start + static_cast<std::size_t>(std::max(n, 0)));
}

std::string vocabulary::detokenize(std::span<const token_id> ids) const {
    require("detokenize");
    for (const auto id : ids) check_token(id, "ids");
    return checked("detokenizing", [&] {
        std::string text;
        for (const auto id : ids) append_bytes(id, text);
        return text;
    });
}

std::string vocabulary::token_bytes(token_id id) const {
    require("token_bytes");
    check_token(id, "id");
    return checked("reading a token", [&] {
        std::string bytes;
        append_bytes(id, bytes);
        return bytes;
    });
}

std::vector<token_id> vocabulary::control_tokens() const {
    std::vector<token_id> ids;
    for (const auto& token : specials_) {
        if (has(token.attributes, LLAMA_TOKEN_ATTR_CONTROL)) ids.push_back(token.id);
    }
    std::sort(ids.begin(), ids.end());
    return ids;
}

}  // namespace kqview
