// Finds the cached tokens that a prompt can reuse: pure functions over ids.
#pragma once

#include <cstddef>
#include <vector>

#include "base/ids.h"

namespace kqview {

// Runs of cached tokens, ascending and disjoint. They form the beginning of a prompt once all
// tokens between and after them are removed.
struct reuse_plan {
    std::vector<token_range> runs;

    std::size_t n_kept() const;
    // Number of tokens that keep their positions.
    std::size_t n_prefix() const;
};

// The common prefix alone.
reuse_plan plan_prefix(const std::vector<token_id>& cached, const std::vector<token_id>& prompt);

// As many of the prompt's first tokens as the cache holds in this order: the common prefix, then
// runs of at least `n_run_min` tokens; shorter matches are coincidences. A run's length may include
// a repetition of the end of the prefix. No other choice of runs keeps more tokens, except in texts
// that repeat a run more than 32 times. Takes O(n log n) for n tokens.
reuse_plan plan_shift(const std::vector<token_id>& cached, const std::vector<token_id>& prompt,
                      std::size_t n_run_min);

// Keeps the first `n_kept` tokens of a plan.
void cut(reuse_plan& plan, std::size_t n_kept);

// The ranges of `n_cached` tokens to remove.
std::vector<token_range> gaps_of(const reuse_plan& plan, std::size_t n_cached);

}  // namespace kqview
