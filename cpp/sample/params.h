// The sampling options of one request, as plain values, and the check of their ranges.
// Never: touches llama.cpp. What passes check() reaches no assertion of its samplers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace kqview {

struct sampling_params {
    float temperature = 0.8F;  // 0 = greedy
    std::int32_t top_k = 40;   // 0 or less = off
    float top_p = 0.95F;       // 1 = off
    float min_p = 0.05F;       // 0 = off
    float typical_p = 1.0F;    // 1 = off

    float repeat_penalty = 1.0F;      // 1 = off
    std::int32_t repeat_last_n = 64;  // 0 = off, -1 = the model's context
    float presence_penalty = 0.0F;
    float frequency_penalty = 0.0F;

    float dry_multiplier = 0.0F;  // 0 = off
    float dry_base = 1.75F;
    std::int32_t dry_allowed_length = 2;
    std::int32_t dry_penalty_last_n = 64;  // 0 = off, -1 = the model's context
    std::vector<std::string> dry_sequence_breakers = {"\n", ":", "\"", "*"};

    float xtc_probability = 0.0F;  // 0 = off
    float xtc_threshold = 0.1F;    // above 0.5 = off

    std::int32_t mirostat = 0;  // 0 = off, 1 or 2 = replaces every truncation above
    float mirostat_tau = 5.0F;
    float mirostat_eta = 0.1F;

    std::optional<std::uint32_t> seed;  // none = random

    std::vector<std::pair<token_id, float>> logit_bias;  // -inf bans
    std::vector<token_id> banned_tokens;
    bool ignore_eos = false;  // bans every end-of-generation token
    std::string grammar;      // GBNF with the rule "root"; empty = none

    // What llguidance enforces instead of a grammar: "json_schema" or "regex" and its text.
    std::string constraint_kind;  // empty = none
    std::string constraint;

    // -1 = no logprobs, 0 = that of the chosen token, k = also of the k most probable ones.
    std::int32_t n_logprobs = -1;
};

// Raises invalid_sampling for a value out of range, invalid_token for an id outside the vocabulary.
// The grammar's text is checked when the filter is made.
void check(const sampling_params& params, std::int32_t n_vocab);

}  // namespace kqview
