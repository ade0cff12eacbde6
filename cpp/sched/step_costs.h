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
        if (!is_prompt) {
            if (base_ == seconds{}) base_ = took;
            learn_share(static_cast<double>(n_tokens), took.count());
            return learn(text_step_, took);
        }
        if (n_tokens >= n_least) learn(prompt_token_, took / static_cast<double>(n_tokens));
    }

    // Most tokens of a prompt in one step while a text goes on, of the `n_chunk` that a step holds.
    int n_between(int n_chunk) const {
        const auto budget = max_gap_ > seconds{} ? max_gap_ - text_step_ : text_step_;
        // Not known before both kinds of step were seen.
        const double n =
            prompt_token_ > seconds{} && text_step_ > seconds{} ? budget / prompt_token_ : n_most;
        if (max_gap_ > seconds{}) return static_cast<int>(std::clamp<double>(n, 1, n_chunk));
        return std::min(n_chunk, static_cast<int>(std::clamp<double>(n, n_least, n_most)));
    }

    // Time of a step of texts with this many tokens, guesses among them, in units of what it takes
    // besides its tokens.
    double of_texts(std::size_t n_tokens) const {
        return 1 + token_share_ * static_cast<double>(n_tokens);
    }

    // Time of a step of the model that guesses, in the same units.
    double of_draft() const {
        return draft_step_ > seconds{} && base_ > seconds{} ? draft_step_ / base_ : 0.25;
    }
    void note_draft(seconds took) {
        if (max_gap_ >= seconds{} && took > seconds{}) learn(draft_step_, took);
    }
    // It was not worth it: what is known of it ages.
    void fade_draft() { draft_step_ *= 0.99; }

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

    // The slope of a line through the steps of late, by their number of tokens. Steps of one size
    // leave it as it is.
    void learn_share(double n, double took_s) {
        for (double* const sum : {&seen_, &n_, &nn_, &s_, &ns_}) *sum *= line_memory;
        seen_ += 1, n_ += n, nn_ += n * n, s_ += took_s, ns_ += n * took_s;
        const double spread = seen_ * nn_ - n_ * n_;
        if (spread < 0.25 * seen_ * seen_) return;
        const double of_token = std::max(0.0, (seen_ * ns_ - n_ * s_) / spread);
        const double of_step = (s_ - of_token * n_) / seen_;
        base_ = seconds(std::max(of_step, of_token / most_share));
        token_share_ = of_token > 0 ? of_token / base_.count() : 0;
    }

    static constexpr double line_memory = 0.95;
    static constexpr double most_share = 8;  // of token_share_; more is noise

    seconds max_gap_;
    seconds prompt_token_{};
    seconds text_step_{};
    seconds draft_step_{};
    seconds base_{};                                     // of a step of texts, besides its tokens
    double token_share_ = 1.0 / 8;                       // of a token in the time of a step
    double seen_ = 0, n_ = 0, nn_ = 0, s_ = 0, ns_ = 0;  // sums, the older the lighter
};

}  // namespace kqview
