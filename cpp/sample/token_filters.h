// Makes the token filter that a request asks for, and keeps what all filters of a model share.
// Threads: any.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "llama/model.h"
#include "sample/constraint.h"
#include "sample/grammar_filter.h"
#include "sample/params.h"

namespace kqview {

class token_filters {
public:
    // CPU time that reading a grammar may take.
    static constexpr double read_limit_s = 2.0;

    explicit token_filters(std::shared_ptr<const model> source) : source_(std::move(source)) {}

    // Null where `params` ask for none. `llguidance_path` is for a constraint. Raises
    // invalid_sampling, and what constraint_vocabulary raises.
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
