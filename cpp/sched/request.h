// What a caller asks for and what comes back: plain values between the Python threads and the
// engine thread. A request is shared by both sides; only its mailbox and its flags change after
// submission.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "memory/block_pool.h"
#include "sample/params.h"
#include "sched/runner.h"
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

// Rows of a token, or of a run of prompt tokens: a lease and how to read it.
struct captured_rows {
    std::shared_ptr<lease> block;
    std::shared_ptr<const capture_plan> plan;
    row_layout layout;
    const std::byte* written_at = nullptr;  // where the kernel of that step wrote first
};

struct token_event {
    token_id id;
    float logprob;  // NaN when not asked for
    std::vector<std::pair<token_id, float>> top;
    captured_rows rows;   // no block when nothing is captured, or dropped
    int n_discarded = 0;  // tokens of the slot that had been discarded to make room before this row
};

// Rows of the prompt's tokens start .. start + n_rows, or its embedding.
struct prompt_event {
    int start = 0;
    int n_rows = 0;
    captured_rows rows;              // no block when it was dropped
    std::vector<float> embedding{};  // F32 ne=[n_values, n_rows]; the consumer's own
};

struct request_usage {
    int prompt_tokens = 0;
    int cached_tokens = 0;  // of the prompt, found in a cache
    int completion_tokens = 0;
    double prefill_s = 0.0;
    double decode_s = 0.0;
};

struct end_event {
    finish_reason reason = finish_reason::cancelled;
    request_usage usage;
    std::optional<error> failure;  // with reason error
};

class mailbox;

// What a caller asks for, as plain values.
struct request_options {
    std::vector<token_id> prompt;
    sampling_params sampling;
    std::string constraint_library;  // path of llguidance's, for a json_schema or a regex
    int max_tokens = 256;
    std::vector<token_id> stop_tokens;
    std::shared_ptr<const capture_plan> capture;  // null: nothing is captured
    int n_prompt_rows = 0;      // of the prompt's last tokens, whose rows are captured too
    bool only_attends = false;  // ends with the prompt: no token is sampled
    bool embeds = false;        // and its embedding is wanted; needs only_attends
    full_policy on_full = full_policy::raise;
    std::chrono::duration<double> wait_limit{10.0};  // with full_policy::wait
    int run_ahead = 8;                               // tokens computed before they are taken
    int priority = 0;                                // larger first, then order of arrival
    // Shortest run of tokens that is kept by a shift: equal in cache and prompt, behind others that
    // differ. 0: only what both begin with is reused.
    int n_reuse_min = 0;
    // When the slot is full and tokens are due: discarded behind the first n_keep. 0: the request
    // ends then.
    int n_discard = 0;
    int n_keep = 0;            // n_keep + n_discard tokens fit into a slot
    slot_id wanted_slot = -1;  // the slot it must run in, -1 = any
};

struct request : request_options {
    request() = default;
    explicit request(request_options wanted) : request_options(std::move(wanted)) {
        std::sort(stop_tokens.begin(), stop_tokens.end());  // they are searched for every token
    }

    request_id id = 0;
    std::unique_ptr<token_picker> picker;            // null when only_attends; moves to the slot
    std::chrono::duration<double> pick_limit{20.0};  // for one token of a slow picker, by the clock
    std::shared_ptr<mailbox> box;
    std::atomic<slot_id> slot{-1};  // set at admission
};

// The end of a request that has no slot.
inline end_event end_without_slot(const request& wanted, finish_reason reason,
                                  std::optional<error> failure = {}) {
    end_event end{reason, {}, std::move(failure)};
    end.usage.prompt_tokens = static_cast<int>(wanted.prompt.size());
    return end;
}

// Made before memory can be short.
inline const error no_memory_error(errc::out_of_memory,
                                   "no memory left; lower n_ctx or hold fewer tokens");

// The exception being handled, as the failure of a request: the engine lets nothing escape.
inline error failure_of_request() noexcept {
    return running_failure("engine", errc::decode, no_memory_error);
}

}  // namespace kqview
