// What steps cost, learnt as they run: how much of a prompt fits between two tokens of a text.
// Owner:   the batch builder.
// Threads: the engine thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>

namespace kqview {

class step_costs {
public:
    using seconds = std::chrono::duration<double>;

    // `max_gap`: between two tokens of a text while a prompt is evaluated; 0: twice the text's own
    // step, as far as pieces of n_least tokens allow. Smaller ones take the model so much longer
    // that the prompt's own first token, and with it the next text, comes too late. Below 0,
    // nothing is learnt: pieces are as large as before anything is known, and nobody waits.
    explicit step_costs(seconds max_gap = {}) : max_gap_(max_gap) {}

    // A step with this many tokens of prompts, or of texts, took so long.
    void note(bool is_prompt, std::size_t n_tokens, seconds took) {
        if (max_gap_ < seconds{}) return;
        if (!is_prompt) return learn(text_step_, took);
        if (n_tokens >= n_least) learn(prompt_token_, took / static_cast<double>(n_tokens));
    }

    // Most tokens of a prompt in one step while a text goes on, of the `n_chunk` that a step holds.
    int n_between(int n_chunk) const {
        const auto budget = max_gap_ > seconds{} ? max_gap_ - text_step_ : text_step_;
        // Not known before both kinds of step were seen.
        const double n =
            prompt_token_ > seconds{} && text_step_ > seconds{} ? budget / prompt_token_ : n_most;
        if (max_gap_ > seconds{}) return std::clamp(static_cast<int>(n), 1, n_chunk);
        return std::min(n_chunk, static_cast<int>(std::clamp<double>(n, n_least, n_most)));
    }

    // How long so many tokens of prompts will take; 0 before it is known.
    seconds of_prompt(std::size_t n_tokens) const {
        return prompt_token_ * static_cast<double>(n_tokens);
    }

private:
    static constexpr int n_least = 16;
    static constexpr int n_most = 128;

    static void learn(seconds& mean, seconds value) {
        mean = mean > seconds{} ? mean + (value - mean) / 5 : value;
    }

    seconds max_gap_;
    seconds prompt_token_{};
    seconds text_step_{};
};

}  // namespace kqview
