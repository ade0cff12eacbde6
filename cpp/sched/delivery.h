// What leaves the engine: tokens, rows of the prompt and ends, to the mailboxes of their requests.
// Rows of the CPU are there when a decode returns; those of a device arrive while the next step
// computes, and what belongs to them waits here as a parcel.
// Owner: the engine loop. Threads: the engine thread; counters any.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "sched/mailbox.h"
#include "sched/request.h"
#include "sched/runner.h"
#include "sched/sampler_lane.h"
#include "sched/slot_table.h"

namespace kqview {

// What an engine has done. Only ever grows.
struct engine_counters {
    using count = std::atomic<std::uint64_t>;

    count n_requests{0};        // admitted to a slot
    count n_finished{0};        // ended by themselves
    count n_cancelled{0};       // by their consumers, in the queue too
    count n_failed{0};          // with an error, in the queue too
    count n_refused{0};         // the queue was full
    count n_tokens{0};          // generated
    count n_prompt_tokens{0};   // decoded, so without cached ones
    count n_decoded_tokens{0};  // in steps that generate, one a slot
    count n_decodes{0};
    count n_handed_over{0};  // rows of logits that were copied for the sampler lane
    count prefill_ns{0};     // in steps with a prompt, sampling included
    count decode_ns{0};      // in steps that generate
    count n_attention_bytes{0};
    count n_dropped_rows{0};
    // Steps that handed attention out, and for them the time from when the compute was known to
    // have ended to when the last row went into its mailbox. Without those that leave rows on a
    // device and sample nothing.
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

    // A step has begun, and what is handed out belongs to it from now on.
    void begin_step();
    // The compute of that step is known to have ended.
    void note_computed();

    // Rows of the prompt, or an embedding.
    void put(slot& target, prompt_event rows);
    // A token with the slot's rows, or the end that it means. Releases the slot after its last one.
    void put(slot& target, picked_token picked);

    // Ends the slot's request and releases the slot.
    void finish(slot& target, finish_reason reason, std::optional<error> failure = {});
    // Inside a catch block: ends `asked`, which works in this slot or has just had its last token.
    void fail(slot& target, const std::shared_ptr<request>& asked);
    // Ends every running request.
    void fail_all(const error& failure);
    // Carries a cancellation out (its mailbox is cancelled already), for a running request or one
    // whose slot still holds its tokens.
    void cancel(const std::shared_ptr<request>& wanted);

    // Waits for the rows of the last step and hands out what belongs to them. False: nothing.
    bool collect();
    // Parcels of a request, which are as good as there.
    int n_on_the_way(const std::shared_ptr<request>& wanted) const;

private:
    struct parcel {
        std::shared_ptr<request> to;
        mailbox::event content;
        std::optional<end_event> end;  // with a token: it is the last one
    };

    void send(parcel one, transfer_id rows);
    void count_view();
    int n_left(const slot& target) const;
    end_event end_of(const slot& target, finish_reason reason, std::optional<error> failure) const;
    void count_end(finish_reason reason);
    void release(slot& target);

    runner& model_;
    slot_table& slots_;
    sampler_lane& lane_;
    engine_counters& counters_;
    std::vector<parcel> parcels_;  // of the last step, while its rows are on their way
    transfer_id rows_on_the_way_ = 0;
    // When the last step was known to be computed, or when its newest view went out; empty: not
    // known.
    std::optional<clock::time_point> computed_;
    bool is_counted_ = false;  // the last step, as one that handed attention out
};

}  // namespace kqview
