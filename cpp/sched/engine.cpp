#include "sched/engine.h"
#include <llama.h>

#include <algorithm>
#include <ratio>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/heartbeat.h"
#include "memory/block_pool.h"
#include "sample/chain.h"
#include "sample/params.h"
#include "sched/engine_loop.h"

namespace kqview {

namespace {

// Without checkpoint_bytes: of each slot, and at most this part of the machine's memory.
constexpr std::size_t n_snapshots_each = 16;
constexpr std::size_t host_share = 8;
// Of a slot: copies of the logits of guesses that are looked at later.
constexpr std::size_t draft_logits_bytes = std::size_t{8} << 20;

// Raises request unless the ids of both mean the same.
void check_same_words(const model& source, const model& draft) {
    const auto* const ours = source.vocab();
    const auto* const theirs = draft.vocab();
    const auto fail = [](const auto&... what) {
        throw error(errc::request, "draft: its vocabulary is another one: ", what...,
                    "; choose a model of the same family, or \"prompt-lookup\"");
    };
    if (source.n_vocab() != draft.n_vocab())
        fail(draft.n_vocab(), " tokens, the model has ", source.n_vocab());
    if (llama_vocab_type(ours) != llama_vocab_type(theirs)) fail("it is of another kind");
    if (!source.has_vocab()) return;
    for (token_id id = 0; id < source.n_vocab(); ++id) {
        const std::string_view own = llama_vocab_get_text(ours, id);
        const std::string_view other = llama_vocab_get_text(theirs, id);
        if (own != other || llama_vocab_is_eog(ours, id) != llama_vocab_is_eog(theirs, id))
            fail("token ", id, " is '", other, "', in the model it is '", own, "'");
    }
}

}  // namespace

engine::engine(std::shared_ptr<model> source, const engine_options& options)
    : source_(std::move(source)), filters_(source_) {
    auto own = options;
    own.tells_states = options.draft == source_;
    auto runner = std::make_unique<llama_runner>(source_, own);
    if (options.draft) {
        context_options smaller = options;
        smaller.predicts = options.draft == source_;
        if (!smaller.predicts) check_same_words(*source_, *options.draft);
        smaller.n_ctx = runner->n_ctx();
        smaller.free_memory_bytes = 0;  // known before the other context took its part
        smaller.pooling.clear();
        smaller.aborted_decodes.clear();
        smaller.guesses = smaller.tells_states = false;
        auto draft = std::make_unique<llama_runner>(options.draft, smaller);
        if (!draft->has_cache() || !draft->can_take_back())
            throw error(errc::unsupported_model,
                        "draft: its cache cannot drop single tokens; choose another model");
        runner->add_draft(std::move(draft));
    }
    facts_ = {runner->n_ctx(),
              runner->n_chunk(),
              runner->source(),
              runner->has_cache(),
              runner->can_split_embedding(),
              runner->pooling(),
              runner->memory_bytes(),
              embedding_facts_of(*source_),
              runner->shift_obstacle(),
              runner->can_take_back()};
    graphs_ = runner->graphs();
    copies_ = runner->copies();
    block_pool_options pool;
    pool.budget_bytes = options.attention_budget_bytes;
    pool.pinned_limit_bytes = options.pinned_bytes;
    pool.pins_ahead = true;
    pool.poison = options.poisons_blocks;
    pool.allocator = runner->host_memory();
    pace given;
    given.max_gap = std::chrono::duration<double, std::milli>(options.max_gap_ms);
    given.kept = {options.checkpoint_bytes.value_or(
                      std::min(n_snapshots_each * runner->snapshot_memory_bytes(),
                               options.host_memory_bytes / host_share)),
                  options.checkpoint_every};
    sched_.reset(
        new scheduler(std::move(runner), block_pool::create(std::move(pool)), 1024, given));
}

std::shared_ptr<request> engine::submit(request_options options) {
    check(options.sampling, source_->n_vocab());
    auto wanted = std::make_shared<request>(std::move(options));
    const auto& opened_with = source_->adapter_scales();
    if (wanted->lora.empty()) wanted->lora = opened_with;
    if (wanted->lora.size() != opened_with.size()) {
        throw error(errc::request, "lora has ", wanted->lora.size(),
                    " scales, but the engine loaded ", opened_with.size(), " adapters");
    }
    if (wanted->is_steered && wanted->only_attends) {
        throw error(errc::request, "only_attends and is_steered exclude each other");
    }
    if (!wanted->only_attends) {
        // As delivery::n_left counts.
        const int n_room = facts_.n_ctx + 1 - static_cast<int>(wanted->prompt.size());
        const int n_tokens =
            wanted->n_discard > 0 ? wanted->max_tokens : std::min(wanted->max_tokens, n_room);
        auto picker = std::make_unique<sampler>(
            source_->vocab(), wanted->sampling, llama_model_n_ctx_train(source_->get()),
            filters_.make(wanted->sampling, wanted->constraint_command, *wanted->unwanted,
                          n_tokens));
        picker->accept_prompt(wanted->prompt, wanted->is_steered);
        // Deterministic steps are a token each. What is steered and picked slowly would have the
        // engine thread wait to know a tie.
        const bool is_slow = picker->is_slow();
        if (wanted->is_alone || !facts_.can_take_back || (wanted->is_steered && is_slow)) {
            wanted->n_draft_max = 0;
        } else if (wanted->is_steered || is_slow) {
            const auto row_bytes = sizeof(float) * static_cast<std::size_t>(n_vocab());
            wanted->n_draft_max =
                std::min(wanted->n_draft_max, static_cast<int>(draft_logits_bytes / row_bytes));
        }
        wanted->picker = std::move(picker);
    }
    if (wanted->capture && !wanted->only_attends) {
        const auto n_columns = static_cast<int>(wanted->prompt.size());
        sched_->pool()->prepare(wanted->capture->layout(n_columns).size_bytes);
    }
    sched_->submit(wanted);
    return wanted;
}

void engine::answer(const std::shared_ptr<request>& wanted, forward_pass& pass, pass_answer given) {
    for (const auto id : given.ids) source_->check_token(id, "ids");
    sched_->answer(wanted, pass, std::move(given));
}

void engine::close(std::chrono::duration<double> limit) {
    source_->rpc().leave();
    sched_->close(limit);
    filters_.close();
}

engine_health engine::health() const {
    const auto seen = sched_->health();
    const bool is_forked = sched_->is_forked();  // the thread belongs to the parent
    return {name_of(is_forked ? engine_phase::ended : seen.phase), seen.quiet_s, seen.n_steps,
            sched_->is_lost()};
}

}  // namespace kqview
