// grammar_filter against llama.cpp's own matcher: random grammars, random vocabularies with broken
// UTF-8, random outputs. After each token both have to allow the same ones. llama.cpp's file is
// compiled as it is; only the vocabulary that it asks is ours.
#include <doctest/doctest.h>
#include <llama-grammar.h>
#include <llama-vocab.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "sample/grammar.h"
#include "sample/grammar_filter.h"

namespace {

std::vector<std::string> texts;    // of the vocabulary in use
constexpr llama_token n_ends = 2;  // its first tokens end the text

}  // namespace

// ---- what llama-grammar.cpp needs of the rest of llama.cpp

struct llama_vocab::impl {};
llama_vocab::llama_vocab() = default;
llama_vocab::~llama_vocab() = default;
const std::string& llama_vocab::token_to_piece(llama_token token) const {
    return texts[static_cast<std::size_t>(token)];
}
bool llama_vocab::is_eog(llama_token id) const { return id < n_ends; }
std::int32_t llama_vocab::tokenize(const char* /*text*/, std::int32_t /*n*/, llama_token* tokens,
                                   std::int32_t /*n_max*/, bool /*special*/, bool /*parse*/) const {
    tokens[0] = n_ends;  // any <name> is this token
    return 1;
}
extern "C" void ggml_abort(const char* file, int line, const char* /*format*/, ...) {
    std::printf("llama.cpp aborted: %s:%d\n", file, line);
    std::abort();
}
void llama_log_internal(ggml_log_level /*level*/, const char* /*format*/, ...) {}

namespace kqview {
namespace {

class choices {
public:
    explicit choices(std::uint32_t seed) : engine_(seed) {}
    int below(int n) { return static_cast<int>(engine_() % static_cast<std::uint32_t>(n)); }
    bool chance(int percent) { return below(100) < percent; }
    template <class value>
    const value& of(const std::vector<value>& all) {
        return all[static_cast<std::size_t>(below(static_cast<int>(all.size())))];
    }

private:
    std::mt19937 engine_;
};

const std::vector<std::string> characters = {"a", "b", "c", " ", "é", "è", "日", "木", "😀"};

std::vector<std::string> make_vocabulary(choices& random) {
    std::vector<std::string> made = {"</s>", "a", "", std::string("\0a", 2),
                                     std::string("b\0c", 3)};
    for (const std::string& whole : characters) {
        made.push_back(whole);
        for (std::size_t n = 1; n < whole.size(); ++n) {
            made.push_back(whole.substr(0, n));
            made.push_back(whole.substr(n));
        }
    }
    for (const char* odd : {"\xff", "\xf8", "a\x80", "\x80", "\xc3\x41", "a\xc3", "é\xe6"}) {
        made.emplace_back(odd);
    }
    for (int i = 0; i < 40; ++i) {
        std::string text;
        for (int n = 1 + random.below(3); n > 0; --n) text += random.of(characters);
        if (random.chance(20)) text.resize(text.size() - 1);
        if (random.chance(10)) text.erase(0, 1);
        made.push_back(text);
    }
    return made;
}

// Writes GBNF.
class grammar_writer {
public:
    explicit grammar_writer(choices& random) : random_(random) {}

    std::string write() {
        const int n_rules = 1 + random_.below(4);
        names_.assign(1, "root");
        for (int i = 1; i < n_rules; ++i) names_.push_back("r" + std::to_string(i));
        std::string text;
        for (const std::string& name : names_) text += name + " ::= " + alternates(2) + "\n";
        return text;
    }

private:
    std::string alternates(int depth) {
        std::string text = sequence(depth);
        for (int n = random_.below(3); n > 0; --n) text += " | " + sequence(depth);
        return text;
    }
    std::string sequence(int depth) {
        std::string text = random_.chance(8) ? "\"\"" : "";
        for (int n = random_.below(4); n > 0; --n) text += " " + part(depth) + repetition();
        return text;
    }
    std::string repetition() {
        if (random_.chance(70)) return "";
        static const std::vector<std::string> signs = {"*",     "+",    "?",     "{2}",
                                                       "{0,2}", "{1,}", "{1,3}", "{0}"};
        return random_.of(signs);
    }
    std::string character() {
        if (random_.chance(10)) return random_.chance(50) ? "\\x61" : "\\u00e9";
        return random_.of(characters);
    }
    std::string part(int depth) {
        const int kind = random_.below(100);
        if (kind < 35) {
            std::string text = "\"";
            for (int n = 1 + random_.below(3); n > 0; --n) text += character();
            return text + "\"";
        }
        if (kind < 55) {
            std::string text = random_.chance(40) ? "[^" : "[";
            for (int n = 1 + random_.below(2); n > 0; --n) {
                text += character();
                if (random_.chance(40)) text += "-" + character();
            }
            return text + "]";
        }
        if (kind < 62) return ".";
        if (kind < 70) {
            const std::string id = std::to_string(random_.below(static_cast<int>(texts.size())));
            return (random_.chance(40) ? "!<[" : "<[") + id + "]>";
        }
        if (kind < 72) return "<name>";
        if (kind < 85 && depth > 0) return "(" + alternates(depth - 1) + ")";
        return random_.of(names_);
    }

    choices& random_;
    std::vector<std::string> names_;
};

bool ends_partially(const std::string& text) {
    for (std::size_t n = 1; n < 4 && n <= text.size(); ++n) {
        const auto byte = static_cast<unsigned char>(text[text.size() - n]);
        if (byte >= 0xC0) return n < (byte < 0xE0 ? 2U : byte < 0xF0 ? 3U : 4U);
    }
    return false;
}

struct peer_deleter {
    void operator()(llama_grammar* handle) const { llama_grammar_free_impl(handle); }
};
using peer_grammar = std::unique_ptr<llama_grammar, peer_deleter>;

// Null where the peer refuses the text.
peer_grammar make_peer(const llama_vocab& vocab, const std::string& text) {
    return peer_grammar(
        llama_grammar_init_impl(&vocab, text.c_str(), "root", false, nullptr, 0, nullptr, 0));
}

// What the peer allows and then accepts.
std::vector<bool> allowed_by_peer(const llama_grammar& peer) {
    std::vector<llama_token_data> candidates;
    for (llama_token id = 0; id < static_cast<llama_token>(texts.size()); ++id) {
        candidates.push_back({id, 0.0F, 0.0F});
    }
    llama_token_data_array array{candidates.data(), candidates.size(), -1, false};
    llama_grammar_apply_impl(peer, &array);
    std::vector<bool> allowed;
    for (const auto& [id, logit, p] : candidates) {
        bool is_allowed = logit == 0.0F;
        if (is_allowed && id >= n_ends) {
            try {
                const peer_grammar copy(llama_grammar_clone_impl(peer));
                llama_grammar_accept_impl(*copy, id);
            } catch (const std::runtime_error&) {
                is_allowed = false;
            }
        }
        allowed.push_back(is_allowed);
    }
    return allowed;
}

}  // namespace
}  // namespace kqview

using namespace kqview;

TEST_CASE("grammar_filter: allows what llama.cpp's matcher allows and accepts") {
    const char* const asked = std::getenv("KQVIEW_GRAMMARS");
    const int n_grammars = asked ? std::atoi(asked) : 600;
    const llama_vocab vocab;
    int n_compared = 0;
    int n_accepted = 0;
    for (int seed = 0; n_accepted < n_grammars; ++seed) {
        choices random(static_cast<std::uint32_t>(seed));
        texts = make_vocabulary(random);
        std::vector<bool> is_end(texts.size());
        is_end[0] = is_end[1] = true;
        const std::string text = grammar_writer(random).write();
        CAPTURE(seed);
        CAPTURE(text);
        work_limit limit("generate: grammar", 60);
        limit.restart();
        std::shared_ptr<const grammar> rules;
        try {
            rules = std::make_shared<const grammar>(
                read_grammar(text, [](auto) { return token_id{n_ends}; }, limit));
        } catch (const error& refusal) {
            const std::string why = refusal.what();
            // On these the peer does not come to an end, or overflows the stack.
            const bool is_stricter = why.find("never ends") != std::string::npos ||
                                     why.find("left-recursive") != std::string::npos;
            CHECK_MESSAGE((is_stricter || !make_peer(vocab, text)), why);
            continue;
        }
        const peer_grammar peer = make_peer(vocab, text);
        if (!peer) continue;  // it refuses every rule that can begin with itself
        ++n_accepted;
        const bool has_tokens = text.find('<') != std::string::npos;
        const auto vocabulary = std::make_shared<const token_texts>(texts, is_end);
        grammar_filter by_mask(vocabulary, rules, limit);
        grammar_filter one_by_one(vocabulary, rules, limit);
        for (int n_tokens = 0; n_tokens < 8; ++n_tokens) {
            if (llama_grammar_get_stacks(peer.get()).size() > 30) break;  // it may not end
            const auto expected = allowed_by_peer(*peer);
            by_mask.prepare(texts.size(), limit);
            std::vector<token_id> next;
            for (token_id id = 0; id < static_cast<token_id>(texts.size()); ++id) {
                const bool is_expected = expected[static_cast<std::size_t>(id)];
                const std::string& token = texts[static_cast<std::size_t>(id)];
                CAPTURE(id);
                CAPTURE(token);
                CAPTURE(n_tokens);
                // The peer lets a <token> match the end of a token that began as text, and then
                // does not look whether the last, partial character can be completed.
                if (is_expected && has_tokens && ends_partially(token)) continue;
                REQUIRE(by_mask.allows(id, limit) == is_expected);
                REQUIRE(one_by_one.allows(id, limit) == is_expected);
                ++n_compared;
                if (is_expected && id >= n_ends) next.push_back(id);
            }
            if (next.empty()) break;
            const token_id id = random.of(next);
            llama_grammar_accept_impl(*peer, id);
            by_mask.accept(id, limit);
            one_by_one.accept(id, limit);
        }
    }
    CHECK(n_compared > 100 * n_grammars);
    MESSAGE(n_accepted << " grammars, " << n_compared << " answers compared");
}
