// What the engine loop asks of a model (runner) and of what chooses its tokens (token_picker).
// llama_runner.h has the real ones, tests inject fakes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/heartbeat.h"
#include "base/ids.h"
#include "state/kv_layout.h"
#include "tap/plan.h"
#include "tap/step_result.h"

namespace kqview {

struct step_token {
    slot_id slot;
    token_id id;
    std::int32_t position;
    bool wants_logits;
};

// Rows to write during the step for the queries that are the step's tokens from `i_token` on.
struct step_rows {
    std::shared_ptr<const capture_plan> plan;
    int i_token;
    int n_visible;  // columns the first query sees; each next one sees one more, up to n_columns
    row_layout layout;
    std::byte* data;
};

// Of a text: one row where the model pools, else a row a token. F32 ne=[n_values, n_rows].
struct text_embedding {
    int n_rows;
    std::vector<float> values;
};

// Of the engine thread alone.
class runner {
public:
    virtual ~runner() = default;

    // Called once, before the first step. `heart` gets signs of life from within a decode, and once
    // it is stopped the decode breaks off with errc::closed.
    virtual void watch(std::shared_ptr<heartbeat> /*heart*/) {}

    virtual int n_slots() const = 0;
    virtual int n_ctx() const = 0;    // tokens of a slot
    virtual int n_chunk() const = 0;  // most prompt tokens of one step
    virtual int n_vocab() const = 0;  // logits of a token
    virtual bool can_truncate() const = 0;
    // False: what is cached of a prompt depends on all of it.
    virtual bool is_causal() const { return true; }
    // Without a cache a prompt is one step, every query sees all of it, and nothing stays.
    virtual bool has_cache() const = 0;
    // May the tokens before the last step's be decoded in earlier ones when an embedding is wanted?
    virtual bool can_split_embedding() const = 0;
    virtual bool is_end_of_generation(token_id id) const = 0;

    // Provides the nodes of `plan` in every step from now on.
    virtual void want(const graph_plan& plan) = 0;

    // Queries of a prompt whose rows one step can provide, for the plan that is wanted.
    virtual int n_prompt_rows() const { return std::numeric_limits<int>::max(); }

    // Tokens of one step: one token each of adjacent slots, or a run of one slot's prompt. Throws
    // error; the caches are then as before. Rows of devices may be on their way still: see await.
    // `embeds`: the tokens are a run of one slot, and its embedding is wanted in place of logits.
    virtual step_result decode(std::span<const step_token> tokens, std::span<const step_rows> rows,
                               bool embeds) = 0;
    virtual float* logits(int i_token) = 0;
    // Of the last step, which embedded `n_tokens` of this slot.
    virtual text_embedding embedding(slot_id slot, int n_tokens) = 0;

    // Blocks until the rows of a step, and of all before, are in their blocks. Throws error: they
    // are not.
    virtual void await(transfer_id /*rows*/) {}

    // Makes slot `to` hold what slot `from` holds. Costs its whole cache. After an error `to` holds
    // anything.
    virtual void copy(slot_id from, slot_id to) = 0;

    // Keeps the first n_keep tokens of a slot; false when the cache cannot (recurrent state).
    // Throws nothing.
    virtual bool truncate(slot_id slot, int n_keep) = 0;

    // Removes ranges of tokens, in order and apart, and gives those that follow the positions that
    // close the gaps; write_state and read_state then close them in memory too. False: the cache
    // cannot, and nothing has changed. An error leaves the slot in no known state.
    virtual bool discard(slot_id slot, std::span<const token_range> gone) = 0;

    // A slot's cache as llama.cpp's bytes (state/ses1.h). All raise unsupported_model where a cache
    // cannot be saved whole. What those bytes look like: from some of an own slot with tokens, or
    // found by means of an idle slot.
    virtual const kv_layout& layout_from(std::span<const std::byte> kv_data) = 0;
    virtual const kv_layout& layout_for(slot_id slot, bool is_empty) = 0;
    // Exactly what write_state writes, with pending shifts carried out.
    virtual std::size_t state_bytes(slot_id slot) = 0;
    virtual void write_state(slot_id slot, std::span<std::byte> out) = 0;
    // Replaces the slot's cache by checked bytes with this many cells. False: the cache is unknown
    // now.
    virtual bool read_state(slot_id slot, std::span<const std::byte> bytes, int n_tokens) = 0;
};

struct picked_token {
    token_id id;
    float logprob;
    std::vector<std::pair<token_id, float>> top;
};

// Chooses the tokens of one request. Made and fed the prompt on the thread that submits the request,
// because that can take long (a grammar, DRY); then used by the engine thread, or by its sampler
// lane where picking can take long too.
class token_picker {
public:
    virtual ~token_picker() = default;
    // F32 ne=[n_vocab]; may be changed in place.
    virtual picked_token pick(float* logits) = 0;

    // Can pick() keep the engine thread from other requests' tokens?
    virtual bool is_slow() const { return false; }
    // Any thread: a running pick() and every later one end soon, with a token or an error that is
    // dropped.
    virtual void stop() noexcept {}
};

}  // namespace kqview
