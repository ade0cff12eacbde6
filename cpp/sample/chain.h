// Chooses the next token of one request: bias and bans, penalties, DRY, the filter, top-k, and then
// llama.cpp's samplers in the order of its own tools.
// Owner:   owns its llama_samplers and every buffer; the vocabulary belongs to the model.
// Threads: one at a time; stop(): any. Construction takes milliseconds, because DRY and ignore_eos
//          read the whole vocabulary.
// Never:   touches a llama_context: it works on a row of logits.
#pragma once

#include <llama.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "sample/logit_scan.h"
#include "sample/params.h"
#include "sample/token_filter.h"
#include "sample/token_picker.h"

namespace kqview {

struct llama_sampler_deleter {
    void operator()(llama_sampler* handle) const { llama_sampler_free(handle); }
};
using llama_sampler_handle = std::unique_ptr<llama_sampler, llama_sampler_deleter>;

// Changes logits before a token is chosen: bias and bans, penalties, DRY. Touches only the few
// logits that change; llama.cpp's own bias and penalties would look up every candidate of the
// vocabulary.
class logit_editor {
public:
    // Parameters as for the constructor of sampler.
    logit_editor(const llama_vocab* vocab, const sampling_params& params, std::int32_t n_ctx_train);

    // Adds tokens that penalties and DRY look back on.
    void accept(std::span<const token_id> ids);
    // Forgets them all.
    void restart();

    // False: edit() changes nothing, whatever the logits are.
    bool has_edits() const {
        return !bias_.empty() || !banned_.empty() || !early_bans_.empty() || !recent_.empty();
    }
    // `n_generated`: number of tokens of the text so far, without the prompt.
    void edit(std::span<float> logits, std::size_t n_generated);
    // This token's logit before edit(); only if `params` request log-probabilities.
    float raw(token_id id, std::span<const float> edited) const;

private:
    void collect_bans(const llama_vocab* vocab, const sampling_params& params);
    void build_penalties(const llama_vocab* vocab, const sampling_params& params,
                         std::int32_t n_ctx_train);
    void remember(token_id id);
    void penalize(std::span<float> logits);

    const std::int32_t n_vocab_;
    const bool keeps_raw_;
    std::vector<std::pair<token_id, float>> bias_;
    std::vector<token_id> banned_;
    std::vector<std::pair<token_id, std::int32_t>> early_bans_;  // and before how many tokens
    llama_sampler_handle penalties_;                             // null when off
    llama_sampler_handle dry_;

    // The last tokens that penalties and DRY may look back on, as a ring buffer.
    std::vector<token_id> recent_;
    std::size_t n_recent_max_ = 0;
    std::size_t i_recent_oldest_ = 0;

    std::vector<llama_token_data> penalized_;
    std::vector<scored_token> replaced_;  // raw logits that edit() changed
};

// llama.cpp's samplers, which draw one of the candidates. The draws of a steered request can be
// taken back.
class draw_chain {
public:
    // Draws that can be taken back exactly. What is older keeps its place in the text, but the
    // random generator goes back no further: its states are 5 KB each.
    static constexpr std::size_t n_states_max = 4096;

    explicit operator bool() const { return chain_ != nullptr; }
    void build(const sampling_params& params, std::int32_t n_vocab);
    // `temperature`: of this draw alone, in place of that of the parameters.
    void apply(llama_token_data_array& candidates, std::optional<float> temperature) const;

    // Of a steered request. Call keep_state() before a draw that may be withdrawn, and propose()
    // with what it gave; revise() undoes the draws of what is removed.
    void keep_state();
    void withdraw();
    void propose(token_id id) { proposed_ = id; }
    void revise(std::size_t n_removed, std::span<const token_id> ids);
    // Draws nothing, but takes the random numbers of a draw.
    void skip() const;

private:
    llama_sampler_handle chain_;
    bool has_mirostat_ = false;
    // What chain_ was before each of the last accepted ids, and before the proposed one.
    std::deque<llama_sampler_handle> states_;
    std::optional<token_id> proposed_;
};

class sampler final : public token_picker {
public:
    // CPU time limits of the filter: for one token, and per token on average.
    static constexpr double filter_limit_s = 2.0;
    static constexpr double filter_average_s = 0.1;

    // Raises what check() raises, and invalid_sampling for DRY without a vocabulary, which must
    // outlive this object. A penalty window of -1 means n_ctx_train tokens. `filter` is the one
    // that token_filters made from `params`.
    sampler(const llama_vocab* vocab, const sampling_params& params, std::int32_t n_ctx_train,
            std::unique_ptr<token_filter> filter);

    // Call once, before the first choice. Penalties and DRY look back on the prompt; the grammar
    // does not. `is_steered`: propose() and revise() will be called, which need a history.
    void accept_prompt(std::span<const token_id> ids, bool is_steered = false);

    // Chooses from the logits and accepts the token. Raises decode if a logit is NaN or infinite,
    // or if nothing is left to choose; invalid_sampling if the filter takes too much time or
    // memory.
    picked_token pick(float* logits) override;
    bool is_tied(std::span<const float> logits, float tolerance) override;
    picked_token propose(std::span<const float> logits, std::optional<float> temperature) override;
    void revise(std::size_t n_removed, std::span<const token_id> ids) override;
    bool is_slow() const override { return filter_ != nullptr; }
    void stop() noexcept override { limit_.stop(); }

private:
    bool is_greedy() const {
        if (own_temperature_) return *own_temperature_ == 0.0F;
        return params_.temperature == 0.0F && params_.dynatemp_range == 0.0F;
    }
    std::span<const float> edited(std::span<const float> logits);
    void read_logprobs(const float* logits);
    picked_token choose_from(std::span<const float> row);
    token_id choose(std::span<const float> logits);
    token_id choose_of_all(std::span<const float> logits);
    token_id run_choice(bool is_sorted);
    bool narrow();
    void report(picked_token& token, std::span<const float> logits) const;
    void fill_top(std::int32_t k);
    void fill_top_allowed(std::span<const float> logits, std::int32_t k);
    void apply_filter();
    void revise_filter(std::size_t n_kept, std::span<const token_id> ids);

    sampling_params params_;
    std::int32_t n_vocab_;  // of the vocabulary
    logit_editor editor_;
    draw_chain draws_;  // none when greedy
    std::unique_ptr<token_filter> filter_;
    work_limit limit_;

    logit_scan scan_;
    logprob_scan logprobs_;
    std::vector<scored_token> top_;
    std::vector<llama_token_data> candidates_;
    std::size_t n_picked_ = 0;
    // Probabilities of the last choice and of the likeliest candidates; if those are reported.
    float last_p_ = 0.0F;
    std::vector<llama_token_data> likeliest_;

    // ---- of a steered request
    std::vector<token_id> history_;  // the prompt, and the ids accepted since
    std::size_t n_prompt_ = 0;
    std::optional<float> own_temperature_;  // of the current choice
    std::vector<float> edited_;
};

}  // namespace kqview
