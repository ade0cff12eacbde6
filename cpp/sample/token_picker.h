// The engine's interface to the sampler of one request. chain.h has the production implementation;
// tests inject fakes.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace kqview {

struct picked_token {
    token_id id;
    float logprob;                                // NaN when not asked for
    std::vector<std::pair<token_id, float>> top;  // logprobs, best first
};

// Chooses the tokens of one request. Created and fed the prompt on the submitting thread, because
// that can take long (a grammar, DRY); then used by the engine thread, or by its sampler lane if
// picking can take long too; or, if the request is steered, by its consumer.
class token_picker {
public:
    virtual ~token_picker() = default;
    // F32 ne=[n_vocab]; pick() may change them in place.
    virtual picked_token pick(float* logits) = 0;

    // True if the choice from these logits may have been made by rounding: it is that of the best
    // one, and another one is as good within `tolerance`, a share of what the best logit is above
    // their mean. Changes nothing.
    virtual bool is_tied(std::span<const float> /*logits*/, float /*tolerance*/) { return false; }

    // ---- of a steered request, whose consumer decides what becomes of a choice

    // As pick(), but leaves the logits as they are and accepts nothing. `temperature` is for this
    // choice alone; 0 is greedy.
    virtual picked_token propose(std::span<const float> logits,
                                 std::optional<float> temperature) = 0;
    // A backtrack: takes back the last `n_removed` ids that were accepted and accepts `ids`
    // instead. From then on it is as if those that remain had been picked. The choice proposed last
    // stands if `ids` begin with it and nothing is removed; otherwise it was never made. Raises
    // invalid_sampling, without any effect, for an id that the filter does not allow.
    virtual void revise(std::size_t n_removed, std::span<const token_id> ids) = 0;

    // True if pick() may take long enough to delay the tokens of other requests.
    virtual bool is_slow() const { return false; }
    // Any thread: a running pick() and every later one end soon, with a token or an error, which is
    // dropped.
    virtual void stop() noexcept {}
};

}  // namespace kqview
