// Which of the tokens in a cache a prompt can take over: pure functions over ids.
#pragma once

#include <cstddef>
#include <vector>

#include "base/ids.h"

namespace kqview {

// Runs of cached tokens, in order and apart, that are the beginning of a prompt once everything
// between and behind them is gone.
struct reuse_plan {
    std::vector<token_range> runs;

    std::size_t n_kept() const;
    // Tokens that keep their places.
    std::size_t n_prefix() const;
};

// The common prefix alone.
reuse_plan plan_prefix(const std::vector<token_id>& cached, const std::vector<token_id>& prompt);

// As many of the prompt's first tokens as the cache has in this order: what both begin with, then
// runs of `n_run_min` tokens or more, of which those count that repeat the end of the beginning;
// shorter ones are coincidences. No other choice of runs keeps more, except in texts that repeat
// themselves more than 32 times over a run. Takes O(n log n) for n tokens.
reuse_plan plan_shift(const std::vector<token_id>& cached, const std::vector<token_id>& prompt,
                      std::size_t n_run_min);

// Keeps the first `n_kept` tokens of a plan.
void cut(reuse_plan& plan, std::size_t n_kept);

// What has to go of `n_cached` tokens.
std::vector<token_range> gaps_of(const reuse_plan& plan, std::size_t n_cached);

}  // namespace kqview
