// Log-probabilities of the model's own distribution: log-softmax of the raw logits, before bias,
// penalties, temperature and grammar, so they say what the model thought, not what was allowed.
// Threads: engine thread only.
// Never:   changes the logits.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "sample/select.h"

namespace kqview {

// log(sum(exp(x))) of n finite or -inf logits whose largest is `max`. Relative error of the sum
// below 1e-6: exponentials in float32, summed in blocks into a double.
double log_sum_exp(const float* logits, std::int32_t n, float max);

class logprob_scan {
public:
    // Reads the raw logits and remembers the n_top best. Raises decode on NaN or +inf.
    void read(const float* logits, std::int32_t n, std::int32_t n_top);

    // Of a token whose raw logit is given; -inf stays -inf.
    float of(float logit) const {
        return static_cast<float>(static_cast<double>(logit) - log_sum_);
    }
    // Best first, of equal ones the lowest id first; fewer than n_top when others are -inf.
    std::vector<std::pair<token_id, float>> top() const;

private:
    logit_scan scan_;
    std::vector<scored_token> top_;
    double log_sum_ = 0.0;
};

}  // namespace kqview
