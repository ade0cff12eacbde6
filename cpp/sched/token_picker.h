// What chooses the tokens of one request. Made and fed the prompt on the thread that submits the
// request, because that can take long (a grammar, DRY); then used by the engine thread, or by its
// sampler lane where picking can take long too.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace kqview {

struct picked_token {
    token_id id;
    float logprob;
    std::vector<std::pair<token_id, float>> top;
};

class token_picker {
public:
    virtual ~token_picker() = default;
    // F32 ne=[n_vocab]; may be changed in place.
    virtual picked_token pick(float* logits) = 0;

    // Can pick() keep the engine thread from other requests' tokens?
    virtual bool is_slow() const { return false; }
    // Any thread: a running pick(), and every later one, ends soon, with a token or an error that
    // nobody sees.
    virtual void stop() noexcept {}
};

}  // namespace kqview
