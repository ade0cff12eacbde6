#include "sample/token_filter.h"
#include <llama.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "llama/model.h"
#include "sample/constraint.h"
#include "sample/grammar.h"
#include "sample/grammar_filter.h"
#include "sample/params.h"

namespace kqview {
namespace {

// The first line of a grammar in llguidance's own language, as llama.cpp tells it from GBNF too.
constexpr std::string_view lark_mark = "%llguidance";

std::shared_ptr<const token_texts> read_texts(const model& source) {
    std::vector<std::string> texts;
    std::vector<bool> is_end;
    texts.reserve(static_cast<std::size_t>(source.n_vocab()));
    for (token_id id = 0; id < source.n_vocab(); ++id) {
        texts.push_back(source.token_bytes(id));
        is_end.push_back(llama_vocab_is_eog(source.vocab(), id));
    }
    return std::make_shared<const token_texts>(texts, std::move(is_end));
}

}  // namespace

std::unique_ptr<token_filter> token_filters::make(
    const sampling_params& params, const std::vector<std::string>& constraint_command,
    const stop_flag& unwanted, int n_tokens) {
    const bool is_lark = params.grammar && params.grammar->starts_with(lark_mark);
    const bool closes = params.finish_on_length == "close";
    if (closes && !is_lark && !params.json_schema && !params.regex) {
        throw error(errc::invalid_sampling,
                    "finish_on_length is \"close\", which ends what a json_schema, a regex or a "
                    "grammar after %llguidance describes; give one of them, or leave it out");
    }
    const int n_closed = closes ? n_tokens : 0;
    if (!is_lark && params.grammar && !params.grammar->empty()) {
        return make_grammar(*params.grammar);
    }
    if (!is_lark && !params.json_schema && !params.regex) return nullptr;
    std::shared_ptr<constraint_host> host;
    {
        const std::lock_guard lock(mutex_);
        if (is_closed_) throw error(errc::closed, "the engine is closed; make a new Engine");
        if (!constraints_ || constraints_->command() != constraint_command) {
            constraints_ = std::make_shared<constraint_host>(constraint_command, source_);
        }
        host = constraints_;
    }
    const char* const kind = is_lark ? "lark" : params.json_schema ? "json_schema" : "regex";
    const auto& text = is_lark              ? params.grammar
                       : params.json_schema ? params.json_schema
                                            : params.regex;
    return make_constraint(std::move(host), kind, *text, unwanted, n_closed);
}

void token_filters::close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    constraints_.reset();
}

std::unique_ptr<token_filter> token_filters::make_grammar(const std::string& text) {
    if (!source_->has_vocab()) {
        throw error(errc::invalid_sampling,
                    "grammar needs a vocabulary, and this model has none; leave it out");
    }
    work_limit limit("grammar", read_limit_s);
    limit.restart();
    const auto find_token = [this](std::string_view name) -> std::optional<token_id> {
        const auto ids = source_->words().tokenize(name, false, true);
        if (ids.size() != 1) return std::nullopt;
        return ids.front();
    };
    auto rules = std::make_shared<const grammar>(read_grammar(text, find_token, limit));
    std::shared_ptr<const token_texts> texts;
    {
        const std::lock_guard lock(mutex_);
        if (!texts_) texts_ = read_texts(*source_);
        texts = texts_;
    }
    return std::make_unique<grammar_filter>(std::move(texts), std::move(rules), limit);
}

}  // namespace kqview
