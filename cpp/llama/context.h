// Owns a llama_context and the batch that feeds it.
// Threads: the engine thread alone, after the constructor.
// The caller keeps a tap scope (tap/tap.h) around every call that may build or run a graph.
#pragma once

#include <llama.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/heartbeat.h"
#include "base/ids.h"
#include "llama/model.h"

namespace kqview {

enum class flash_attention { automatic, off, on };

struct context_options {
    int n_ctx = 0;  // tokens a slot can hold; 0 = what the model was trained with
    int n_slots = 1;
    int n_batch = 2048;
    int n_ubatch = 512;
    int n_threads = 1;
    int n_threads_batch = 0;  // 0 = as n_threads
    flash_attention flash = flash_attention::automatic;
    std::string kv_type = "f16";
    bool swa_full = true;
    std::string pooling;  // "none", "mean", "cls", "last", "rank"; "" = what the model's file says
    std::size_t host_memory_bytes = 0;  // what this process may use; 0 = do not check
    // Tests only: numbers of decodes, from 1, that llama.cpp is made to abort midway. CPU only.
    std::vector<std::uint64_t> aborted_decodes;
};

struct batch_token {
    slot_id slot;
    token_id id;
    std::int32_t position;
    bool wants_logits;
};

// Raises request for options out of range, and out_of_memory if host memory cannot hold the
// context: llama.cpp writes to a cache as it makes it, and a system that promises more memory than
// it has would then kill the process.
void check_memory(const model& source, const context_options& options);

// Raises out_of_memory if a device cannot hold its part of the model and the context, before any of
// it is loaded: llama.cpp plans both without weights. Reads only the file's header, and only if
// there is a device. Also raises what the constructor of model raises, and request for options out
// of range.
void check_device_memory(const model_options& wanted, const context_options& options);

// Raises what opening this model and context would raise, as far as that can be known without the
// weights: not a model file, options out of range, too little memory. Allocates next to nothing.
void check_opening(const model_options& wanted, const context_options& options);

class context {
public:
    // Raises request for options out of range, out_of_memory or model_load when llama.cpp refuses.
    context(std::shared_ptr<model> source, const context_options& options);

    int n_ctx() const { return n_ctx_; }      // per slot, as the user asked
    int n_chunk() const { return n_chunk_; }  // most tokens of one decode
    int n_ubatch() const { return n_ubatch_; }
    int n_slots() const { return n_slots_; }
    // How a text becomes an embedding, as in context_options; "" if this context gives none.
    const std::string& pooling() const { return pooling_; }
    // Encoders and diffusion models have none.
    bool has_cache() const {
        return llama_get_memory(handle_.get()) != nullptr &&
               !llama_model_has_encoder(model_->get());
    }

    // On CPUs a decode gives a sign of life for each node of the graph and, once stopped, breaks
    // off.
    void watch(std::shared_ptr<heartbeat> heart) { heart_ = std::move(heart); }

    // Decodes `tokens` as one ubatch (see "Slots, batches and rows" in the scheduler). On error the
    // slots' caches hold what they held before. Raises decode, and closed once it is stopped.
    // `embeds`: they are a run of one slot, whose embedding is wanted; needs pooling().
    void decode(std::span<const batch_token> tokens, bool embeds = false);

    // F32 ne=[n_vocab] of batch token `i_token` of the last decode, which must have asked for it.
    // Valid, and writable, until the next decode.
    float* logits(int i_token);

    // F32 ne=[n_values, n_rows] of the last decode, which must have been of `n_tokens` tokens of
    // this slot and for its embedding: a row for each of them where nothing pools, else one.
    std::vector<float> embedding(slot_id slot, int n_tokens);

    // Makes `to` hold what `from` holds; llama.cpp copies the whole stream before the next decode.
    void copy(slot_id from, slot_id to);

    // Keeps the first `n_keep` positions of a slot. False, and nothing has changed: the cache
    // cannot drop that tail, or would lack what a sliding window sees from there.
    bool truncate(slot_id slot, std::int32_t n_keep);

    // Does a query see only what is before it? Else keys depend on what followed them when they
    // were computed.
    bool is_causal() const;

    // What saving needs to know about the cache. Raises unsupported_model if a sequence cannot be
    // saved and restored whole: no cache, recurrent state, sliding windows, several caches.
    struct cache_facts {
        std::uint32_t n_stream;
        bool has_cell_extra;  // cells carry more than a position
    };
    cache_facts cache() const;

    // Why positions of this context cannot be moved; empty if they can. Any thread.
    std::string shift_obstacle() const;

    // Removes these positions, which are in order and do not overlap, and moves those behind them
    // down, re-rotating their keys; the cells keep the gaps. False, and nothing has changed: this
    // cache cannot. An error leaves the slot in no known state.
    bool discard(slot_id slot, std::span<const token_range> gone);

    // Carries out the shifts of positions that llama.cpp postpones to the next decode; saving a
    // slot would not.
    void flush_shifts();

    // A slot's cache in llama.cpp's own bytes, exactly state_bytes() of them.
    std::size_t state_bytes(slot_id slot);
    void write_state(slot_id slot, std::span<std::byte> out);

    // Replaces a slot's cache by `n_tokens` cells from bytes that were checked (state/ses1.h);
    // llama.cpp keeps the pointer during the call only. False: it refused them, or did not put
    // cells at their positions; the slot is then in no known state.
    bool read_state(slot_id slot, std::span<const std::byte> bytes, int n_tokens);

    // Drops every graph that llama.cpp keeps, and reserves memory for the worst case again.
    void reserve();

    std::int32_t n_graphs_reused() const;

    // After llama_abort: leaves llama.cpp's context as it is, because freeing it waits for its
    // devices, and ends the process if they failed. This object may then only be destroyed.
    void abandon() noexcept { (void)handle_.release(); }

private:
    struct context_deleter {
        void operator()(llama_context* handle) const { llama_free(handle); }
    };
    struct batch_owner {
        llama_batch batch{};
        ~batch_owner();
    };

    void use_adapters();
    void open_embeddings(const context_options& options);
    void set_embeds(bool embeds);
    int decode_until_stopped();
    static bool is_over(void* self);

    std::shared_ptr<model> model_;  // outlives the context
    std::unique_ptr<llama_context, context_deleter> handle_;
    batch_owner batch_;
    int n_ctx_;
    int n_chunk_;
    int n_ubatch_;
    int n_slots_;
    std::string pooling_;
    bool embeds_ = false;                               // what llama.cpp was told last
    const std::vector<std::uint64_t> aborted_decodes_;  // sorted
    std::uint64_t n_decodes_ = 0;
    std::shared_ptr<heartbeat> heart_;
    bool may_stop_ = false;     // a decode runs: what else llama.cpp computes is not broken off
    int n_nodes_to_abort_ = 0;  // of aborted_decodes; 0: none
};

}  // namespace kqview
