// Finds the largest of a row of logits without sorting the vocabulary or building candidates.
// Owns:    scratch buffers, kept from token to token; the logits belong to the caller.
// Threads: engine thread only.
// Never:   changes the logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace kqview {

struct scored_token {
    token_id id;
    float logit;
};

class logit_scan {
public:
    // Takes the maximum of every block of the n logits, which must outlive the calls below.
    // Raises decode when a logit is NaN or +inf.
    void read(const float* logits, std::int32_t n);

    float max() const { return max_; }

    // Lowest id among the largest; every logit -inf gives 0.
    token_id argmax() const;

    // The k largest above -inf into `out`, best first, of equal ones the lowest id first.
    void top(std::int32_t k, std::vector<scored_token>& out);

private:
    const float* logits_ = nullptr;
    std::size_t n_ = 0;
    float max_ = 0.0F;
    std::vector<float> block_max_;
    std::vector<float> ranked_;  // block_max_, partially ordered by top()
};

}  // namespace kqview
