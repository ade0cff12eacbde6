// Checks GBNF text before llama.cpp sees it. llama.cpp's own parser prints errors to stderr without
// a place, and runs without end, overflows the stack or aborts on grammars that this refuses.
// Threads: any. Never: keeps state, or touches llama.cpp.
#pragma once

#include <string_view>

namespace kqview {

// Raises invalid_sampling, with line and column for a syntax error, for text that is not GBNF, a
// rule that is missing ("root" among them) or can never end, left recursion that grows without
// end, and grammars too large or too ambiguous to match in bounded time.
void check_grammar(std::string_view text);

}  // namespace kqview
