// The production runner: a llama.cpp context with its tap.
// Owner:   the scheduler.
// Threads: constructed on a Python thread, then used by the engine thread alone; `layers`: any.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/heartbeat.h"
#include "base/ids.h"
#include "llama/backend.h"
#include "llama/context.h"
#include "llama/context_params.h"
#include "llama/model.h"
#include "memory/host_buffer.h"
#include "sample/logit_scan.h"
#include "sched/runner.h"
#include "state/kv_layout.h"
#include "tap/host/row_sink.h"
#include "tap/plan.h"
#include "tap/step_result.h"
#include "tap/tap.h"

namespace kqview {

struct graph_counters {
    std::atomic<std::uint64_t> n_built{0};
    std::atomic<std::uint64_t> n_reused{0};
    std::atomic<int> n_nodes_added{0};  // to the newest graph
    std::atomic<int> n_attended{0};     // layers of a graph whose attention is ours
};

class llama_runner final : public runner {
public:
    llama_runner(std::shared_ptr<model> source, const context_options& options);
    ~llama_runner() override;

    // A model that guesses, with a context of its own.
    void add_draft(std::unique_ptr<llama_runner> smaller) { draft_ = std::move(smaller); }
    runner* draft_model() override { return draft_.get(); }

    int n_slots() const override { return context_->n_slots(); }
    int n_ctx() const override { return context_->n_ctx(); }
    int n_chunk() const override { return context_->n_chunk(); }
    int n_vocab() const override { return model_->n_vocab(); }
    int n_outputs() const override { return context_->n_outputs(); }
    bool can_truncate() const override { return model_->can_truncate(); }
    bool can_take_back() const override {
        const bool can_drop =
            model_->can_truncate() || context_->keeps_states() || context_->predicts();
        return can_drop && context_->has_whole_cache();
    }
    std::size_t n_untold(slot_id slot, std::size_t n_tokens) override;
    bool needs_states() const override { return context_->predicts(); }
    int n_predicting() const override { return context_->n_predicting(); }
    void predict_with(int i_layer) override { context_->predict_with(i_layer); }
    int n_taken_back_most() const override { return context_->n_dropped_most(); }
    bool reads_on_host() const override { return !tap_->devices().layers().device(); }
    bool can_draft_rows(std::size_t n_slots) const override;
    bool is_causal() const override { return context_->is_causal(); }
    bool has_cache() const override { return context_->has_cache(); }
    bool can_split_embedding() const override {
        return context_->has_cache() && context_->pooling() == "last";
    }
    // With a cache, llama.cpp splits prompts of different lengths into several ubatches, and pools
    // each by itself: only what needs no pooling, or the last token alone, comes out right.
    bool can_mix_embeddings() const override {
        return can_split_embedding() || !context_->has_cache() || context_->pooling() == "none";
    }
    bool is_end_of_generation(token_id id) const override;

    void watch(std::shared_ptr<heartbeat> heart) override {
        if (draft_) draft_->watch(heart);
        context_->watch(std::move(heart));
    }

    // The members below that call llama.cpp raise decode, or out_of_memory, if ggml had to abort.
    // Every later call then raises decode, because the context is unusable.
    void want(const graph_plan& plan) override;
    int n_prompt_rows() const override { return tap_->devices().n_prompt_rows(); }
    void use(const lora_scales& scales) override;
    step_result decode(std::span<const step_token> tokens, std::span<const step_rows> rows,
                       step_output output) override;
    float* logits(int i_token) override;
    token_id likeliest(int i_token) override;
    token_score score(int i_token, token_id id, int n_top) override;
    text_embedding embedding(slot_id slot, int i_token, int n_tokens) override;
    void await(transfer_id rows) override;
    void copy(slot_id from, slot_id to) override;
    bool truncate(slot_id slot, int n_keep) override;

    bool needs_snapshots() const override { return context_->needs_snapshots(); }
    bool drops_tail(slot_id slot, int n_keep) const override {
        return broken_ || context_->drops_tail(slot, n_keep);
    }
    std::size_t snapshot_bytes(slot_id slot) override;
    void write_snapshot(slot_id slot, std::span<std::byte> out) override;
    void read_snapshot(slot_id slot, std::span<const std::byte> bytes, int n_tokens) override;

    bool discard(slot_id slot, std::span<const token_range> gone) override;
    const kv_layout& layout_from(slot_id slot, std::span<const std::byte> memory) override;
    const kv_layout& layout_for(slot_id slot, bool is_empty) override;
    std::size_t state_bytes(slot_id slot) override;
    void write_state(slot_id slot, std::span<std::byte> out) override;
    void read_state(slot_id slot, std::span<const std::byte> memory, int n_tokens) override;

    // As context::pooling(): how embeddings are made.
    const std::string& pooling() const { return context_->pooling(); }
    std::size_t memory_bytes() const {
        return context_->memory_bytes() + (draft_ ? draft_->memory_bytes() : 0);
    }
    std::size_t snapshot_memory_bytes() const { return context_->snapshot_memory_bytes(); }
    // Why tokens cannot be removed from the middle of a slot; empty if they can.
    std::string shift_obstacle() const { return context_->shift_obstacle(); }

    // What can be captured, found in the graph that llama.cpp reserved.
    const capture_source& source() const { return tap_->source(); }

    // Host memory that devices write rows to directly; null: ordinary memory will do.
    std::shared_ptr<host_allocator> host_memory() const;

    // Shared, so that they can be read from any thread and after the runner is gone.
    std::shared_ptr<const graph_counters> graphs() const { return graphs_; }
    std::shared_ptr<copy_counters> copies() const { return tap_->devices().layers().counters(); }

private:
    template <typename Call>
    auto unbroken(const char* activity, Call&& call);
    [[noreturn]] void break_down(const llama_abort& why, const char* activity);
    void go_back_to(const graph_plan& plan);
    void publish_graphs();
    void tell_states(std::span<const step_token> tokens);
    void keep_states(slot_id slot, std::size_t n_tokens);
    row_target target_of(std::span<const step_token> tokens, const step_rows& rows) const;

    std::shared_ptr<model> model_;
    std::unique_ptr<tap> tap_;  // outlives the context's graphs
    std::unique_ptr<context> context_;
    std::unique_ptr<llama_runner> draft_;
    std::optional<error> broken_;
    const std::shared_ptr<std::atomic<bool>> is_device_lost_ =
        std::make_shared<std::atomic<bool>>(false);
    std::optional<kv_layout> layout_;
    logprob_scan scan_;
    const std::shared_ptr<graph_counters> graphs_ = std::make_shared<graph_counters>();
};

// Runs a call of llama.cpp or of its devices.
template <typename Call>
auto llama_runner::unbroken(const char* activity, Call&& call) {
    if (broken_) throw error(*broken_);
    try {
        const llama_activity guard(activity);
        return std::forward<Call>(call)();
    } catch (const llama_abort& why) {
        break_down(why, activity);
    }
}

}  // namespace kqview
