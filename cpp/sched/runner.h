// The engine loop's interface to the model. llama_runner.h has the production implementation; tests
// inject fakes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "base/heartbeat.h"
#include "base/ids.h"
#include "sample/logit_scan.h"
#include "state/kv_layout.h"
#include "tap/plan.h"
#include "tap/step_result.h"

namespace kqview {

// Rows to write during the step. Their queries are the step's tokens from `i_token` on.
struct step_rows {
    std::shared_ptr<const capture_plan> plan;
    int i_token;
    int n_visible;  // columns the first query sees; each further one sees one more, up to n_columns
    row_layout layout;
    std::byte* data;
};

// Embedding of a text: one row if the model pools, otherwise one per token. F32 ne=[n_values,
// n_rows].
struct text_embedding {
    int n_rows;
    std::vector<float> values;
};

// What is read of a step's last layer: logits of the tokens that want them, embeddings in their
// place, or neither.
enum class step_output : std::uint8_t { logits, embeddings, none };

// Threads: the engine thread only.
class runner {
public:
    virtual ~runner() = default;

    // Called once, before the first step. A decode reports progress to `heart`, and fails with
    // errc::closed once `heart` is stopped.
    virtual void watch(std::shared_ptr<heartbeat> /*heart*/) {}

    virtual int n_slots() const = 0;
    virtual int n_ctx() const = 0;    // tokens per slot
    virtual int n_chunk() const = 0;  // the most prompt tokens per step
    virtual int n_vocab() const = 0;  // logits per token
    // The most tokens of one prompt whose logits a step can give.
    virtual int n_outputs() const { return std::numeric_limits<int>::max(); }
    virtual bool can_truncate() const = 0;
    // True if a slot can always drop the tokens of its last step.
    virtual bool can_take_back() const { return can_truncate(); }
    // How many of them at most; one token of the step stays.
    virtual int n_taken_back_most() const { return std::numeric_limits<int>::max(); }
    // False: nodes of a device read rows, those of one run or of one token of each slot.
    virtual bool reads_on_host() const { return true; }
    // For a model that takes each token with what another one made of the token before (its state):
    // of a slot's text, how many tokens come before the first that can be evaluated. Forgets what
    // the other one made of tokens that are not of this text.
    virtual std::size_t n_untold(slot_id /*slot*/, std::size_t /*n_tokens*/) { return 0; }
    // Whether it is one: what it holds of guessed tokens was made of states of its own.
    virtual bool needs_states() const { return false; }
    // How many layers predict: each guesses one token further than the one before it, with keys and
    // values of its own. A single one guesses any number of tokens.
    virtual int n_predicting() const { return 1; }
    // Which of them computes the steps from here on.
    virtual void predict_with(int /*i_layer*/) {}
    // A faster model with the same vocabulary and slots, to guess with; null: there is none.
    virtual runner* draft_model() { return nullptr; }
    // True if a step of several tokens of each of so many slots can give each token its rows.
    virtual bool can_draft_rows(std::size_t /*n_slots*/) const { return true; }
    // False: the cached keys and values of a prompt depend on all of its tokens.
    virtual bool is_causal() const { return true; }
    // Without a cache, a prompt is one step, every query sees all of it, and nothing is kept.
    virtual bool has_cache() const = 0;
    // For an embedding: may the prompt span several steps?
    virtual bool can_split_embedding() const = 0;
    // May one step embed prompts of different lengths? It may always embed prompts of one length,
    // in adjacent slots if there is a cache.
    virtual bool can_mix_embeddings() const = 0;
    virtual bool is_end_of_generation(token_id id) const = 0;

    // Adds the nodes of `plan` to every step from here on.
    virtual void want(const graph_plan& plan) = 0;

    // The most prompt queries whose rows one step can provide, under the wanted plan.
    virtual int n_prompt_rows() const { return std::numeric_limits<int>::max(); }

    // The scales of the model's LoRA adapters, for every step from here on. Keys and values in a
    // cache depend on the scales of the steps that computed them.
    virtual void use(const lora_scales& /*scales*/) {}

    // Decodes one step: one token each of adjacent slots, or equal runs that begin with it; a run
    // of one slot's prompt; or, without rows, equal runs of adjacent slots' prompts. Throws error,
    // and leaves the caches as they were. Device rows may still be in flight on return: see await.
    // With embeddings, the tokens are a run each of one or more slots. Only with logits do tokens
    // that want them have any.
    virtual step_result decode(std::span<const step_token> tokens, std::span<const step_rows> rows,
                               step_output output) = 0;
    virtual float* logits(int i_token) = 0;
    // The likeliest token after token `i_token` of the last step, whose logits were wanted.
    virtual token_id likeliest(int i_token) = 0;
    // How the model judges `id` after token `i_token` of the last step, whose logits were wanted;
    // with the n_top best tokens.
    virtual token_score score(int i_token, token_id id, int n_top) = 0;
    // Result of the last step, which embedded `n_tokens` of this slot, from batch token `i_token`
    // on.
    virtual text_embedding embedding(slot_id slot, int i_token, int n_tokens) = 0;

    // Blocks until the rows of a step, and of all earlier steps, are in their blocks. Throws error
    // if they cannot get there.
    virtual void await(transfer_id /*rows*/) {}

    // Copies the whole cache of slot `from` to slot `to`. After an error, the content of `to` is
    // undefined.
    virtual void copy(slot_id from, slot_id to) = 0;

    // Keeps the first n_keep tokens of a slot; returns false if the cache cannot (recurrent state).
    // Does not throw.
    virtual bool truncate(slot_id slot, int n_keep) = 0;

    // True if caches have parts that cannot drop every tail: truncate() may then need a snapshot of
    // them.
    virtual bool needs_snapshots() const { return false; }
    // Of such a cache: whether truncate() needs none.
    virtual bool drops_tail(slot_id /*slot*/, int n_keep) const { return n_keep == 0; }
    // Those parts of a slot as bytes, for this runner alone: their size, and written to `out`,
    // which is as large.
    virtual std::size_t snapshot_bytes(slot_id /*slot*/) { return 0; }
    virtual void write_snapshot(slot_id /*slot*/, std::span<std::byte> /*out*/) {}
    // Cuts a slot back to `n_tokens` with what was written when it held these and no more. It still
    // holds them. After an error, the cache's content is undefined.
    virtual void read_snapshot(slot_id /*slot*/, std::span<const std::byte> /*bytes*/,
                               int /*n_tokens*/) {}

    // Removes ranges of tokens, ascending and disjoint, and moves the positions of the following
    // tokens down to close the gaps; write_state and read_state then close them in memory too.
    // False: the cache cannot, and nothing has changed. After an error, the slot's state is
    // undefined.
    virtual bool discard(slot_id slot, std::span<const token_range> gone) = 0;

    // A slot's cache as bytes: the parts of its memory (state/ses1.h). All raise unsupported_model
    // if it cannot be saved whole. layout_from learns the layout of those bytes from a slot of this
    // context that holds tokens, layout_for with the help of an idle slot.
    virtual const kv_layout& layout_from(slot_id slot, std::span<const std::byte> memory) = 0;
    virtual const kv_layout& layout_for(slot_id slot, bool is_empty) = 0;
    // Exactly the bytes that write_state writes; applies pending shifts first.
    virtual std::size_t state_bytes(slot_id slot) = 0;
    virtual void write_state(slot_id slot, std::span<std::byte> out) = 0;
    // Replaces the slot's cache by validated bytes of this many tokens. After an error, the cache's
    // content is undefined.
    virtual void read_state(slot_id slot, std::span<const std::byte> memory, int n_tokens) = 0;
};

}  // namespace kqview
