#include "sample/constraint.h"

#include <algorithm>
#include <utility>

#include <llama.h>

#include "base/error.h"

namespace kqview {
namespace {

constexpr std::size_t n_bytes_max = std::size_t{1} << 20;
constexpr std::size_t n_message_max = 300;
// llguidance's mark of a special token: no text matches it.
constexpr char special_mark = '\xff';

// llguidance explains over several lines, with the whole grammar at the end. Cut between
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

class constraint final : public token_filter {
public:
    constraint(std::shared_ptr<const constraint_vocabulary> vocabulary, const std::string& kind,
               const std::string& text)
        : vocabulary_(std::move(vocabulary)), library_(vocabulary_->library()), kind_(kind) {
        llg_matcher_init init{};
        library_.constraint_init_set_defaults(&init, vocabulary_->get());
        init.log_buffer_level = 0;
        init.log_stderr_level = 0;
        handle_.reset(library_.new_matcher(&init, kind.c_str(), text.c_str()));
        if (const char* const message = library_.matcher_get_error(handle_.get())) {
            throw error(errc::invalid_sampling, "" + kind + " is refused by llguidance: " +
                                                    one_line(message) + "; correct it");
        }
    }

    // Null when llguidance has an error to tell.
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

    // llguidance keeps to limits of its own, and cannot be interrupted within them.
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
        // After an end nothing follows, and llguidance takes none where it must come.
        if (vocabulary_->is_end(id)) return;
        const auto token = static_cast<std::uint32_t>(id);
        if (library_.matcher_consume_token(handle_.get(), token) != 0) raise();
        limit.check();
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
    const std::uint32_t* mask_ = nullptr;  // of the next token, once computed; llguidance's own
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
                    "json_schema or regex is given, the model has no token that ends a "
                    "text and could not stop; use another model, or grammar");
    }
    llg_tokenizer_init init{};
    init.struct_size = sizeof init;
    init.vocab_size = n_vocab_;
    init.tok_eos = ends.front();
    init.tok_eos_extra = ends.data() + 1;
    init.tok_eos_extra_count = static_cast<std::uint32_t>(ends.size() - 1);
    init.token_lens = lengths.data();
    init.token_bytes = reinterpret_cast<const std::uint8_t*>(bytes.data());
    // The tokenizer would only serve to force tokens; here the model chooses each one.
    init.use_approximate_greedy_tokenize_fn = true;
    char message[512] = "";
    handle_ = library_.new_tokenizer_v2(&init, message, sizeof message);
    if (!handle_) {
        throw error(errc::invalid_sampling, "llguidance cannot use this model's vocabulary: " +
                                                one_line(message) + "; use grammar");
    }
}

constraint_vocabulary::~constraint_vocabulary() { library_.free_tokenizer(handle_); }

std::unique_ptr<token_filter> make_constraint(
    std::shared_ptr<const constraint_vocabulary> vocabulary, const std::string& kind,
    const std::string& text) {
    if (text.size() > n_bytes_max || text.find('\0') != std::string::npos) {
        throw error(errc::invalid_sampling, "" + kind + " has " + std::to_string(text.size()) +
                                                " bytes, up to " + std::to_string(n_bytes_max) +
                                                " without a zero byte are allowed; correct it");
    }
    auto made = std::make_unique<constraint>(std::move(vocabulary), kind, text);
    if (made->matches_nothing()) {
        throw error(errc::invalid_sampling,
                    "" + kind + " matches no output, some is needed; correct it");
    }
    return made;
}

}  // namespace kqview
