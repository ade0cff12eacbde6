// Reads GBNF text into the rules that llama.cpp would build of it. llama.cpp's own parser prints
// errors to stderr without a place, and runs without end, overflows the stack or aborts on grammars
// that this refuses.
// Threads: any. Never: keeps state.
#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "base/ids.h"
#include "sample/grammar_rules.h"

namespace kqview {

// The one token that a <text>, brackets included, is of the vocabulary; none when it is no token or
// several.
using token_finder = std::function<std::optional<token_id>(std::string_view)>;

// Raises invalid_sampling, with line and column for a syntax error, for text that is not GBNF, what
// grammar_rules::finish() refuses, grammars too large, and when `limit` is spent.
grammar read_grammar(std::string_view text, const token_finder& find_token, work_limit& limit);

}  // namespace kqview
