// One step of the engine over its slots: admit, fill, decode, sample, publish. Each phase is a
// short function; the order is `run`.
// Owner:   the scheduler. Threads: the engine thread, except `counters` and what stands with
//          `tokens_of`.
// Why one ubatch a decode: with a KV stream per slot llama.cpp splits a batch into equal runs of
// adjacent sequences; a step is therefore one token each of adjacent slots, or one prompt chunk of
// one slot.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "base/heartbeat.h"
#include "memory/block_pool.h"
#include "sched/idle_slot.h"
#include "sched/mailbox.h"
#include "sched/request.h"
#include "sched/reuse_plan.h"
#include "sched/runner.h"
#include "sched/sampler_lane.h"
#include "sched/slot_state.h"

namespace kqview {

// Only ever grow.
struct step_counters {
    std::atomic<std::uint64_t> n_requests{0};        // admitted to a slot
    std::atomic<std::uint64_t> n_finished{0};        // ended by themselves
    std::atomic<std::uint64_t> n_cancelled{0};       // by their consumers, in the queue too
    std::atomic<std::uint64_t> n_failed{0};          // with an error, in the queue too
    std::atomic<std::uint64_t> n_refused{0};         // the queue was full
    std::atomic<std::uint64_t> n_tokens{0};          // generated
    std::atomic<std::uint64_t> n_prompt_tokens{0};   // decoded, so without cached ones
    std::atomic<std::uint64_t> n_decoded_tokens{0};  // in steps that generate, one a slot
    std::atomic<std::uint64_t> n_decodes{0};
    std::atomic<std::uint64_t> n_handed_over{
        0};  // rows of logits that were copied for the sampler lane
    std::atomic<std::uint64_t> prefill_ns{0};  // in steps with a prompt, sampling included
    std::atomic<std::uint64_t> decode_ns{0};   // in steps that generate
    std::atomic<std::uint64_t> n_attention_bytes{0};
    std::atomic<std::uint64_t> n_dropped_rows{0};
    // Steps that handed attention out, and for them the time from when the compute was known to
    // have ended to when the last row went into its mailbox. Without those that leave rows on a
    // device and sample nothing.
    std::atomic<std::uint64_t> n_captured_steps{0};
    std::atomic<std::uint64_t> step_to_view_ns{0};
};

// What others may see of a slot.
struct slot_view {
    slot_state state = slot_state::idle;
    std::size_t n_tokens = 0;
    request_id active = 0;  // 0: it works for nobody
};

class step {
public:
    using clock = std::chrono::steady_clock;

    // `engine` is rung when the sampler lane has a token.
    step(runner& model, std::shared_ptr<block_pool> pool, std::shared_ptr<heartbeat> heart,
         std::shared_ptr<doorbell> engine);

    // Is a slot free that this request may run in?
    bool can_admit(const request& wanted) const;

    // Gives a request to a free slot; can_admit() must hold.
    void admit(const std::shared_ptr<request>& wanted);

    // Carries a cancellation out (its mailbox is cancelled already), for a running request or one
    // whose slot still holds its tokens.
    void cancel(const std::shared_ptr<request>& wanted);

    // Ends every running request with `failure`.
    void fail_all(const error& failure);

    // Any thread, when the engine thread is lost: its requests end with `failure`, the slots stay
    // as they are.
    void abandon(const error& failure);

    // Gives an idle slot to the work of an order. Raises busy, and what the work raises.
    void work_on(slot_id id, const slot_work& work);

    // Decodes once and publishes what came of it. False: nothing could run, and no slot became
    // free.
    bool run();

    // The requests in the slots that `wanted` may run in when each of them waits for its consumer;
    // empty when any can go on.
    std::vector<request_id> stalled_on(const request& wanted) const;

    // Ends the sampler lane's threads; no request runs any more.
    void close() { lane_.close(); }

    // When a starved slot gives up waiting for memory, or a picker's time is over.
    std::optional<clock::time_point> next_deadline() const;

    // Ids in a slot's cache; any thread.
    std::vector<token_id> tokens_of(slot_id id) const;
    // How many of them a fresh evaluation of the same ids would compute alike; any thread.
    std::size_t n_exact_of(slot_id id) const;
    bool is_busy(slot_id id) const;
    std::vector<slot_view> slots() const;
    const step_counters& counters() const { return counters_; }
    step_counters& counters() { return counters_; }

private:
    struct slot {
        slot_id id = 0;
        std::atomic<slot_state> state{slot_state::idle};
        std::vector<token_id> tokens;  // ids in the cache
        std::shared_ptr<request> active;
        std::unique_ptr<token_picker> picker;          // null while the ticket has it
        std::shared_ptr<sampler_lane::ticket> ticket;  // of a slow picker
        captured_rows coming;                          // of the token that the lane picks
        transfer_id coming_transfer = 0;
        token_id pending = 0;                 // sampled, not decoded yet
        std::shared_ptr<lease> block;         // for the coming token's rows
        std::shared_ptr<lease> prompt_block;  // for the coming prompt tokens' rows
        std::optional<clock::time_point> starved_until;
        // A slot with more of the prompt than this one, or about to have it: its cache is copied.
        std::optional<slot_id> fork_source;
        std::size_t n_fork = 0;       // tokens to take over
        request_id fork_request = 0;  // who evaluates them there; 0: they were there already
        request_usage usage;
        clock::time_point started;
        clock::time_point prefilled;
        std::size_t n_exact = all_exact;  // see idle_slot
        // Whose tokens the cache ends with: id 0 for nobody's.
        struct {
            request_id request = 0;
            std::size_t n_prompt = 0;
            int n_keep = 0;       // tokens before those it discarded
            int n_discarded = 0;  // to make room
        } last;
    };
    struct choice {
        slot* target = nullptr;
        reuse_plan plan;
    };
    struct work {
        slot* target;
        int i_token;   // its last token in the batch
        bool samples;  // that token's logits are wanted
        int n_rows;    // tokens up to it whose rows are captured as the prompt's
        bool is_end;   // of a request that ends with its prompt
    };
    // The next piece of a prompt.
    struct chunk {
        int n_tokens;
        int n_rows;  // of its last tokens, captured as the prompt's
        bool samples;
        bool is_last;
    };

    // fill
    bool fill_prefill();
    bool fill_decode();
    bool try_add(slot& target, bool (step::*add)(slot&));
    bool add_prompt(slot& target);
    bool add_token(slot& target);
    void make_place(slot& target, std::size_t n_tokens);
    chunk next_chunk(const slot& target) const;
    bool make_ready(slot& target, const chunk& piece);
    bool take_block(slot& target, const row_layout& layout, std::shared_ptr<lease>& block);
    void starve(slot& target, std::size_t n_bytes, bool is_final);
    void add_rows(const slot& target, int i_token, int n_prompt_rows);
    row_layout prompt_layout(const slot& target, int n_rows) const;

    // decode, sample, publish
    void decode();
    void publish(const work& done, const step_result& result);
    void publish_embedding(const work& done);
    void sample(const work& done, const step_result& result);
    void publish_token(slot& target, picked_token picked, captured_rows rows, transfer_id transfer);
    bool take_picked();
    void fail(slot& target, const std::shared_ptr<request>& asked);
    clock::time_point pick_deadline(const slot& target) const;
    transfer_id awaited(const request& to, const step_result& result) const;
    void finish(slot& target, finish_reason reason, std::optional<error> failure = {});
    end_event end_of(slot& target, finish_reason reason, std::optional<error> failure) const;
    void count_end(finish_reason reason);
    void release(slot& target);

    // reuse
    static std::size_t n_decoded_anew(const request& wanted);
    reuse_plan plan_of(const slot& candidate, const request& wanted) const;
    choice choose_slot(const request& wanted);
    void take_over(slot& target, reuse_plan plan);
    void discard(slot& target, std::span<const token_range> gone);
    bool make_room(slot& target);
    void change_cache(slot& target, const slot_work& work);
    void truncate(slot& target, std::size_t n_keep);
    void forget_tail(slot& target, std::size_t n_keep);
    void drop_unknown(slot& target);
    void roll_back(slot& target, int n_taken);

    // deliver: rows of a device arrive while the next step computes; their tokens wait for them
    struct parcel {
        std::shared_ptr<request> to;
        std::variant<token_event, prompt_event> content;
        std::optional<end_event> end;  // with a token: it is the last one
    };
    void deliver(parcel one, transfer_id rows);
    void collect();
    void await_rows(const captured_rows& dropped, transfer_id rows) noexcept;
    int n_on_the_way(const slot& target) const;
    void note_computed();
    void count_view();

    // fork
    void plan_fork(slot& target);
    bool await_fork(slot& target);
    bool is_shared_step(const slot& target) const;
    static error current_failure() noexcept;
    void want_union(const request* added);
    // Is some of its prompt left to evaluate?
    static bool is_in_prompt(const slot& one);
    int n_left(const slot& target) const;

    runner& model_;
    const std::shared_ptr<block_pool> pool_;
    const std::shared_ptr<heartbeat> heart_;
    sampler_lane lane_;
    clock::duration last_decode_{};
    mutable std::mutex tokens_mutex_;  // guards slot::tokens, n_exact and active against readers
    std::vector<slot> slots_;
    std::vector<step_token> batch_;
    std::vector<step_rows> rows_;
    std::vector<work> work_;
    std::vector<parcel> parcels_;  // of the last decode, while its rows are on their way
    transfer_id rows_on_the_way_ = 0;
    // When the last step was known to be computed, or when its newest view went out; empty: not
    // known.
    std::optional<clock::time_point> computed_;
    bool is_counted_ = false;  // as one that handed attention out
    bool prefilled_last_ = false;
    bool has_released_ = false;  // a slot became free since `run` began
    std::size_t decode_cursor_ = 0;
    step_counters counters_;
};

}  // namespace kqview
