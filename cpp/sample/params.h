// The sampling options of one request as plain values, the list of them, and the check of their
// ranges. kqview.Sampling (types/sampling.py) has the same options.
// Never:   touches llama.cpp. Values that pass check() never trigger an assertion in its samplers.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/ids.h"

namespace kqview {

struct sampling_params {
    float temperature = 0.8F;  // 0 = greedy
    std::int32_t top_k = 40;   // 0 = off
    float top_p = 0.95F;       // 1 = off
    float min_p = 0.05F;       // 0 = off
    float typical_p = 1.0F;    // 1 = off
    float top_n_sigma = 0.0F;  // 0 = off
    std::int32_t min_keep = 0;

    float dynatemp_range = 0.0F;  // 0 = off
    float dynatemp_exponent = 1.0F;

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

    std::map<token_id, float> logit_bias;  // -inf bans
    std::vector<token_id> banned_tokens;
    bool ignore_eos = false;               // bans every end-of-generation token
    std::int32_t min_tokens = 0;           // bans them before so many tokens
    std::vector<token_id> begin_suppress;  // banned as the first token

    // At most one of these; llguidance enforces the last two.
    // GBNF with the rule "root", or Lark for llguidance after "%llguidance"; empty = none.
    std::optional<std::string> grammar;
    std::optional<std::string> json_schema;
    std::optional<std::string> regex;
    // "cut", or "close": the output ends, as one of these allows, while there are tokens for that.
    std::string finish_on_length = "cut";

    // 0 = only the chosen token's logprob, k = also those of the k most probable tokens.
    std::optional<std::int32_t> top_logprobs;
    bool post_sampling_probs = false;  // they are those of the last candidates, not of the model
};

// The allowed range of a number, within the limits of its type.
struct number_range {
    double low = -std::numeric_limits<double>::infinity();
    double high = std::numeric_limits<double>::infinity();
    bool low_excluded = false;

    bool contains(double value) const {
        return std::isfinite(value) && value >= low && value <= high &&
               !(low_excluded && value == low);
    }
};

template <typename Value>
struct sampling_option {
    const char* name;
    Value sampling_params::*member;
    number_range range{};  // for numbers
};
// Before LLVM 17, clang deduces none from an aggregate.
template <typename Value>
sampling_option(const char*, Value sampling_params::*, number_range = {}) -> sampling_option<Value>;

// Every option; check() and the bindings iterate over this list.
inline constexpr std::tuple sampling_options{
    sampling_option{"temperature", &sampling_params::temperature, {.low = 0}},
    sampling_option{"top_k", &sampling_params::top_k, {.low = 0}},
    sampling_option{"top_p", &sampling_params::top_p, {0, 1, true}},
    sampling_option{"min_p", &sampling_params::min_p, {0, 1}},
    sampling_option{"typical_p", &sampling_params::typical_p, {0, 1, true}},
    sampling_option{"top_n_sigma", &sampling_params::top_n_sigma, {.low = 0}},
    sampling_option{"min_keep", &sampling_params::min_keep, {.low = 0}},
    sampling_option{"dynatemp_range", &sampling_params::dynatemp_range, {0, 1000}},
    sampling_option{"dynatemp_exponent", &sampling_params::dynatemp_exponent, {0, 1000}},
    sampling_option{
        "repeat_penalty", &sampling_params::repeat_penalty, {.low = 0, .low_excluded = true}},
    sampling_option{"repeat_last_n", &sampling_params::repeat_last_n, {.low = -1}},
    sampling_option{"presence_penalty", &sampling_params::presence_penalty},
    sampling_option{"frequency_penalty", &sampling_params::frequency_penalty},
    sampling_option{"dry_multiplier", &sampling_params::dry_multiplier, {.low = 0}},
    sampling_option{"dry_base", &sampling_params::dry_base, {.low = 1}},
    sampling_option{"dry_allowed_length", &sampling_params::dry_allowed_length, {.low = 0}},
    sampling_option{"dry_penalty_last_n", &sampling_params::dry_penalty_last_n, {.low = -1}},
    sampling_option{"dry_sequence_breakers", &sampling_params::dry_sequence_breakers},
    sampling_option{"xtc_probability", &sampling_params::xtc_probability, {0, 1}},
    sampling_option{"xtc_threshold", &sampling_params::xtc_threshold, {0, 1}},
    sampling_option{"mirostat", &sampling_params::mirostat, {0, 2}},
    sampling_option{
        "mirostat_tau", &sampling_params::mirostat_tau, {.low = 0, .low_excluded = true}},
    sampling_option{
        "mirostat_eta", &sampling_params::mirostat_eta, {.low = 0, .low_excluded = true}},
    // llama.cpp reads 2^32 - 1 as "choose one at random".
    sampling_option{"seed", &sampling_params::seed, {0, 4294967294.0}},
    sampling_option{"logit_bias", &sampling_params::logit_bias},
    sampling_option{"banned_tokens", &sampling_params::banned_tokens},
    sampling_option{"ignore_eos", &sampling_params::ignore_eos},
    sampling_option{"min_tokens", &sampling_params::min_tokens, {.low = 0}},
    sampling_option{"begin_suppress", &sampling_params::begin_suppress},
    sampling_option{"grammar", &sampling_params::grammar},
    sampling_option{"json_schema", &sampling_params::json_schema},
    sampling_option{"regex", &sampling_params::regex},
    sampling_option{"finish_on_length", &sampling_params::finish_on_length},
    sampling_option{"top_logprobs", &sampling_params::top_logprobs, {.low = 0}},
    sampling_option{"post_sampling_probs", &sampling_params::post_sampling_probs},
};

// Calls `visit` with each option, in order.
template <typename Visit>
void for_each_option(Visit&& visit) {
    std::apply([&](const auto&... option) { (visit(option), ...); }, sampling_options);
}

// Raises invalid_sampling for a value out of range, invalid_token for an id outside the vocabulary.
// The grammar's text is checked when the filter is created.
void check(const sampling_params& params, std::int32_t n_vocab);

}  // namespace kqview
