// Output that follows a JSON schema or a regular expression, by llguidance: a library that the
// Python package of that name brings, whose C interface is looked up at run time. So nothing is
// linked, and masks are computed without Python.
#pragma once

#include <memory>
#include <string>

#include "llama/model.h"
#include "sample/token_filter.h"

namespace kqview {

// A model's tokens in llguidance's form: a trie that takes up to a second to build, once an engine.
// Immutable; any thread. Raises request for an unusable library, invalid_sampling for a model that
// constraints cannot work with: without a vocabulary, or without a token that ends the text.
std::shared_ptr<const constraint_vocabulary> read_constraint_vocabulary(
    const std::string& library_path, const model& source);

// `kind` is "json_schema" or "regex". Raises invalid_sampling for text that is none, or that no
// output can match.
std::unique_ptr<token_filter> make_constraint(
    std::shared_ptr<const constraint_vocabulary> vocabulary, const std::string& kind,
    const std::string& text);

}  // namespace kqview
