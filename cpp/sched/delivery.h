// Delivers tokens, prompt rows and ends to the mailboxes of their requests. Rows from the CPU are
// there when a decode returns. Rows from a device arrive while the next step computes; until then,
// the events that need them wait here as parcels.
// Owner:   the engine loop.
// Threads: the engine thread; counters: any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "sample/token_picker.h"
#include "sched/forward_pass.h"
#include "sched/mailbox.h"
#include "sched/parking.h"
#include "sched/request.h"
#include "sched/runner.h"
#include "sched/sampler_lane.h"
#include "sched/slot_table.h"
#include "tap/step_result.h"

namespace kqview {

// Statistics of an engine; they only grow.
struct engine_counters {
    using count = std::atomic<std::uint64_t>;

    count n_requests{0};        // admitted to a slot
    count n_finished{0};        // requests that ended by themselves
    count n_cancelled{0};       // by their consumers, including queued requests
    count n_failed{0};          // with an error, including queued requests
    count n_refused{0};         // the queue was full
    count n_tokens{0};          // generated
    count n_prompt_tokens{0};   // decoded, so without cached tokens
    count n_decoded_tokens{0};  // in decode steps: one per slot, and guesses that came true
    count n_decodes{0};
    count n_drafts{0};  // runs of guesses in steps
    count n_draft_tokens{0};
    count n_accepted_tokens{0};  // guesses that came true
    count n_ties{0};             // tokens evaluated once more, without guesses behind them
    count n_parkings{0};         // times that a request left its slot to one that waited
    count n_handed_over{0};      // rows of logits copied for the sampler lane
    count prefill_ns{0};         // in prefill steps, sampling included
    count decode_ns{0};          // in decode steps
    count n_attention_bytes{0};
    count n_dropped_rows{0};
    // Number of steps that handed out attention, and the time in them from when the compute was
    // known to have ended to when the last row entered its mailbox. Excludes steps that leave rows
    // on a device and sample nothing.
    count n_captured_steps{0};
    count step_to_view_ns{0};
};

inline std::uint64_t nanoseconds(std::chrono::steady_clock::duration duration) {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count());
}

class delivery {
public:
    using clock = std::chrono::steady_clock;

    delivery(runner& model, slot_table& slots, sampler_lane& lane, engine_counters& counters)
        : model_(model), slots_(slots), lane_(lane), counters_(counters) {}

    // Starts a step: everything handed out from here on belongs to it.
    void begin_step();
    // The compute of that step is known to have ended.
    void note_computed();

    // Hands out rows of the prompt, or an embedding.
    void put(slot& target, prompt_event rows);
    // Hands out a token with the slot's rows, or the end that the token means. Releases the slot
    // after its last token.
    void put(slot& target, picked_token picked);
    // Hands out a forward pass of a steered request, whose slot then waits for the answer.
    void put(slot& target, std::span<const float> logits);
    // Goes on with a steered request, or ends it: by its answer, or because there is no room left.
    void take(slot& target, pass_answer answer);
    // The first half of take(), for a request that may have left its slot: replaces the end of its
    // text, and finds whether the answer ends it. Returns how many tokens stay as they were.
    std::size_t revise(const request& of, request_progress& progress, pass_answer& answer);

    // Ends the slot's request and releases the slot.
    void finish(slot& target, finish_reason reason, std::optional<error> failure = {});
    // Call inside a catch block: ends `asked`, which runs in this slot or has just received its
    // last token.
    void fail(slot& target, const std::shared_ptr<request>& asked);
    // Ends every running request.
    void fail_all(const error& failure);
    // Ends a request that has left its slot.
    void end_parked(const parked_request& one, finish_reason reason,
                    std::optional<error> failure = {});
    // Completes a cancellation (the mailbox is cancelled already) of a running request, or of one
    // whose slot still holds its tokens.
    void cancel(const std::shared_ptr<request>& wanted);

    // How many ids the request in this slot may still get.
    int n_left(const slot& target) const {
        return n_left(*target.active, target, target.cache.size() + 1);
    }

    // Waits for the rows of the last step and hands out the parcels that need them. Returns false
    // if there were none.
    bool collect();
    // Number of parcels that wait for this request's rows; they are as good as delivered.
    int n_on_the_way(const std::shared_ptr<request>& wanted) const;

private:
    struct parcel {
        std::shared_ptr<request> to;
        mailbox::event content;
        std::optional<end_event> end;  // with a token: it is the last one
    };

    bool is_worth_a_step(const slot& target, const forward_pass::limits& known) const;
    void send(parcel one, transfer_id rows);
    void count_view();
    int n_left(const request& of, const request_progress& progress, std::size_t n_text) const;
    static end_event end_of(const request_progress& progress, finish_reason reason,
                            std::optional<error> failure);
    void count_end(finish_reason reason);
    void release(slot& target);

    runner& model_;
    slot_table& slots_;
    sampler_lane& lane_;
    engine_counters& counters_;
    std::vector<parcel> parcels_;  // of the last step, while its rows are on their way
    transfer_id rows_on_the_way_ = 0;
    // When the compute of the last step was known to have ended, or when its newest view went out;
    // empty if unknown.
    std::optional<clock::time_point> computed_;
    bool is_counted_ = false;  // the last step already counts as one that handed out attention
};

}  // namespace kqview
