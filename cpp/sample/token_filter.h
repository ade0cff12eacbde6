// Which tokens may come next: the interface of a grammar, a JSON schema or a regular expression,
// and what makes the filter that a request asks for.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/ids.h"
#include "sample/work_limit.h"

namespace kqview {

class constraint_vocabulary;
class model;
class token_texts;
struct sampling_params;

// Threads: one at a time, not always the same.
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

// Makes filters, and keeps what all filters of a model share. Threads: any.
class token_filters {
public:
    // CPU time that reading a grammar may take.
    static constexpr double read_limit_s = 2.0;

    explicit token_filters(std::shared_ptr<const model> source) : source_(std::move(source)) {}

    // Null if `params` ask for none. `llguidance_path`: the library for JSON schemas and
    // expressions. Raises invalid_sampling, and what constraint_vocabulary raises.
    std::unique_ptr<token_filter> make(const sampling_params& params,
                                       const std::string& llguidance_path);

private:
    std::unique_ptr<token_filter> make_grammar(const std::string& text);

    const std::shared_ptr<const model> source_;
    std::mutex mutex_;  // held while one of these is built, which takes up to a second
    std::shared_ptr<const token_texts> texts_;
    std::shared_ptr<const constraint_vocabulary> constraints_;
};

}  // namespace kqview
