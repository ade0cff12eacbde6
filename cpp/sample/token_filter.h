// Says which tokens may come next: a grammar, a JSON schema, a regular expression.
// Threads: one at a time, not always the same.
#pragma once

#include <cstddef>

#include "base/ids.h"
#include "sample/work_limit.h"

namespace kqview {

class token_filter {
public:
    virtual ~token_filter() = default;

    // All raise invalid_sampling when `limit` is spent, or a limit of the filter's own is.

    // About this many calls of allows() follow before the next accept().
    virtual void prepare(std::size_t n_calls, work_limit& limit) = 0;
    virtual bool allows(token_id id, work_limit& limit) = 0;
    // The token, which is allowed, comes next.
    virtual void accept(token_id id, work_limit& limit) = 0;
};

}  // namespace kqview
