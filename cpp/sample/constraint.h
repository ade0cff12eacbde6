// Constrains output to a JSON schema or a regular expression, by llguidance, in a process of its
// own (sample/constraint_host.h). Masks are computed without Python's GIL, while the engine
// computes the token that they are for.
#pragma once

#include <memory>
#include <string>

#include "sample/constraint_host.h"
#include "sample/token_filter.h"
#include "sample/work_limit.h"

namespace kqview {

// `kind` is "json_schema", "regex" or "lark". Raises invalid_sampling if the text is invalid, too
// costly, or no output can match it, or when `unwanted` is set; and what constraint_host::open
// raises. The output is ended within `n_closed` tokens if that is possible; 0: it may be cut off.
std::unique_ptr<token_filter> make_constraint(std::shared_ptr<constraint_host> host,
                                              const std::string& kind, const std::string& text,
                                              const stop_flag& unwanted, int n_closed);

}  // namespace kqview
