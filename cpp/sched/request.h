// A request and its events: plain values that pass between Python threads and the engine thread.
// Both sides share the request; after submission only its mailbox and its flags change.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "memory/block_pool.h"
#include "sample/logit_scan.h"
#include "sample/params.h"
#include "sample/token_picker.h"
#include "sample/work_limit.h"
#include "sched/runner.h"
#include "tap/edits.h"
#include "tap/plan.h"

namespace kqview {

enum class finish_reason {
    stop,        // the model ended its text (an end-of-generation token)
    length,      // max_tokens, or the slot is full
    stop_token,  // one of the request's own stop tokens
    cancelled,
    error,
};

enum class full_policy { raise, wait, drop };  // what to do when the block pool has no room

// Rows of a token or of a run of prompt tokens: a lease and the layout of its bytes.
struct captured_rows {
    std::shared_ptr<lease> block;
    std::shared_ptr<const capture_plan> plan;
    row_layout layout;
    const std::byte* written_at = nullptr;  // where the kernel wrote first in that step
};

struct token_event {
    token_id id;
    float logprob;  // NaN when not asked for
    std::vector<std::pair<token_id, float>> top;
    captured_rows rows;   // no block if nothing is captured, or if it was dropped
    int n_discarded = 0;  // tokens discarded from the slot to make room before this row
};

class forward_pass;

// A forward pass of a steered request, whose consumer decides what follows.
struct forward_event {
    std::shared_ptr<forward_pass> pass;
    captured_rows rows;
    int n_discarded = 0;  // as in token_event
};

// Rows of the prompt's tokens start .. start + n_rows, or their scores, or the prompt's embedding.
struct prompt_event {
    int start = 0;
    int n_rows = 0;
    captured_rows rows;              // no block if it was dropped
    std::vector<float> embedding{};  // F32 ne=[n_values, n_rows]; owned by the consumer
    std::vector<token_score> scores{};
};

struct request_usage {
    int prompt_tokens = 0;
    int cached_tokens = 0;  // prompt tokens found in a cache
    int completion_tokens = 0;
    int draft_tokens = 0;     // guessed before they were generated
    int accepted_tokens = 0;  // of those, generated
    double queue_s = 0.0;     // from submission to the slot
    double prefill_s = 0.0;
    double decode_s = 0.0;
};

struct end_event {
    finish_reason reason = finish_reason::cancelled;
    request_usage usage;
    std::optional<error> failure;  // if reason is error
};

class mailbox;

// The options of a request, as plain values.
struct request_options {
    std::vector<token_id> prompt;
    sampling_params sampling;
    std::vector<std::string> constraint_command;  // runs llguidance, for a json_schema or a regex
    // Set when nobody wants the request any more, while it is being submitted.
    std::shared_ptr<stop_flag> unwanted = std::make_shared<stop_flag>(false);
    int max_tokens = 256;
    std::vector<token_id> stop_tokens;
    std::shared_ptr<const capture_plan> capture;  // null: nothing is captured
    int n_prompt_rows = 0;      // number of last prompt tokens whose rows are captured too
    bool only_attends = false;  // ends with the prompt: no token is sampled
    bool embeds = false;        // wants the prompt's embedding; needs only_attends
    // Number of last prompt tokens whose scores are wanted, fewer than the prompt has; needs
    // only_attends. Each comes with the n_top_scores best tokens.
    std::size_t n_scores = 0;
    int n_top_scores = 0;
    // The consumer gets forward passes instead of tokens, and answers each (sched/forward_pass.h).
    bool is_steered = false;
    full_policy on_full = full_policy::raise;
    std::chrono::duration<double> wait_limit{10.0};  // with full_policy::wait
    int run_ahead = 8;                               // tokens computed ahead of the consumer
    int n_draft_max = 0;  // tokens to guess at most and evaluate in one step; see prompt_lookup
    std::vector<token_id> prediction;  // how the text may go on; guesses are made of it too
    int priority = 0;                  // larger first
    std::string owner;         // of equal priority, owners take turns; then in order of arrival
    bool cache_prompt = true;  // false: nothing of the prompt comes from a cache
    // Shares no step with other requests, and its prompt is cut into steps as if there were none.
    bool is_alone = false;
    // Shortest run of tokens that a shift keeps: equal in cache and prompt, after tokens that
    // differ. 0: only the common prefix is reused.
    int n_reuse_min = 0;
    // Tokens to discard after the first n_keep when the slot is full and more tokens are due. 0:
    // the request ends instead.
    int n_discard = 0;
    lora_scales lora;                        // one per adapter of the model
    std::shared_ptr<const edit_plan> edits;  // null: the model runs as it is
    int n_keep = 0;                          // n_keep + n_discard tokens fit into a slot
    slot_id wanted_slot = -1;                // the slot it must run in, -1 = any

    const edit_keys& keys_of_edits() const { return edits ? edits->keys : no_edits; }
    // True if the score of prompt token `i` is wanted, and so the logits of the token before it.
    bool is_scored(std::size_t i) const {
        return i < prompt.size() && i + n_scores >= prompt.size();
    }
};

// What the slots have given an owner. Of the engine thread.
struct owner_share {
    int n_slots = 0;               // its requests hold now
    std::uint64_t last_slot = 0;   // when it got one last, counted in slots given
    std::uint64_t last_chunk = 0;  // the last step that had a prompt of its
};

struct request : request_options {
    request() = default;
    explicit request(request_options wanted) : request_options(std::move(wanted)) {
        std::sort(stop_tokens.begin(), stop_tokens.end());  // searched for every token
    }

    request_id id = 0;
    std::chrono::steady_clock::time_point submitted = std::chrono::steady_clock::now();
    // Null if only_attends; moves to the slot, or stays for the consumer if the request is steered.
    std::unique_ptr<token_picker> picker;
    // If it is steered: whether its consumer let the last choice stand (forward_pass.h).
    mutable std::atomic<bool> takes_own_choices{true};
    std::chrono::duration<double> pick_limit{20.0};  // wall-clock, per token of a slow picker
    std::shared_ptr<mailbox> box;
    // Common to the requests of its owner; set when it is submitted.
    std::shared_ptr<owner_share> share = std::make_shared<owner_share>();
    std::atomic<slot_id> slot{-1};  // set once it is cut down for it; -1 while parked
    std::atomic<int> n_cached{0};  // its prompt's tokens from a cache; final before its first event
    // Since when it waits for a slot; of the engine thread once it is submitted.
    std::chrono::steady_clock::time_point waits_since;

    // Of requests that wait for a slot the least is the next: whose owner holds fewer slots, then
    // whose owner got one longer ago.
    auto rank() const {
        return std::tuple(-std::int64_t{priority}, share->n_slots, share->last_slot);
    }
    bool comes_before(const request& other) const {
        return std::tuple(rank(), waits_since) < std::tuple(other.rank(), other.waits_since);
    }

    bool stops_at(token_id id) const { return std::ranges::binary_search(stop_tokens, id); }
    // Why this id ends the text instead of becoming part of it, if it does.
    template <typename Model>
    std::optional<finish_reason> end_by(const Model& model, token_id id) const {
        if (stops_at(id)) return finish_reason::stop_token;
        if (model.is_end_of_generation(id)) return finish_reason::stop;
        return std::nullopt;
    }
};

// The end of a request that never got a slot.
inline end_event end_without_slot(const request& wanted, finish_reason reason,
                                  std::optional<error> failure = {}) {
    end_event end{reason, {}, std::move(failure)};
    end.usage.prompt_tokens = static_cast<int>(wanted.prompt.size());
    return end;
}

// Constructed in advance, while memory is available.
inline const error closed_error(errc::closed, "the engine was closed; make a new Engine");
inline const error no_memory_error(errc::out_of_memory,
                                   "no memory left; lower n_ctx or hold fewer tokens");

// The current exception as the request's failure: the engine lets no exception escape.
inline error failure_of_request() noexcept {
    return running_failure("engine", errc::decode, no_memory_error);
}

}  // namespace kqview
