// Reads a whole row of logits: its largest values, without sorting the vocabulary or building
// candidates, and log-probabilities.
// Owner:   owns scratch buffers, kept from token to token; the logits belong to the caller.
// Threads: one at a time.
// Never:   changes the logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace kqview {

struct scored_token {
    token_id id;
    float logit;
};

// How the model judged one token of a given text.
struct token_score {
    float logprob;
    std::int32_t rank;  // number of tokens that the model preferred, as in logit_scan::rank
    std::vector<std::pair<token_id, float>> top;  // the best tokens with their logprobs
};

class logit_scan {
public:
    // Finds the maximum of each block of the n logits, which must outlive the calls below. Raises
    // decode if a logit is NaN or +inf.
    void read(const float* logits, std::int32_t n);

    float max() const { return max_; }

    // The id of the largest logit, the lowest among equals; 0 if all are -inf.
    token_id argmax() const;

    // Position of a token among all, best first, the lowest id first among equals: 0 for argmax().
    std::int32_t rank(token_id id) const;

    // Writes the k largest logits above -inf to `out`, best first, the lowest id first among
    // equals.
    void top(std::int32_t k, std::vector<scored_token>& out);

private:
    const float* logits_ = nullptr;
    std::size_t n_ = 0;
    float max_ = 0.0F;
    std::vector<float> block_max_;
    std::vector<float> ranked_;  // block_max_, partially ordered by top()
};

// Log-probabilities of the model's own distribution: log-softmax of the raw logits, before bias,
// penalties, temperature and grammar. They show what the model predicted, not what was allowed.
class logprob_scan {
public:
    // Reads the raw logits and keeps the n_top best. Raises decode on NaN or +inf.
    void read(const float* logits, std::int32_t n, std::int32_t n_top);

    // The score of token `id`, which must be in the vocabulary, after read().
    token_score score(const float* logits, token_id id) const {
        return {of(logits[id]), scan_.rank(id), top()};
    }

    // Log-probability of a token with this raw logit; -inf stays -inf.
    float of(float logit) const {
        return static_cast<float>(static_cast<double>(logit) - log_sum_);
    }
    // Of the whole distribution, in nats.
    double entropy() const { return entropy_; }
    // Best first, the lowest id first among equals; fewer than n_top if the others are -inf.
    std::vector<std::pair<token_id, float>> top() const;

private:
    logit_scan scan_;
    std::vector<scored_token> top_;
    double log_sum_ = 0.0;
    double entropy_ = 0.0;
};

}  // namespace kqview
