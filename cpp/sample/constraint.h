// Constrains output to a JSON schema or a regular expression, by llguidance: the Python package of
// that name brings the library, whose C interface is looked up at run time. So nothing is linked,
// and masks are computed without Python.
#pragma once

#include <memory>
#include <string>

#include "llama/model.h"
#include "sample/token_filter.h"

namespace kqview {

// A model's tokens in llguidance's form: a trie that takes up to a second to build, once per
// engine. Immutable; any thread. Raises request for an unusable library, and invalid_sampling for a
// model without a vocabulary or without a token that ends the text, which constraints need.
std::shared_ptr<const constraint_vocabulary> read_constraint_vocabulary(
    const std::string& library_path, const model& source);

// `kind` is "json_schema", "regex" or "lark". Raises invalid_sampling if the text is invalid or no
// output can match it.
std::unique_ptr<token_filter> make_constraint(
    std::shared_ptr<const constraint_vocabulary> vocabulary, const std::string& kind,
    const std::string& text);

}  // namespace kqview
