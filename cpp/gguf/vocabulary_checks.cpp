#include <algorithm>
#include <bit>
#include <bitset>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "gguf/checks.h"
#include "gguf/header.h"

namespace kqview {

namespace {

// Tokenizers with a trie recurse once per byte of a token.
constexpr std::size_t n_token_bytes_max = 16384;
constexpr std::size_t n_trie_token_bytes_max = 1024;
constexpr std::size_t n_dummy_tokens_max = 1 << 24;
constexpr std::int32_t byte_type = 6;  // of tokenizer.ggml.token_type

// A tokenizer of llama.cpp, named as in tokenizer.ggml.model.
struct tokenizer_kind {
    std::string_view name;
    // The default ids if the file has none; -1: no default.
    std::int64_t bos, eos, unknown;
    bool adds_bos, adds_eos;
    bool has_trie;
};
constexpr tokenizer_kind tokenizer_kinds[] = {
    {"llama", 1, 2, 0, true, false, false},
    {"bert", 101, -1, 100, true, false, false},
    {"gpt2", 11, 11, -1, false, false, false},
    {"hybriddna", 11, 11, -1, false, false, false},
    {"whitespace", 11, 11, -1, false, false, false},
    {"gemma4", -1, -1, -1, true, false, false},
    {"t5", -1, 1, 2, false, true, true},
    {"rwkv", -1, -1, -1, false, false, true},
    {"test", -1, -1, -1, false, false, false},  // hashes modulo the number of tokens: SIGFPE for 0
    {"plamo2", 1, 2, 0, false, false, true},
};

// A set that tells whether each text was seen before. A std::unordered_set takes 5 times as long
// for a vocabulary of 150,000 tokens, and that is most of the time that the checks of a file take.
class text_table {
public:
    explicit text_table(std::size_t n_most) : slots_(std::bit_ceil(2 * n_most + 2)) {}

    bool insert(std::string_view text) {
        const auto mask = slots_.size() - 1;
        auto i = std::hash<std::string_view>()(text) & mask;
        for (; slots_[i].data(); i = (i + 1) & mask) {
            if (slots_[i] == text) return false;
        }
        slots_[i] = text;
        return true;
    }

private:
    std::vector<std::string_view> slots_;
};

class vocabulary_checker {
public:
    explicit vocabulary_checker(const gguf_header& head, const tokenizer_kind& kind)
        : head_(head), kind_(kind) {}

    void check() {
        check_tokens();
        check_size("tokenizer.ggml.scores", gguf_type::f32);
        check_size("tokenizer.ggml.token_type", gguf_type::i32);
        check_merges();
        check_byte_tokens();
        check_special_tokens();
    }

private:
    template <typename... Parts>
    [[noreturn]] void fail(const Parts&... what) const {
        head_.fail(what...);
    }

    template <typename... Parts>
    [[noreturn]] void refuse(const Parts&... what) const {
        throw error(errc::unsupported_model, head_.file, ": ", what...);
    }

    std::string_view token(std::size_t i) const {
        const auto text = tokens_->strings[i];
        return text.substr(0, text.find('\0'));  // as llama.cpp reads it
    }

    void check_tokens() {
        tokens_ = &head_.at("tokenizer.ggml.tokens", gguf_type::string, true);
        if (tokens_->strings.empty()) fail("tokenizer.ggml.tokens is empty", convert_again);
        const auto n_most = kind_.has_trie ? n_trie_token_bytes_max : n_token_bytes_max;
        text_table texts(tokens_->size());
        for (std::size_t i = 0; i < tokens_->size(); ++i) {
            const auto text = token(i);
            if (text.size() > n_most) {
                fail("token ", i, " has ", text.size(), " bytes, the limit is ", n_most,
                     convert_again);
            }
            // llama.cpp generates a text for tokens without one.
            if (!text.empty() && !texts.insert(text)) {
                fail("token ", i, " ", quoted(text), " is in tokenizer.ggml.tokens twice",
                     convert_again);
            }
        }
    }

    void check_size(const char* key, gguf_type type) const {
        const auto* const found = head_.find(key);
        const bool is_integer = found && found->type == gguf_type::i32;  // of scores too
        const auto* const value = head_.find(key, is_integer ? gguf_type::i32 : type, true);
        if (value && value->size() != tokens_->size()) {
            fail(key, " has ", value->size(), " values, there are ", tokens_->size(), " tokens",
                 convert_again);
        }
    }

    // "left right": llama.cpp splits at the first space after the first byte.
    void check_merges() const {
        const auto* const merges = head_.find("tokenizer.ggml.merges", gguf_type::string, true);
        if (!merges) return;
        for (std::size_t i = 0; i < merges->size(); ++i) {
            const auto merge = merges->strings[i];
            const auto space = merge.find(' ', 1);
            if (space == merge.npos || space + 1 == merge.size()) {
                fail("merge ", i, " ", quoted(merge), " is not two parts with a space between them",
                     convert_again);
            }
        }
    }

    static std::optional<unsigned> hex_byte(std::string_view text) {
        if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return std::nullopt;
        unsigned value = 0;
        const auto read = std::from_chars(&text[3], &text[5], value, 16);
        return read.ptr == &text[5] ? std::optional(value) : std::nullopt;
    }

    void check_byte_tokens() const {
        std::bitset<256> typed, written;
        const auto* const types = head_.find("tokenizer.ggml.token_type");
        for (std::size_t i = 0; i < tokens_->size(); ++i) {
            const auto text = token(i);
            const auto value = hex_byte(text);
            if (types && types->integer(i) == byte_type) {
                if (!value) {
                    fail("token ", i, " ", quoted(text),
                         " has the type of a byte token, but not a text such as \"<0x00>\"",
                         convert_again);
                }
                typed.set(*value);
            }
            if (value) {
                written.set(*value);
            } else if (text.size() == 1) {
                written.set(static_cast<unsigned char>(text[0]));
            } else if (kind_.name == "rwkv") {
                if (const auto escaped = escaped_byte(text)) written.set(*escaped);
            }
        }
        if (kind_.name == "bert" && typed.any()) {
            fail("the vocabulary has byte tokens, which a bert tokenizer cannot read",
                 convert_again);
        }
        const bool is_sentencepiece = kind_.name == "llama";
        const bool is_rwkv = kind_.name == "rwkv";
        if ((is_sentencepiece || (is_rwkv && !special("unknown_token_id", -1))) && !written.all()) {
            refuse(
                "the vocabulary has no token for byte ", first_missing(written),
                "; a text with it could not be tokenized; convert the model with its byte tokens");
        }
        if (kind_.name == "plamo2" && !typed.all()) {
            refuse("the vocabulary has no byte token for byte ", first_missing(typed),
                   convert_again);
        }
    }

    static std::size_t first_missing(const std::bitset<256>& found) {
        std::size_t i = 0;
        while (i < found.size() && found[i]) ++i;
        return i;
    }

    // "\x0a", "\n" and the like: how RWKV's vocabulary writes bytes.
    static std::optional<unsigned> escaped_byte(std::string_view text) {
        if (text.size() < 2 || text[0] != '\\') return std::nullopt;
        const char sign = text[1];
        if (text.size() == 2 && sign != 'x') {
            const char byte = sign == 't' ? '\t' : sign == 'n' ? '\n' : sign == 'r' ? '\r' : sign;
            return static_cast<unsigned char>(byte);
        }
        if (text.size() != 4 || sign != 'x') return std::nullopt;
        return hex_byte(text_of("<0x", text.substr(2), ">"));
    }

    // The id for a role, chosen as llama.cpp does: the file's if it is in the vocabulary, else the
    // default.
    std::optional<std::int64_t> special(const char* name, std::int64_t otherwise) const {
        const auto key = "tokenizer.ggml." + std::string(name);
        const auto n = static_cast<std::int64_t>(tokens_->size());
        const auto* const value = head_.find(key, gguf_type::u32);
        if (value && value->integer() < n) return value->integer();
        if (otherwise >= 0 && otherwise < n) return otherwise;
        return std::nullopt;
    }

    bool flag(const char* key, bool otherwise) const {
        const auto* const value = head_.find(key, gguf_type::boolean);
        return value ? value->integer() != 0 : otherwise;
    }

    void require(bool is_needed, std::optional<std::int64_t> id, const char* name) const {
        if (!is_needed || id) return;
        refuse("the tokenizer needs tokenizer.ggml.", name,
               ", but the file has none in its vocabulary of ", tokens_->size(), " tokens",
               convert_again);
    }

    void check_special_tokens() const {
        const bool is_bert = kind_.name == "bert";
        const auto bos = special("bos_token_id", kind_.bos);
        const auto eos = special("eos_token_id", kind_.eos);
        require(is_bert || kind_.name == "gemma4" ||
                    flag("tokenizer.ggml.add_bos_token", kind_.adds_bos),
                bos, "bos_token_id");
        require(!is_bert && flag("tokenizer.ggml.add_eos_token", kind_.adds_eos), eos,
                "eos_token_id");
        require(is_bert, special("seperator_token_id", 102), "seperator_token_id");
        // They emit it where no token fits.
        require(is_bert || kind_.name == "t5" || kind_.name == "plamo2",
                special("unknown_token_id", kind_.unknown), "unknown_token_id");
    }

    const gguf_header& head_;
    const tokenizer_kind& kind_;
    const gguf_value* tokens_ = nullptr;
};

void check_dummy_tokens(const gguf_header& head, std::span<const gguf_tensor> tensors) {
    const auto* const arch = head.find("general.architecture");
    if (!arch || arch->strings.empty()) return;
    const auto key = std::string(arch->strings[0]) + ".vocab_size";
    const auto* const value = head.find(key);
    if (!value || !value->is_integer() || value->is_array) return;
    const auto n = value->integer();
    const auto embd = std::ranges::find(tensors, "token_embd.weight", &gguf_tensor::name);
    const bool is_other = embd != tensors.end() && static_cast<std::int64_t>(embd->shape[1]) != n;
    if (n < 0 || n > static_cast<std::int64_t>(n_dummy_tokens_max) || is_other) {
        head.fail(key, " is ", n, ", token_embd.weight has ",
                  embd == tensors.end() ? "none" : std::to_string(embd->shape[1]), " tokens",
                  convert_again);
    }
}

}  // namespace

void check_vocabulary(const gguf_header& head, std::span<const gguf_tensor> tensors) {
    const auto* const model = head.find("tokenizer.ggml.model", gguf_type::string);
    if (!model) return;  // llama.cpp reports it if it needs one
    const auto name = model->strings[0];
    if (name == "none" || name == "no_vocab") return check_dummy_tokens(head, tensors);
    const auto* const kind = std::ranges::find(tokenizer_kinds, name, &tokenizer_kind::name);
    if (kind == std::end(tokenizer_kinds)) return;  // unknown to llama.cpp too, which says so
    const auto* const pre = head.find("tokenizer.ggml.pre");
    if (pre && !pre->strings.empty() && pre->strings[0] == "whitespace" && name != "whitespace") {
        head.fail("tokenizer.ggml.pre is 'whitespace' with the tokenizer ", quoted(name),
                  ", which does not support it", convert_again);
    }
    vocabulary_checker(head, *kind).check();
}

}  // namespace kqview
