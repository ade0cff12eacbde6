// Output that follows a JSON schema or a regular expression, by llguidance.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/ids.h"
#include "llama/model.h"
#include "sample/llguidance.h"
#include "sample/token_filter.h"

namespace kqview {

// A model's tokens in llguidance's form: a trie that takes up to a second to build, once an engine.
// Threads: any; immutable.
class constraint_vocabulary {
public:
    // Raises request for an unusable library, invalid_sampling for a model that constraints cannot
    // work with: without a vocabulary, or without a token that ends the text.
    constraint_vocabulary(const std::string& library_path, const model& source);
    ~constraint_vocabulary();
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

// `kind` is "json_schema" or "regex". Raises invalid_sampling for text that is none, or that no
// output can match.
std::unique_ptr<token_filter> make_constraint(
    std::shared_ptr<const constraint_vocabulary> vocabulary, const std::string& kind,
    const std::string& text);

}  // namespace kqview
