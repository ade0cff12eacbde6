#include "sample/constraint.h"

#include <dlfcn.h>
#include <llama.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"

namespace kqview {
namespace {

// ---- the used part of llguidance's C interface

struct LlgTokenizer;
struct LlgMatcher;

// Layout of llguidance's LlgTokenizerInitV2; `struct_size` lets later versions append fields.
struct llg_tokenizer_init {
    std::size_t struct_size;
    std::uint32_t vocab_size;
    std::uint32_t tok_eos;
    const std::uint32_t* token_lens;
    const std::uint8_t* token_bytes;
    const char* tokenizer_json;
    bool tokenize_assumes_string;
    void* tokenize_fn;
    bool use_approximate_greedy_tokenize_fn;
    const void* tokenize_user_data;
    const char* const* slices;
    const std::uint32_t* tok_eos_extra;
    std::uint32_t tok_eos_extra_count;
};

// The beginning of LlgConstraintInit. llguidance writes defaults for the rest, which grows with
// versions; hence the room after it.
struct llg_matcher_init {
    const LlgTokenizer* tokenizer;
    std::uint32_t log_buffer_level;
    std::uint32_t log_stderr_level;
    alignas(8) unsigned char rest[1024];
};

// Converts dlsym's pointer to a function pointer, which POSIX guarantees to work.
template <typename F>
void find(void* library, const char* name, F*& function) {
    function = reinterpret_cast<F*>(dlsym(library, name));
    if (!function) {
        throw error(errc::request, std::string("llguidance has no function ") + name +
                                       ", json_schema and regex need version 1.9 or newer; "
                                       "pip install -U llguidance");
    }
}

// The functions used, looked up by name.
struct llguidance {
    // Raises request if the library cannot be opened or lacks a function.
    explicit llguidance(const std::string& path) {
        // Python has loaded it already; it stays loaded.
        void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
        if (!library) {
            throw error(errc::request, std::string("llguidance cannot be opened: ") + dlerror() +
                                           "; reinstall it");
        }
        find(library, "llg_new_tokenizer_v2", new_tokenizer_v2);
        find(library, "llg_free_tokenizer", free_tokenizer);
        find(library, "llg_constraint_init_set_defaults", constraint_init_set_defaults);
        find(library, "llg_new_matcher", new_matcher);
        find(library, "llg_free_matcher", free_matcher);
        find(library, "llg_matcher_get_error", matcher_get_error);
        find(library, "llg_matcher_compute_mask", matcher_compute_mask);
        find(library, "llg_matcher_get_mask", matcher_get_mask);
        find(library, "llg_matcher_consume_token", matcher_consume_token);
        find(library, "llg_matcher_reset", matcher_reset);
    }

    LlgTokenizer* (*new_tokenizer_v2)(const llg_tokenizer_init*, char* message, std::size_t n);
    void (*free_tokenizer)(LlgTokenizer*);
    void (*constraint_init_set_defaults)(llg_matcher_init*, const LlgTokenizer*);
    LlgMatcher* (*new_matcher)(const llg_matcher_init*, const char* kind, const char* text);
    void (*free_matcher)(LlgMatcher*);
    const char* (*matcher_get_error)(LlgMatcher*);
    std::int32_t (*matcher_compute_mask)(LlgMatcher*);
    const std::uint32_t* (*matcher_get_mask)(LlgMatcher*);  // one bit per token
    std::int32_t (*matcher_consume_token)(LlgMatcher*, std::uint32_t);
    std::int32_t (*matcher_reset)(LlgMatcher*);
};

constexpr std::size_t n_bytes_max = std::size_t{1} << 20;
constexpr std::size_t n_message_max = 300;
// llguidance's prefix of a special token: no text matches it.
constexpr char special_mark = '\xff';

// The caller's option for a kind of constraint.
std::string option_of(const std::string& kind) { return kind == "lark" ? "grammar" : kind; }

// llguidance's messages have several lines, with the whole grammar at the end. Cuts between
// characters.
std::string one_line(const char* message) {
    std::string line;
    for (const char* c = message ? message : "no reason given"; *c != '\0'; ++c) {
        const bool is_start = (static_cast<unsigned char>(*c) & 0xC0U) != 0x80;
        if (is_start && line.size() >= n_message_max) return line + "...";
        const bool is_space = *c == ' ' || *c == '\n' || *c == '\t' || *c == '\r';
        if (!is_space) line += *c;
        if (is_space && !line.empty() && line.back() != ' ') line += ' ';
    }
    return line;
}

// Why llguidance refuses a constraint, and the remedy; follows the constraint's name.
std::string refusal(const char* message) {
    if (std::string_view(message).find("coerce_one_of") != std::string_view::npos) {
        return " has a oneOf in which one value may fit several schemas, which llguidance refuses; "
               "make the schemas exclude each other, write anyOf, or add "
               R"("x-guidance": {"coerce_one_of": true} to the whole schema, which is the same)";
    }
    return " is refused by llguidance: " + one_line(message) + "; correct it";
}

}  // namespace

class constraint_vocabulary {
public:
    constraint_vocabulary(const std::string& library_path, const model& source);
    ~constraint_vocabulary() { library_.free_tokenizer(handle_); }
    constraint_vocabulary(const constraint_vocabulary&) = delete;
    constraint_vocabulary& operator=(const constraint_vocabulary&) = delete;

    const llguidance& library() const { return library_; }
    const LlgTokenizer* get() const { return handle_; }
    std::uint32_t n_vocab() const { return n_vocab_; }
    bool is_end(token_id id) const { return is_end_[static_cast<std::size_t>(id)]; }

private:
    llguidance library_;
    std::uint32_t n_vocab_;
    std::vector<bool> is_end_;
    LlgTokenizer* handle_ = nullptr;
};

namespace {

class constraint final : public token_filter {
public:
    constraint(std::shared_ptr<const constraint_vocabulary> vocabulary, const std::string& kind,
               const std::string& text)
        : vocabulary_(std::move(vocabulary)),
          library_(vocabulary_->library()),
          kind_(option_of(kind)) {
        llg_matcher_init init{};
        library_.constraint_init_set_defaults(&init, vocabulary_->get());
        init.log_buffer_level = 0;
        init.log_stderr_level = 0;
        handle_.reset(library_.new_matcher(&init, kind.c_str(), text.c_str()));
        if (const char* const message = library_.matcher_get_error(handle_.get())) {
            throw error(errc::invalid_sampling, kind_ + refusal(message));
        }
    }

    // Null if llguidance reports an error.
    const std::uint32_t* mask() {
        if (!mask_ && library_.matcher_compute_mask(handle_.get()) == 0) {
            mask_ = library_.matcher_get_mask(handle_.get());
        }
        return mask_;
    }

    bool matches_nothing() {
        const std::uint32_t* const words = mask();
        return !words || std::all_of(words, words + (vocabulary_->n_vocab() + 31) / 32,
                                     [](std::uint32_t word) { return word == 0; });
    }

    // llguidance has its own limits, and cannot be interrupted within them.
    void prepare(std::size_t /*n_calls*/, work_limit& limit) override {
        if (!mask()) raise();
        limit.check();
    }

    bool allows(token_id id, work_limit& /*limit*/) override {
        const auto i = static_cast<std::uint32_t>(id);
        return (mask_[i / 32] >> (i % 32) & 1U) != 0;
    }

    void accept(token_id id, work_limit& limit) override {
        mask_ = nullptr;
        // Nothing follows an end token, and llguidance rejects it where nothing else may come.
        if (vocabulary_->is_end(id)) return;
        const auto token = static_cast<std::uint32_t>(id);
        if (library_.matcher_consume_token(handle_.get(), token) != 0) raise();
        limit.check();
    }

    void restart() override {
        mask_ = nullptr;
        if (library_.matcher_reset(handle_.get()) != 0) raise();
    }

    [[noreturn]] void raise() const {
        throw error(errc::invalid_sampling,
                    "llguidance cannot go on with " + kind_ + ": " +
                        one_line(library_.matcher_get_error(handle_.get())) + "; simplify it");
    }

private:
    struct matcher_deleter {
        void (*free)(LlgMatcher*);
        void operator()(LlgMatcher* handle) const { free(handle); }
    };

    std::shared_ptr<const constraint_vocabulary> vocabulary_;  // outlives the matcher
    const llguidance& library_;
    const std::string kind_;
    std::unique_ptr<LlgMatcher, matcher_deleter> handle_{nullptr, {library_.free_matcher}};
    const std::uint32_t* mask_ = nullptr;  // for the next token, once computed; owned by llguidance
};

}  // namespace

constraint_vocabulary::constraint_vocabulary(const std::string& library_path, const model& source)
    : library_(library_path), n_vocab_(static_cast<std::uint32_t>(source.n_vocab())) {
    const llama_vocab* const vocab = source.vocab();
    std::vector<std::uint32_t> lengths;
    std::vector<std::uint32_t> ends;
    std::string bytes;
    lengths.reserve(n_vocab_);
    is_end_.resize(n_vocab_);
    for (token_id id = 0; source.has_vocab() && id < source.n_vocab(); ++id) {
        const std::size_t start = bytes.size();
        const int special = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN;
        const bool is_end = llama_vocab_is_eog(vocab, id);
        if (is_end || (llama_vocab_get_attr(vocab, id) & special) != 0) bytes += special_mark;
        bytes += source.token_bytes(id);
        lengths.push_back(static_cast<std::uint32_t>(bytes.size() - start));
        is_end_[static_cast<std::size_t>(id)] = is_end;
        if (is_end) ends.push_back(static_cast<std::uint32_t>(id));
    }
    if (ends.empty()) {
        throw error(errc::invalid_sampling,
                    "json_schema, regex and %llguidance need a token that ends the text, and this "
                    "model has "
                    "none; use a grammar in GBNF");
    }
    llg_tokenizer_init init{};
    init.struct_size = sizeof init;
    init.vocab_size = n_vocab_;
    init.tok_eos = ends.front();
    init.tok_eos_extra = ends.data() + 1;
    init.tok_eos_extra_count = static_cast<std::uint32_t>(ends.size() - 1);
    init.token_lens = lengths.data();
    init.token_bytes = reinterpret_cast<const std::uint8_t*>(bytes.data());
    // The tokenizer would only be used to force tokens; here the model chooses each one.
    init.use_approximate_greedy_tokenize_fn = true;
    char message[512] = "";
    handle_ = library_.new_tokenizer_v2(&init, message, sizeof message);
    if (!handle_) {
        throw error(errc::invalid_sampling, "llguidance cannot use this model's vocabulary: " +
                                                one_line(message) + "; use grammar");
    }
}

std::shared_ptr<const constraint_vocabulary> read_constraint_vocabulary(
    const std::string& library_path, const model& source) {
    return std::make_shared<const constraint_vocabulary>(library_path, source);
}

std::unique_ptr<token_filter> make_constraint(
    std::shared_ptr<const constraint_vocabulary> vocabulary, const std::string& kind,
    const std::string& text) {
    const std::string option = option_of(kind);
    if (text.size() > n_bytes_max) {
        throw error(errc::invalid_sampling, option + " has " + std::to_string(text.size()) +
                                                " bytes, the limit is " +
                                                std::to_string(n_bytes_max) + "; shorten it");
    }
    if (text.find('\0') != std::string::npos) {
        throw error(errc::invalid_sampling, option + " contains a zero byte; leave it out");
    }
    auto made = std::make_unique<constraint>(std::move(vocabulary), kind, text);
    if (made->matches_nothing()) {
        throw error(errc::invalid_sampling, option + " matches no output; correct it");
    }
    return made;
}

}  // namespace kqview
