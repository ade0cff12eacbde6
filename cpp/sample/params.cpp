#include "sample/params.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "base/error.h"

namespace kqview {
namespace {

// Each breaker costs a pass over the vocabulary.
constexpr std::size_t n_breakers_max = 64;

std::string to_text(float value) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
    return text;
}

[[noreturn]] void refuse(const std::string& name, const std::string& got,
                         const std::string& allowed, const std::string& remedy,
                         errc code = errc::invalid_sampling) {
    throw error(code,
                "generate: " + name + " is " + got + ", allowed are " + allowed + "; " + remedy);
}

void require(bool is_allowed, const char* name, float value, const char* allowed,
             const char* remedy) {
    if (!is_allowed) refuse(name, to_text(value), allowed, remedy);
}

void require(bool is_allowed, const char* name, std::int32_t value, const char* allowed,
             const char* remedy) {
    if (!is_allowed) refuse(name, std::to_string(value), allowed, remedy);
}

bool is_share(float value) { return value >= 0.0F && value <= 1.0F; }

void check_truncation(const sampling_params& p) {
    require(std::isfinite(p.temperature) && p.temperature >= 0.0F, "temperature", p.temperature,
            "numbers >= 0", "use 0 for greedy");
    require(is_share(p.top_p) && p.top_p > 0.0F, "top_p", p.top_p, "numbers above 0 and up to 1",
            "use 1 to switch it off");
    require(is_share(p.min_p), "min_p", p.min_p, "numbers from 0 to 1", "use 0 to switch it off");
    require(is_share(p.typical_p) && p.typical_p > 0.0F, "typical_p", p.typical_p,
            "numbers above 0 and up to 1", "use 1 to switch it off");
    require(is_share(p.xtc_probability), "xtc_probability", p.xtc_probability,
            "numbers from 0 to 1", "use 0 to switch XTC off");
    require(is_share(p.xtc_threshold), "xtc_threshold", p.xtc_threshold, "numbers from 0 to 1",
            "use 0.1, or xtc_probability 0 to switch XTC off");
    require(p.mirostat >= 0 && p.mirostat <= 2, "mirostat", p.mirostat, "0, 1 and 2",
            "use 0 to switch it off");
    require(std::isfinite(p.mirostat_tau) && p.mirostat_tau > 0.0F, "mirostat_tau", p.mirostat_tau,
            "numbers > 0", "5 is usual");
    require(std::isfinite(p.mirostat_eta) && p.mirostat_eta > 0.0F, "mirostat_eta", p.mirostat_eta,
            "numbers > 0", "0.1 is usual");
}

void check_penalties(const sampling_params& p) {
    // The penalty also divides, so its inverse has to be a number too.
    require(std::isfinite(p.repeat_penalty) && p.repeat_penalty > 0.0F &&
                std::isfinite(1.0F / p.repeat_penalty),
            "repeat_penalty", p.repeat_penalty, "numbers > 0", "use 1 to switch it off");
    require(std::isfinite(p.presence_penalty), "presence_penalty", p.presence_penalty,
            "finite numbers", "use 0 to switch it off");
    require(std::isfinite(p.frequency_penalty), "frequency_penalty", p.frequency_penalty,
            "finite numbers", "use 0 to switch it off");
    require(p.repeat_last_n >= -1, "repeat_last_n", p.repeat_last_n, "numbers >= -1",
            "use -1 for the whole context, 0 to switch the penalties off");

    require(std::isfinite(p.dry_multiplier) && p.dry_multiplier >= 0.0F, "dry_multiplier",
            p.dry_multiplier, "numbers >= 0", "use 0 to switch DRY off");
    require(std::isfinite(p.dry_base) && p.dry_base >= 1.0F, "dry_base", p.dry_base, "numbers >= 1",
            "1.75 is usual, dry_multiplier 0 switches DRY off");
    require(p.dry_allowed_length >= 0, "dry_allowed_length", p.dry_allowed_length, "numbers >= 0",
            "2 is usual");
    require(p.dry_penalty_last_n >= -1, "dry_penalty_last_n", p.dry_penalty_last_n, "numbers >= -1",
            "use -1 for the whole context, 0 to switch DRY off");
    if (p.dry_sequence_breakers.size() > n_breakers_max) {
        refuse("the length of dry_sequence_breakers",
               std::to_string(p.dry_sequence_breakers.size()),
               "up to " + std::to_string(n_breakers_max), "leave some out");
    }
    for (std::size_t i = 0; i < p.dry_sequence_breakers.size(); ++i) {
        const std::string& breaker = p.dry_sequence_breakers[i];
        if (breaker.empty() || breaker.find('\0') != std::string::npos) {
            refuse("dry_sequence_breakers[" + std::to_string(i) + "]",
                   breaker.empty() ? "empty" : "text with a zero byte",
                   "texts of at least one character", "leave it out");
        }
    }
}

void check_token(const std::string& name, token_id id, std::int32_t n_vocab) {
    if (id < 0 || id >= n_vocab) {
        refuse(name, std::to_string(id), "ids from 0 to " + std::to_string(n_vocab - 1),
               "take ids from tokenize", errc::invalid_token);
    }
}

void check_tokens(const sampling_params& p, std::int32_t n_vocab) {
    std::vector<token_id> banned = p.banned_tokens;
    for (const token_id id : p.banned_tokens) check_token("a token in banned_tokens", id, n_vocab);
    for (const auto& [id, bias] : p.logit_bias) {
        check_token("a token in logit_bias", id, n_vocab);
        if (std::isnan(bias) || bias == std::numeric_limits<float>::infinity()) {
            refuse("logit_bias of token " + std::to_string(id), to_text(bias),
                   "finite numbers and -inf", "use a large number, or -inf to ban the token");
        }
        if (std::isinf(bias)) banned.push_back(id);
    }
    std::sort(banned.begin(), banned.end());
    banned.erase(std::unique(banned.begin(), banned.end()), banned.end());
    if (!banned.empty() && banned.size() >= static_cast<std::size_t>(n_vocab)) {
        refuse("the number of banned tokens", std::to_string(banned.size()),
               "up to " + std::to_string(n_vocab - 1), "leave at least one token to choose");
    }
}

}  // namespace

void check(const sampling_params& params, std::int32_t n_vocab) {
    check_truncation(params);
    check_penalties(params);
    check_tokens(params, n_vocab);
    if (!params.grammar.empty() && !params.constraint_kind.empty()) {
        refuse("grammar", "given with " + params.constraint_kind, "one of them", "leave one out");
    }
    if (params.n_logprobs < -1 || params.n_logprobs > n_vocab) {
        refuse("top_logprobs", std::to_string(params.n_logprobs),
               "numbers from 0 to " + std::to_string(n_vocab), "ask for fewer");
    }
}

}  // namespace kqview
