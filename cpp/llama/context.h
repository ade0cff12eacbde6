// Owns a llama_context and the batch that feeds it.
// Threads: the engine thread alone, after the constructor.
// The caller keeps a tap scope (tap/tap.h) around every call that may build or run a graph.
#pragma once

#include <llama.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/compute_pool.h"
#include "base/heartbeat.h"
#include "base/ids.h"
#include "llama/context_params.h"
#include "llama/model.h"
#include "llama/sequence_state.h"
#include "llama/token_states.h"

namespace kqview {

class context {
public:
    // Raises request for options out of range, out_of_memory or model_load when llama.cpp refuses.
    context(std::shared_ptr<model> source, const context_options& options);

    int n_ctx() const { return n_ctx_; }      // per slot, as the user asked
    int n_chunk() const { return n_chunk_; }  // the most tokens per decode
    int n_slots() const { return n_slots_; }
    int n_outputs() const { return n_outputs_; }  // the most tokens of a decode that want logits
    // Of weights, KV cache and compute buffers, on the host and on devices.
    std::size_t memory_bytes() const;
    // How a text becomes an embedding, as in context_options; "" if this context gives none.
    const std::string& pooling() const { return pooling_; }
    // Encoders and diffusion models have none.
    bool has_cache() const {
        return llama_get_memory(handle_.get()) != nullptr && !model_->is_encoder();
    }

    // On CPUs, a decode reports progress to `heart` for each node of the graph, and stops early
    // once `heart` is stopped.
    void watch(std::shared_ptr<heartbeat> heart) { heart_ = std::move(heart); }

    // Decodes `tokens` as one ubatch (see "Slots, batches and rows" in the scheduler). On error,
    // the slots' caches keep their previous content. Raises decode, and closed once it is stopped.
    // `embeds`: the tokens are a run each of some slots, whose embeddings are wanted; needs
    // pooling().
    void decode(std::span<const step_token> tokens, bool embeds = false);

    // Scales of the model's adapters for the decodes that follow. If they change, llama.cpp builds
    // its graphs and reserves its compute buffers anew with the next decode.
    void use(const lora_scales& scales);

    // F32 ne=[n_vocab] of batch token `i_token` of the last decode, which must have requested them.
    // Valid, and writable, until the next decode.
    float* logits(int i_token);

    // F32 ne=[n_values] of batch token `i_token` of the last decode: what token_states keep. Needs
    // context_options::tells_states.
    const float* state(int i_token);
    // Where a context that predicts takes and leaves them; null: this one does not.
    token_states* states() { return states_.get(); }
    bool predicts() const { return states_ != nullptr; }
    // Of its layers that predict: how many there are, and which of them computes from here on.
    int n_predicting() const;
    void predict_with(int i_layer);

    // F32 ne=[n_values, n_rows] of the last decode, which must have been for embeddings, with
    // `n_tokens` tokens of this slot from batch token `i_token` on: one row per token if nothing
    // pools, otherwise one.
    std::vector<float> embedding(slot_id slot, int i_token, int n_tokens);

    // Copies slot `from` to slot `to`; llama.cpp copies the whole stream before the next decode.
    void copy(slot_id from, slot_id to);

    // Keeps the first `n_keep` positions of a slot. Returns false, without any change, if the cache
    // cannot drop that tail, or would then lack positions that a sliding window needs.
    bool truncate(slot_id slot, std::int32_t n_keep);
    // How many of the last step's tokens a slot can drop at most, one of which stays: without a
    // limit of cells, of recurrent state as many as it is kept for (context_options::guesses).
    int n_dropped_most() const;
    bool keeps_states() const { return !kept_states_.empty(); }
    // Whether that would drop any tail, as far as is known before: not if there is recurrent state.
    bool drops_tail(slot_id slot, std::int32_t n_keep) const;

    // True if a query sees only what precedes it. Otherwise keys depend on the tokens that followed
    // them when they were computed.
    bool is_causal() const;

    // Why positions of this context cannot be moved; empty if they can. Any thread.
    std::string shift_obstacle() const;

    // Removes these positions, which are ascending and disjoint, and moves the following ones down,
    // re-rotating their keys; the cells keep the gaps. Returns false, without any change, if this
    // cache cannot. After an error, the slot's state is undefined.
    bool discard(slot_id slot, std::span<const token_range> gone);

    // Applies the position shifts that llama.cpp defers to the next decode; saving a slot would not
    // apply them.
    void flush_shifts();

    // True if a slot always holds all of its tokens' cells, and those of each token for itself.
    bool has_whole_cache() const;
    // How many tokens before it a query needs of a ring, if there are as many; 1 where that depends
    // on its position.
    std::uint32_t n_seen_least() const;
    // Cells that a slot has in a cache that keeps only what windows see; 0: there is none.
    std::size_t n_ring_cells() const;
    // The position of each of them, -1 for none of the slot's. Also while a decode runs, on the
    // thread that runs it.
    void read_ring(slot_id slot, std::span<std::int32_t> positions) const;
    // The parts of a slot's cache. Raises unsupported_model for one that cannot be saved whole.
    std::vector<memory_part> parts() const;
    // A slot's parts as bytes (sequence_state.h): their sizes; written one after the other.
    std::vector<std::size_t> part_bytes(slot_id slot);
    void write_state(slot_id slot, std::span<std::byte> out);

    // Replaces a slot's cache by `n_tokens` tokens from validated bytes (state/ses1.h), which must
    // live only for the call. Raises internal if llama.cpp refused them; the slot's state is then
    // undefined.
    void read_state(slot_id slot, std::span<const std::byte> bytes, int n_tokens);

    // Snapshots of the parts that cannot drop a tail, or not all of it: recurrent state, compressed
    // keys, caches that keep only what windows see. Those of saved slots are checked before.
    bool needs_snapshots() const { return !tail_parts_.empty(); }
    // Of those parts, of all slots: what the context itself takes for them.
    std::size_t snapshot_memory_bytes() const;
    std::size_t snapshot_bytes(slot_id slot);
    void write_snapshot(slot_id slot, std::span<std::byte> out);
    // Cuts a slot back to `n_tokens`. After an error its state is undefined.
    void read_snapshot(slot_id slot, std::span<const std::byte> bytes, int n_tokens);

    // Blocks until no step runs. decode() only waits for those whose logits are asked for.
    void synchronize();

    // Drops every graph that llama.cpp keeps, and reserves memory for the worst case anew.
    void reserve();

    std::int32_t n_graphs_reused() const;

    // After llama_abort: leaks llama.cpp's context, because freeing it waits for its devices, and
    // ends the process if they failed. Afterwards this object may only be destroyed.
    void abandon() noexcept { (void)handle_.release(); }

private:
    struct context_deleter {
        void operator()(llama_context* handle) const { llama_free(handle); }
    };
    struct batch_owner {
        llama_batch batch{};
        ~batch_owner();
    };

    // What recurrent state is kept of a slot, besides that of its last token. llama.cpp would also
    // go back to a state that it has kept of another step.
    struct kept_states {
        std::int32_t n_droppable = 0;  // of the last step, which has the slot's last tokens
        bool has_dropped = false;      // the state is one of these until the next step
        bool is_lost = false;          // a step failed, so it may be that of no token
    };

    kept_states* kept_of(slot_id slot);  // null: none are kept
    bool drop(kept_states& kept, slot_id slot, std::int32_t n_keep);
    void note_step(std::span<const step_token> tokens, bool has_failed);
    void open_embeddings(const context_options& options);
    void open_states(const context_options& options);
    void set_embeds(bool embeds);
    bool has_what_is_seen(slot_id slot, std::int32_t n_keep) const;
    void add_states(std::span<const step_token> tokens);
    void take_states(std::span<const step_token> tokens);
    int decode_until_stopped();
    static bool is_over(void* self);

    std::shared_ptr<model> model_;  // outlives the context
    // Keeps the compute threads.
    const std::shared_ptr<compute_pool> pool_ = compute_pool::shared();
    std::unique_ptr<llama_context, context_deleter> handle_;
    batch_owner batch_;
    int n_ctx_;
    int n_chunk_;
    int n_slots_;
    int n_outputs_;
    std::string pooling_;
    std::unique_ptr<token_states> states_;
    std::vector<float> states_before_;  // F32 ne=[n_values, n_tokens], of a step
    std::vector<memory_part> tail_parts_;
    std::vector<kept_states> kept_states_;  // by slot; empty: none are kept
    bool embeds_ = false;                   // what llama.cpp was told last
    const std::vector<std::uint64_t> aborted_decodes_;
    std::uint64_t n_decodes_ = 0;
    std::shared_ptr<heartbeat> heart_;
    bool may_stop_ = false;     // a decode runs: what else llama.cpp computes is not broken off
    int n_nodes_to_abort_ = 0;  // of aborted_decodes; 0: none
};

}  // namespace kqview
