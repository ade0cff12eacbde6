// The interface that decides which tokens may come next, for a grammar, a JSON schema or a regular
// expression, and the factory for a request's filter.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "sample/work_limit.h"

namespace kqview {

class constraint_host;
class model;
class token_texts;
struct sampling_params;

// Threads: one at a time, but not always the same one.
class token_filter {
public:
    virtual ~token_filter() = default;

    // All raise invalid_sampling when `limit`, or one of the filter's own limits, is exhausted.

    // About this many calls of allows() follow before the next accept().
    virtual void prepare(std::size_t n_calls, work_limit& limit) = 0;
    virtual bool allows(token_id id, work_limit& limit) = 0;
    // The token to take where this one was chosen, which is allowed: itself, or else the one that
    // begins to end the output, while there are tokens for that.
    virtual token_id settle(token_id id, work_limit& /*limit*/) { return id; }
    // Advances by this token, which must be allowed.
    virtual void accept(token_id id, work_limit& limit) = 0;
    // Back to where nothing had been accepted.
    virtual void restart() = 0;
};

// Creates filters, and caches what all filters of a model share. Threads: any.
class token_filters {
public:
    // CPU time limit for reading a grammar.
    static constexpr double read_limit_s = 2.0;

    explicit token_filters(std::shared_ptr<const model> source) : source_(std::move(source)) {}

    // Null if `params` ask for no filter. `constraint_command` runs the helper process for JSON
    // schemas and regular expressions, whose start ends early when `unwanted` is set. The output
    // gets at most `n_tokens`. Raises invalid_sampling, and what constraint_host raises.
    std::unique_ptr<token_filter> make(const sampling_params& params,
                                       const std::vector<std::string>& constraint_command,
                                       const stop_flag& unwanted, int n_tokens);
    // Makes no more constraints; the helper process ends with the last of them.
    void close();

private:
    std::unique_ptr<token_filter> make_grammar(const std::string& text);

    const std::shared_ptr<const model> source_;
    std::mutex mutex_;  // held while one of these is built, up to a second
    std::shared_ptr<const token_texts> texts_;
    std::shared_ptr<constraint_host> constraints_;
    bool is_closed_ = false;
};

}  // namespace kqview
