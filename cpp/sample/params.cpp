#include "sample/params.h"

#include <cstdio>
#include <type_traits>

#include "base/error.h"

namespace kqview {
namespace {

// Each breaker costs a pass over the vocabulary.
constexpr std::size_t n_breakers_max = 64;

std::string to_text(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.10g", value);
    return text;
}

[[noreturn]] void refuse(const std::string& what, const std::string& allowed,
                         const std::string& got, errc code = errc::invalid_sampling) {
    throw error(code, what + " must be " + allowed + ", got " + got);
}

std::string to_text(const number_range& range) {
    const auto low = to_text(range.low);
    const auto high = to_text(range.high);
    if (std::isinf(range.low)) return "finite";
    if (std::isinf(range.high)) return (range.low_excluded ? "above " : "at least ") + low;
    if (range.low_excluded) return "above " + low + " and at most " + high;
    return "from " + low + " to " + high;
}

void check_range(const char* name, const number_range& range, double value) {
    if (!range.contains(value)) refuse(name, to_text(range), to_text(value));
}

template <typename Value>
void check_option(const sampling_option<Value>& option, const Value& value) {
    if constexpr (std::is_arithmetic_v<Value>) {
        check_range(option.name, option.range, static_cast<double>(value));
    }
}

template <typename Value>
void check_option(const sampling_option<std::optional<Value>>& option,
                  const std::optional<Value>& value) {
    if (value) check_option(sampling_option<Value>{option.name, nullptr, option.range}, *value);
}

void check_breakers(const std::vector<std::string>& breakers) {
    if (breakers.size() > n_breakers_max) {
        refuse("dry_sequence_breakers", "at most " + std::to_string(n_breakers_max) + " strings",
               std::to_string(breakers.size()));
    }
    for (const auto& breaker : breakers) {
        if (breaker.empty() || breaker.find('\0') != std::string::npos) {
            refuse("an item of dry_sequence_breakers", "text without a zero byte",
                   breaker.empty() ? "an empty one" : "one with a zero byte");
        }
    }
}

void check_token(const char* name, token_id id, std::int32_t n_vocab) {
    if (id < 0 || id >= n_vocab) {
        refuse(name, "a token id from 0 to " + std::to_string(n_vocab - 1), std::to_string(id),
               errc::invalid_token);
    }
}

void check_tokens(const sampling_params& params, std::int32_t n_vocab) {
    for (const token_id id : params.banned_tokens)
        check_token("an item of banned_tokens", id, n_vocab);
    for (const token_id id : params.begin_suppress)
        check_token("an item of begin_suppress", id, n_vocab);
    for (const auto& [id, bias] : params.logit_bias) {
        check_token("a key of logit_bias", id, n_vocab);
        if (std::isnan(bias) || bias == std::numeric_limits<float>::infinity()) {
            refuse("logit_bias[" + std::to_string(id) + "]", "a finite number or -inf",
                   to_text(bias));
        }
    }
}

}  // namespace

void check(const sampling_params& params, std::int32_t n_vocab) {
    for_each_option([&](const auto& option) { check_option(option, params.*option.member); });
    // The penalty also divides, so its inverse must be finite too.
    if (!std::isfinite(1.0F / params.repeat_penalty)) {
        refuse("repeat_penalty", "at least 1e-38", to_text(params.repeat_penalty));
    }
    check_breakers(params.dry_sequence_breakers);
    check_tokens(params, n_vocab);
    if (params.grammar.has_value() + params.json_schema.has_value() + params.regex.has_value() >
        1) {
        throw error(errc::invalid_sampling,
                    "grammar, json_schema and regex cannot be combined; give one of them");
    }
    if (params.finish_on_length != "cut" && params.finish_on_length != "close") {
        refuse("finish_on_length", "\"cut\" or \"close\"", '"' + params.finish_on_length + '"');
    }
    if (params.top_logprobs) {
        check_range("top_logprobs", {0, static_cast<double>(n_vocab)}, *params.top_logprobs);
    }
}

}  // namespace kqview
