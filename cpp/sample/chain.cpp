#include "sample/chain.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <new>
#include <numeric>
#include <random>
#include <string>

#include "base/error.h"

namespace kqview {
namespace {

constexpr float minus_inf = -std::numeric_limits<float>::infinity();
constexpr float float_max = std::numeric_limits<float>::max();

// llama.cpp allocates the whole window at once, and no context is longer than this.
constexpr std::int32_t window_max_tokens = 1 << 20;

// Logits further than this below the best have a probability of 0 in float32, for which llama.cpp's
// typical_p computes 0 * log(0).
constexpr float lowest_depth = 103.0F;

// Below this, only equally likely tokens remain; dividing by it cannot overflow.
constexpr float temperature_min = 1e-30F;

std::uint32_t pick_seed(const std::optional<std::uint32_t>& seed) {
    const std::uint32_t value = seed ? *seed : std::random_device{}();
    // llama.cpp reads LLAMA_DEFAULT_SEED as "choose one at random", which would not repeat.
    return value == LLAMA_DEFAULT_SEED ? value - 1 : value;
}

std::int32_t window_tokens(std::int32_t last_n, std::int32_t n_ctx_train) {
    const std::int32_t n = last_n >= 0 ? last_n : n_ctx_train > 0 ? n_ctx_train : window_max_tokens;
    return std::min(n, window_max_tokens);
}

bool is_better(const llama_token_data& a, const llama_token_data& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

bool is_likelier(const llama_token_data& a, const llama_token_data& b) {
    return a.p > b.p || (a.p == b.p && a.id < b.id);
}

// Places in the chain that draw_chain::build makes, without mirostat.
constexpr std::int32_t i_xtc = 3;
constexpr std::int32_t i_temperature = 4;
constexpr std::int32_t i_dist = 5;

void fill_all(std::vector<llama_token_data>& candidates, std::span<const float> logits) {
    candidates.clear();
    candidates.reserve(logits.size());
    for (std::size_t id = 0; id < logits.size(); ++id) {
        if (logits[id] > minus_inf) {
            candidates.push_back({static_cast<token_id>(id), logits[id], 0.0F});
        }
    }
}

// Sorts the `n` best candidates and drops the others.
void keep_best(std::vector<llama_token_data>& candidates, std::size_t n) {
    n = std::min(n, candidates.size());
    const auto end = candidates.begin() + static_cast<std::ptrdiff_t>(n);
    std::partial_sort(candidates.begin(), end, candidates.end(), is_better);
    candidates.resize(n);
}

[[noreturn]] void throw_nothing_left() {
    throw error(errc::decode,
                "no token is left to choose; loosen banned_tokens, begin_suppress, logit_bias, "
                "ignore_eos, min_tokens or the grammar, json_schema or regex");
}

}  // namespace

// ---- changing logits

logit_editor::logit_editor(const llama_vocab* vocab, const sampling_params& params,
                           std::int32_t n_ctx_train)
    : n_vocab_(llama_vocab_n_tokens(vocab)), keeps_raw_(params.top_logprobs.has_value()) {
    check(params, n_vocab_);
    collect_bans(vocab, params);
    build_penalties(vocab, params, n_ctx_train);
}

void logit_editor::collect_bans(const llama_vocab* vocab, const sampling_params& params) {
    banned_ = params.banned_tokens;
    std::int32_t n_suppressed = 0;
    const llama_token* suppressed = llama_vocab_get_suppress_tokens(vocab, &n_suppressed);
    banned_.insert(banned_.end(), suppressed, suppressed + n_suppressed);
    for (const token_id id : params.begin_suppress) early_bans_.push_back({id, 1});
    for (token_id id = 0; (params.ignore_eos || params.min_tokens > 0) && id < n_vocab_; ++id) {
        if (!llama_vocab_is_eog(vocab, id)) continue;
        if (params.ignore_eos) banned_.push_back(id);
        early_bans_.push_back({id, params.min_tokens});
    }
    for (const auto& [id, bias] : params.logit_bias) {
        if (bias == minus_inf) {
            banned_.push_back(id);
        } else {
            bias_.emplace_back(id, bias);
        }
    }
    std::sort(banned_.begin(), banned_.end());
    banned_.erase(std::unique(banned_.begin(), banned_.end()), banned_.end());
    if (!banned_.empty() && banned_.size() >= static_cast<std::size_t>(n_vocab_)) {
        throw error(errc::invalid_sampling, "ignore_eos, banned_tokens and logit_bias ban all ",
                    n_vocab_, " tokens; leave at least one");
    }
}

void logit_editor::build_penalties(const llama_vocab* vocab, const sampling_params& params,
                                   std::int32_t n_ctx_train) {
    const bool has_penalties = params.repeat_penalty != 1.0F || params.presence_penalty != 0.0F ||
                               params.frequency_penalty != 0.0F;
    const std::int32_t n_penalties =
        has_penalties ? window_tokens(params.repeat_last_n, n_ctx_train) : 0;
    if (n_penalties > 0) {
        penalties_.reset(llama_sampler_init_penalties(n_vocab_, n_penalties, params.repeat_penalty,
                                                      params.frequency_penalty,
                                                      params.presence_penalty));
    }

    const std::int32_t n_dry =
        params.dry_multiplier > 0.0F ? window_tokens(params.dry_penalty_last_n, n_ctx_train) : 0;
    if (n_dry > 0) {
        if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
            throw error(errc::invalid_sampling,
                        "dry_multiplier needs a vocabulary, and this model has none; leave it out");
        }
        std::vector<const char*> breakers;
        for (const std::string& text : params.dry_sequence_breakers) {
            breakers.push_back(text.c_str());
        }
        try {
            dry_.reset(llama_sampler_init_dry(vocab, params.dry_multiplier, params.dry_base,
                                              params.dry_allowed_length, n_dry, breakers.data(),
                                              breakers.size()));
        } catch (const std::bad_alloc&) {
            throw;
        } catch (const std::exception& failure) {
            throw error(errc::invalid_sampling, "dry_sequence_breakers failed with ",
                        failure.what(), "; correct or leave it out");
        }
    }
    n_recent_max_ = static_cast<std::size_t>(std::max(n_penalties, n_dry));
}

void logit_editor::accept(std::span<const token_id> ids) {
    for (const token_id id : ids.last(std::min(ids.size(), n_recent_max_))) remember(id);
}

void logit_editor::restart() {
    if (penalties_) llama_sampler_reset(penalties_.get());
    if (dry_) llama_sampler_reset(dry_.get());
    recent_.clear();
    i_recent_oldest_ = 0;
}

void logit_editor::remember(token_id id) {
    llama_sampler_accept(penalties_.get(), id);
    llama_sampler_accept(dry_.get(), id);
    if (recent_.size() < n_recent_max_) {
        recent_.push_back(id);
    } else {
        recent_[i_recent_oldest_] = id;
        i_recent_oldest_ = (i_recent_oldest_ + 1) % n_recent_max_;
    }
}

float logit_editor::raw(token_id id, std::span<const float> edited) const {
    // The first entry for an id holds its raw logit.
    const auto found = std::ranges::find(replaced_, id, &scored_token::id);
    return found != replaced_.end() ? found->logit : edited[static_cast<std::size_t>(id)];
}

void logit_editor::edit(std::span<float> logits, std::size_t n_generated) {
    replaced_.clear();
    for (const auto& [id, bias] : bias_) {
        float& logit = logits[static_cast<std::size_t>(id)];
        replaced_.push_back({id, logit});
        logit += bias;
    }
    for (const token_id id : banned_) logits[static_cast<std::size_t>(id)] = minus_inf;
    for (const auto& [id, n_before] : early_bans_) {
        if (std::cmp_less(n_generated, n_before)) logits[static_cast<std::size_t>(id)] = minus_inf;
    }
    if (!recent_.empty()) penalize(logits);
}

void logit_editor::penalize(std::span<float> logits) {
    penalized_.clear();
    for (const token_id id : recent_) {
        if (id < 0 || id >= n_vocab_) continue;
        const float logit = logits[static_cast<std::size_t>(id)];
        // A banned token stays banned, and NaN is left for the scan to report.
        if (!(logit > minus_inf)) continue;
        penalized_.push_back({id, logit, 0.0F});
        if (keeps_raw_) replaced_.push_back({id, logit});
    }
    llama_token_data_array array{penalized_.data(), penalized_.size(), -1, false};
    llama_sampler_apply(penalties_.get(), &array);
    llama_sampler_apply(dry_.get(), &array);
    // A token seen twice gets the same value twice. Extreme penalties saturate at the limit.
    for (const llama_token_data& entry : penalized_) {
        logits[static_cast<std::size_t>(entry.id)] =
            entry.logit <= float_max ? entry.logit : float_max;
    }
}

// ---- drawing

void draw_chain::build(const sampling_params& params, std::int32_t n_vocab) {
    has_mirostat_ = params.mirostat != 0;
    const auto seed = pick_seed(params.seed);
    llama_sampler_chain_params chain_params = llama_sampler_chain_default_params();
    chain_params.no_perf = true;
    chain_.reset(llama_sampler_chain_init(chain_params));
    const auto add = [this](llama_sampler* link) { llama_sampler_chain_add(chain_.get(), link); };
    const float temperature = std::max(params.temperature, temperature_min);
    // skip() and apply() know the places of these.
    if (params.mirostat == 1) {
        add(llama_sampler_init_temp(temperature));
        // 100 tokens to estimate the slope from, as in llama.cpp's tools.
        add(llama_sampler_init_mirostat(n_vocab, seed, params.mirostat_tau, params.mirostat_eta,
                                        100));
    } else if (params.mirostat == 2) {
        add(llama_sampler_init_temp(temperature));
        add(llama_sampler_init_mirostat_v2(seed, params.mirostat_tau, params.mirostat_eta));
    } else {
        // top_n_sigma and top_k come before the candidates are built, or in narrow().
        const auto n_keep = static_cast<std::size_t>(params.min_keep);
        add(llama_sampler_init_typical(params.typical_p, n_keep));
        add(llama_sampler_init_top_p(params.top_p, n_keep));
        add(llama_sampler_init_min_p(params.min_p, n_keep));
        add(llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, n_keep, seed));
        add(llama_sampler_init_temp_ext(temperature, params.dynatemp_range,
                                        params.dynatemp_exponent));
        add(llama_sampler_init_dist(seed));
    }
}

void draw_chain::apply(llama_token_data_array& candidates, std::optional<float> temperature) const {
    if (!temperature) return llama_sampler_apply(chain_.get(), &candidates);
    const llama_sampler_handle heat(
        llama_sampler_init_temp(std::max(*temperature, temperature_min)));
    const std::int32_t i_heat = has_mirostat_ ? 0 : i_temperature;
    for (std::int32_t i = 0; i < llama_sampler_chain_n(chain_.get()); ++i) {
        auto* const link = i == i_heat ? heat.get() : llama_sampler_chain_get(chain_.get(), i);
        llama_sampler_apply(link, &candidates);
    }
}

void draw_chain::keep_state() {
    states_.push_back(llama_sampler_handle(chain_ ? llama_sampler_clone(chain_.get()) : nullptr));
}

void draw_chain::withdraw() {
    chain_ = std::move(states_.back());
    states_.pop_back();
    proposed_.reset();
}

void draw_chain::skip() const {
    if (!chain_ || has_mirostat_) return;
    for (const std::int32_t i : {i_xtc, i_dist}) {
        llama_token_data two[] = {{0, 0.0F, 0.0F}, {1, 0.0F, 0.0F}};
        llama_token_data_array array{two, 2, -1, true};
        llama_sampler_apply(llama_sampler_chain_get(chain_.get(), i), &array);
    }
}

// An id that was not drawn costs the generator what a draw would have: what comes next depends on
// the seed and the number of ids alone. Mirostat's target does not move for such an id, whose
// surprise is not known.
void draw_chain::revise(std::size_t n_removed, std::span<const token_id> ids) {
    const bool stands = n_removed == 0 && proposed_ && !ids.empty() && ids.front() == *proposed_;
    if (proposed_ && !stands) withdraw();
    proposed_.reset();
    for (auto n = std::min(n_removed, states_.size()); n > 0; --n) withdraw();
    for (std::size_t i = stands ? 1 : 0; i < ids.size(); ++i) {
        keep_state();
        skip();
    }
    while (states_.size() > n_states_max) states_.pop_front();
}

// ---- the choice

sampler::sampler(const llama_vocab* vocab, const sampling_params& params, std::int32_t n_ctx_train,
                 std::unique_ptr<token_filter> filter)
    : params_(params),
      n_vocab_(llama_vocab_n_tokens(vocab)),
      editor_(vocab, params, n_ctx_train),
      filter_(std::move(filter)),
      limit_(params.json_schema ? "json_schema"
             : params.regex     ? "regex"
                                : "grammar",
             filter_limit_s, filter_average_s) {
    if (!is_greedy()) draws_.build(params_, n_vocab_);
}

void sampler::accept_prompt(std::span<const token_id> ids, bool is_steered) {
    editor_.accept(ids);
    if (!is_steered) return;
    history_.assign(ids.begin(), ids.end());
    n_prompt_ = ids.size();
}

picked_token sampler::pick(float* logits) {
    const std::span row(logits, static_cast<std::size_t>(n_vocab_));
    if (filter_) limit_.restart();
    read_logprobs(logits);
    editor_.edit(row, n_picked_++);
    auto token = choose_from(row);
    editor_.accept({&token.id, 1});
    if (filter_) filter_->accept(token.id, limit_);
    if (filter_) limit_.pause();
    return token;
}

// The logits as they are chosen from: themselves, or a copy.
std::span<const float> sampler::edited(std::span<const float> logits) {
    if (!editor_.has_edits()) return logits;
    edited_.assign(logits.begin(), logits.end());
    // One of the two counts: what is steered has a history.
    editor_.edit(edited_, n_picked_ + history_.size() - n_prompt_);
    return edited_;
}

bool sampler::is_tied(std::span<const float> logits, float tolerance) {
    if (!is_greedy()) return false;
    const double sum = std::accumulate(logits.begin(), logits.end(), 0.0);
    const auto best = static_cast<double>(*std::ranges::max_element(logits));
    const double spread = best - sum / static_cast<double>(logits.size());
    const auto row = edited(logits);
    scan_.read(row.data(), n_vocab_);
    if (scan_.max() == minus_inf) return false;  // as pick() will say
    if (filter_) {
        limit_.restart();
        fill_top_allowed(row, 2);
        limit_.pause();
    } else {
        fill_top(2);
    }
    if (candidates_.size() < 2) return false;
    return static_cast<double>(candidates_[0].logit - candidates_[1].logit) <= tolerance * spread;
}

// The model's own log-probabilities, before anything is changed.
void sampler::read_logprobs(const float* logits) {
    if (params_.top_logprobs && !params_.post_sampling_probs)
        logprobs_.read(logits, n_vocab_, *params_.top_logprobs);
}

// `row`: the edited logits.
picked_token sampler::choose_from(std::span<const float> row) {
    picked_token token{choose(row), std::numeric_limits<float>::quiet_NaN(), {}};
    const token_id settled = filter_ ? filter_->settle(token.id, limit_) : token.id;
    if (settled != token.id && row[static_cast<std::size_t>(settled)] > minus_inf) {
        token.id = settled;
        last_p_ = 1.0F;
    }
    if (params_.top_logprobs) report(token, row);
    return token;
}

// The log-probabilities of a token and of those beside it.
void sampler::report(picked_token& token, std::span<const float> logits) const {
    if (!params_.post_sampling_probs) {
        token.logprob = logprobs_.of(editor_.raw(token.id, logits));
        token.top = logprobs_.top();
        return;
    }
    if (is_greedy()) {  // the choice is certain
        token.logprob = 0.0F;
        if (*params_.top_logprobs > 0) token.top.emplace_back(token.id, 0.0F);
        return;
    }
    token.logprob = std::log(last_p_);
    for (const llama_token_data& entry : likeliest_) {
        if (entry.p > 0.0F) token.top.emplace_back(entry.id, std::log(entry.p));
    }
}

token_id sampler::choose(std::span<const float> logits) {
    scan_.read(logits.data(), n_vocab_);
    if (scan_.max() == minus_inf) throw_nothing_left();
    const bool needs_all = params_.mirostat != 0 || params_.top_n_sigma > 0.0F ||
                           params_.top_k <= 0 || params_.top_k >= n_vocab_;
    if (is_greedy() && !filter_) return scan_.argmax();
    if (!is_greedy() && needs_all) return choose_of_all(logits);

    const std::int32_t k = is_greedy() ? 1 : params_.top_k;
    if (filter_) {
        fill_top_allowed(logits, k);
    } else {
        fill_top(k);
    }
    return is_greedy() ? candidates_.front().id : run_choice(true);
}

// The chosen token is checked against the filter first: filtering the whole vocabulary costs far
// more than choosing twice.
token_id sampler::choose_of_all(std::span<const float> logits) {
    fill_all(candidates_, logits);
    const token_id id = run_choice(narrow());
    if (!filter_) return id;
    candidates_.assign(1, {id, 0.0F, 0.0F});
    apply_filter();
    if (!candidates_.empty()) return id;

    fill_all(candidates_, logits);
    apply_filter();
    if (candidates_.empty()) throw_nothing_left();
    return run_choice(narrow());
}

// Leaves what top_n_sigma and top_k allow; returns whether the candidates are sorted. Mirostat
// replaces both.
bool sampler::narrow() {
    if (params_.mirostat != 0 || params_.top_n_sigma == 0.0F) return false;  // nor does top_k act
    const auto n = static_cast<double>(candidates_.size());
    double sum = 0.0;
    double best = minus_inf;
    for (const llama_token_data& entry : candidates_) {
        sum += static_cast<double>(entry.logit);
        best = std::max(best, static_cast<double>(entry.logit));
    }
    double sum_of_squares = 0.0;
    for (const llama_token_data& entry : candidates_) {
        const double distance = static_cast<double>(entry.logit) - sum / n;
        sum_of_squares += distance * distance;
    }
    const double deviation = std::sqrt(sum_of_squares / n);
    const double lowest = best - static_cast<double>(params_.top_n_sigma) * deviation;
    std::erase_if(candidates_, [lowest](const llama_token_data& entry) {
        return static_cast<double>(entry.logit) < lowest;
    });
    if (params_.top_k <= 0) return false;
    keep_best(candidates_, static_cast<std::size_t>(params_.top_k));
    return true;
}

// Requires at least one candidate, all above -inf.
token_id sampler::run_choice(bool is_sorted) {
    // Shifts the best logit to 10: nothing overflows, the probabilities stay the same, and
    // llama.cpp's sort, which is fast from -10 to 10, can tell the likely tokens apart. A dynamic
    // temperature may be so small that only 0 can be divided by it.
    const float wanted = params_.dynatemp_range > 0.0F ? 0.0F : 10.0F;
    float best = candidates_.front().logit;
    for (const llama_token_data& entry : candidates_) best = std::max(best, entry.logit);
    for (llama_token_data& entry : candidates_) entry.logit = entry.logit - best + wanted;
    const float lowest = params_.typical_p < 1.0F ? wanted - lowest_depth : -float_max;
    std::erase_if(candidates_, [=](const llama_token_data& e) { return !(e.logit >= lowest); });

    llama_token_data_array array{candidates_.data(), candidates_.size(), -1, is_sorted};
    draws_.apply(array, own_temperature_);
    if (array.selected < 0 || static_cast<std::size_t>(array.selected) >= array.size) {
        throw error(errc::internal, "the samplers chose no token of ", array.size,
                    ", one is needed; report this");
    }
    if (params_.post_sampling_probs) {
        last_p_ = array.data[array.selected].p;
        const auto n_top = static_cast<std::size_t>(params_.top_logprobs.value_or(0));
        likeliest_.resize(std::min(n_top, array.size));
        std::partial_sort_copy(array.data, array.data + array.size, likeliest_.begin(),
                               likeliest_.end(), is_likelier);
    }
    return array.data[array.selected].id;
}

void sampler::fill_top(std::int32_t k) {
    scan_.top(k, top_);
    candidates_.clear();
    for (const scored_token& entry : top_) candidates_.push_back({entry.id, entry.logit, 0.0F});
}

// The k best tokens that the filter allows. Tests growing shares of the best tokens, since testing
// the whole vocabulary takes milliseconds.
void sampler::fill_top_allowed(std::span<const float> logits, std::int32_t k) {
    const auto n_wanted = static_cast<std::size_t>(k);
    for (std::int32_t n = std::max(64, 2 * std::min(k, n_vocab_)); n < n_vocab_ / 8; n *= 8) {
        fill_top(n);
        const bool were_all = candidates_.size() < static_cast<std::size_t>(n);
        apply_filter();
        if (candidates_.size() >= n_wanted || were_all) {
            if (candidates_.empty()) throw_nothing_left();
            candidates_.resize(std::min(candidates_.size(), n_wanted));
            return;
        }
    }
    fill_all(candidates_, logits);
    apply_filter();
    if (candidates_.empty()) throw_nothing_left();
    keep_best(candidates_, n_wanted);
}

void sampler::apply_filter() {
    filter_->prepare(candidates_.size(), limit_);
    std::erase_if(candidates_, [this](const llama_token_data& candidate) {
        return !(candidate.logit > minus_inf) || !filter_->allows(candidate.id, limit_);
    });
}

// ---- a steered request

picked_token sampler::propose(std::span<const float> logits, std::optional<float> temperature) {
    own_temperature_ = temperature;
    if (!is_greedy() && !draws_) draws_.build(params_, n_vocab_);
    draws_.keep_state();
    try {
        if (filter_) limit_.restart();
        read_logprobs(logits.data());
        auto token = choose_from(edited(logits));
        if (is_greedy()) draws_.skip();
        if (filter_) limit_.pause();
        draws_.propose(token.id);
        return token;
    } catch (...) {
        draws_.withdraw();
        throw;
    }
}

void sampler::revise(std::size_t n_removed, std::span<const token_id> ids) {
    const auto n_kept = history_.size() - n_removed;
    if (filter_) revise_filter(n_kept, ids);  // first: it may refuse
    draws_.revise(n_removed, ids);
    history_.resize(n_kept);
    history_.insert(history_.end(), ids.begin(), ids.end());
    if (n_removed > 0) editor_.restart();
    editor_.accept(n_removed > 0 ? history_ : ids);
}

void sampler::revise_filter(std::size_t n_kept, std::span<const token_id> ids) {
    const auto generated = std::span<const token_id>(history_).subspan(n_prompt_);
    const auto replay = [&](std::span<const token_id> accepted) {
        limit_.restart();
        filter_->restart();
        for (const token_id id : accepted) filter_->accept(id, limit_);
    };
    try {
        if (n_kept < history_.size()) replay(generated.first(n_kept - n_prompt_));
        limit_.restart();
        for (const token_id id : ids) {
            filter_->prepare(1, limit_);
            if (!filter_->allows(id, limit_)) {
                throw error(errc::invalid_sampling, "ids contains ", id, ", which the ",
                            limit_.what(),
                            " does not allow there; force what it allows, or generate without it");
            }
            filter_->accept(id, limit_);
        }
    } catch (...) {
        replay(generated);
        limit_.pause();
        throw;
    }
    limit_.pause();
}

}  // namespace kqview
