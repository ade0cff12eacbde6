// The integer ids that all layers share, and tokens by their places.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kqview {

using token_id = std::int32_t;    // index into the vocabulary
using slot_id = std::int32_t;     // index of a slot, also llama.cpp's sequence id
using request_id = std::int64_t;  // counts up from 1 in each engine

// Tokens start .. start + n_tokens of a sequence.
struct token_range {
    std::size_t start;
    std::size_t n_tokens;
};

// Scales of the LoRA adapters of a model, one each; none for a model without adapters.
using lora_scales = std::vector<float>;

struct edit_plan;  // tap/edits.h

// A token of a step. Its slot has `position` tokens before it.
struct step_token {
    slot_id slot;
    token_id id;
    std::int32_t position;
    bool wants_logits;
    const edit_plan* edits = nullptr;  // of its request; alive for the step
};

// How many tokens both begin with.
inline std::size_t common_prefix(const std::vector<token_id>& a, const std::vector<token_id>& b) {
    const auto end = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    return static_cast<std::size_t>(end.first - a.begin());
}

}  // namespace kqview
