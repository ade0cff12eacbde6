// The slots: the request that runs in each, the tokens that each holds, and what an admitted
// request reuses of them: a common prefix, shifted runs, or a copy of another slot's cache.
// Owner:   the engine loop.
// Threads: the engine thread; the last members: any thread.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "sample/token_picker.h"
#include "sched/checkpoints.h"
#include "sched/edit_history.h"
#include "sched/forward_pass.h"
#include "sched/prompt_lookup.h"
#include "sched/request.h"
#include "sched/reuse_plan.h"
#include "sched/runner.h"
#include "sched/sampler_lane.h"
#include "sched/slot_cache.h"
#include "tap/step_result.h"

namespace kqview {

enum class slot_state {
    idle,      // runs no request; keeps the tokens of earlier ones
    prefill,   // feeds the prompt in chunks
    decode,    // one token per step
    sampling,  // its next token is being picked in the sampler lane
    steered,   // its consumer decides what becomes of its last forward pass
    paused,    // its consumer is behind by run_ahead tokens
    starved,   // the block pool has no room for its next row
};

constexpr std::array slot_state_names{"idle",    "prefill", "decode", "sampling",
                                      "steered", "paused",  "starved"};
static_assert(slot_state_names.size() == static_cast<std::size_t>(slot_state::starved) + 1);

constexpr const char* name_of(slot_state state) {
    return slot_state_names[static_cast<std::size_t>(state)];
}

constexpr bool may_follow(slot_state from, slot_state to) {
    switch (from) {
        case slot_state::idle: return to == slot_state::prefill;
        // The prompt's last chunk produces a token and a row, and may have to wait for either.
        case slot_state::prefill: return to != slot_state::prefill;
        case slot_state::decode: return to != slot_state::prefill;
        case slot_state::sampling: return to == slot_state::decode || to == slot_state::idle;
        case slot_state::steered:
            return to == slot_state::prefill || to == slot_state::decode || to == slot_state::idle;
        case slot_state::paused:
        case slot_state::starved: return to != slot_state::sampling && to != slot_state::steered;
    }
    return false;
}

inline void change(std::atomic<slot_state>& state, slot_state to) {
    const auto from = state.load(std::memory_order_relaxed);
    if (from == to) return;
    if (!may_follow(from, to)) {
        throw error(errc::internal, "slot: ", name_of(from), " cannot become ", name_of(to));
    }
    state.store(to, std::memory_order_relaxed);
}

// What an admitted request has come to. It goes along when the request is parked, and to the slot
// in which the request goes on.
struct request_progress {
    using time_point = std::chrono::steady_clock::time_point;

    request_usage usage;
    time_point started;  // first admitted
    time_point prefilled;
    int n_prompt_rows = 0;  // of the last prompt tokens, rows that were not handed out yet
    // What is evaluated in chunks in place of the prompt: the prompt and what was generated, as far
    // as the slot still has it. Of a steered request, from its first answer on; of one that goes on
    // after it was parked, until its next token.
    std::vector<token_id> text;
    edit_changes edits;                            // of the text
    std::unique_ptr<token_picker> picker;          // null while the ticket owns it
    std::shared_ptr<sampler_lane::ticket> ticket;  // of a slow picker

    // ---- while it is parked
    bool awaits_answer = false;  // its consumer has a forward pass, and decides what its text is
    int n_discarded = 0;         // of its tokens, to make room
    // Its slot, saved, if a fresh evaluation would not compute the same cells; else empty.
    std::vector<std::byte> cells{};
    std::size_t n_exact = all_exact;  // of `cells`
    // How many tokens have stayed since then. What was taken back and put again has the same ids,
    // but its cells may have been computed with other edits.
    std::size_t n_as_saved = all_exact;
    std::vector<edit_history::run> edited{};  // of `cells`
};

// Guesses that a step evaluates behind a slot's token, until each has come true or not.
struct slot_draft {
    std::vector<token_id> ids;        // in their order; empty: there are none
    std::vector<captured_rows> rows;  // of each; none if nothing is captured
    // F32 ne=[n_vocab, n_guess]: copies, where another step may come before they are looked at.
    std::vector<float> logits;
    int i_token = 0;                   // of the first one in the batch
    const edit_plan* edits = nullptr;  // that it was evaluated with
    bool is_of_model = false;          // it was made by the model that guesses
    std::size_t n_true = 0;            // have come true so far
    // It is the likely answer to a forward pass, evaluated in a step of its own before that came.
    bool is_ahead = false;
};

struct slot : request_progress {
    slot(slot_id id, runner& model, checkpoints& kept, std::mutex& readers)
        : cache(id, model, kept, readers), is_causal(model.is_causal()) {}

    slot_id id() const { return cache.id(); }
    // The ids to evaluate in chunks: the prompt, or a text that takes its place.
    const std::vector<token_id>& prompt() const { return text.empty() ? active->prompt : text; }
    // How many of them are evaluated in chunks. The last one, from whose logits a token is sampled,
    // goes on its own like a generated token, with those of other slots: its logits are then the
    // same however many tokens came from a cache. Not if its row is one of a chunk's prompt rows,
    // nor if it ends what the consumer of a steered request has appended, nor if the tokens before
    // see it.
    std::size_t n_in_chunks() const {
        const bool has_last =
            !is_causal ||
            (text.empty() ? active->only_attends || active->n_prompt_rows > 0 : active->is_steered);
        return prompt().size() - (has_last || prompt().empty() ? 0 : 1);
    }
    // True if some of them are still to be evaluated in chunks. A slot that made room may hold
    // fewer tokens than its prompt had.
    bool is_in_prompt() const {
        if (!active) return false;
        if (!text.empty()) return cache.size() + 1 < text.size();
        return usage.completion_tokens == 0 && cache.size() < n_in_chunks();
    }
    // The most tokens that its next step may evaluate.
    int n_to_cut() const {
        const auto next = std::ranges::upper_bound(cuts, cache.size());
        return next == cuts.end() ? std::numeric_limits<int>::max()
                                  : static_cast<int>(*next - cache.size());
    }
    // True if it may take part in a step of one token each.
    bool is_generating() const {
        return active && !gives_way && !is_in_prompt() && state != slot_state::sampling &&
               state != slot_state::steered;
    }
    // True if it may take part with what its consumer likely answers, before that has come.
    bool may_go_ahead() const {
        return state == slot_state::steered && likely && draft.ids.empty() && !gives_way;
    }
    // True if its next token is chosen by its consumer or in the sampler lane, beside other steps.
    bool is_chosen_beside() const { return active->is_steered || ticket || picker->is_slow(); }
    bool has_rows() const { return rows.block || prompt_rows.block; }

    slot_cache cache;
    const bool is_causal;
    std::atomic<slot_state> state{slot_state::idle};
    std::shared_ptr<request> active;  // null exactly while the slot is idle

    // ---- of the active request, beside its progress
    token_id pending = 0;  // the last of its tokens, which is evaluated on its own
    // Blocks and layout for the rows of the next step; then those rows, until they are handed out
    // with their token.
    captured_rows rows;
    captured_rows prompt_rows;
    slot_draft draft;
    prompt_lookup lookup;                // makes it, or
    hit_rate draft_rate;                 // a model does
    std::optional<token_id> likely;      // answer to its forward pass, if worth a step before
    bool is_unclear = false;             // the next step is to have no guesses, for anybody
    transfer_id transfer = 0;            // transfer that carries them; 0: they are there
    std::optional<time_point> deadline;  // for a block, or for the picker
    time_point given;                    // when the request got this slot
    time_point evaluated;                // its first token or pass there; zero before
    time_point asked;  // its last forward pass was handed out, or a step ahead of the answer ended
    bool stays = false;  // its cells would be needed, and could not be saved
    // Where steps end that evaluate its prompt or text, for a checkpoint each; ascending.
    std::vector<std::size_t> cuts;
    bool gives_way = false;     // it leaves the slot once its last step is handed out
    bool was_left_out = false;  // of the last step, for that reason
    // Another slot that has, or will have, more of the prompt than this one: its cache is copied.
    struct fork_plan {
        slot_id source;
        std::size_t n_tokens;  // to copy
        request_id request;    // which evaluates them there; 0: they are there already
    };
    std::optional<fork_plan> fork;

    // ---- of the last request, whose tokens the cache ends with; id 0: of none
    struct {
        request_id request = 0;
        std::size_t n_prompt = 0;
        int n_keep = 0;       // tokens before those it discarded
        int n_discarded = 0;  // by that request, to make room
    } last;
};

// A snapshot of a slot for other threads.
struct slot_view {
    slot_state state = slot_state::idle;
    std::size_t n_tokens = 0;
    std::size_t n_exact = 0;  // of them match a fresh evaluation of the same ids
    request_id active = 0;    // 0: none
};

struct checkpoint_options {
    std::size_t budget_bytes = 0;
    std::size_t n_between = 0;  // tokens of a prompt; 0: none for its length
};

class slot_table {
public:
    using time_point = std::chrono::steady_clock::time_point;

    // `least_turn`: how long a request that is evaluated keeps its slot before it may be parked.
    slot_table(runner& model, std::chrono::milliseconds least_turn,
               const checkpoint_options& kept = {});

    std::size_t size() const { return slots_.size(); }
    slot& operator[](std::size_t i) { return slots_[i]; }
    auto begin() { return slots_.begin(); }
    auto end() { return slots_.end(); }
    auto begin() const { return slots_.begin(); }
    auto end() const { return slots_.end(); }
    // The slot in which this request runs; null: none.
    slot* running(const std::shared_ptr<request>& wanted);

    // True if a slot is free in which this request may run.
    bool can_admit(const request& wanted) const;
    // Gives a request the free slot that holds the longest part of its prompt, the lowest id among
    // equals. Requires can_admit().
    struct seat {
        slot& target;
        reuse_plan plan;
    };
    seat admit(const std::shared_ptr<request>& wanted);
    // Cuts the slot's cache down to what its request reuses, and looks for another slot to copy.
    // Only then does the request show its slot: before, and if this raises, the slot holds what an
    // earlier request left, which may belong to somebody else.
    void take_over(slot& target, reuse_plan plan);
    // True while the slot waits for another slot's prompt; copies that slot's cache once it is
    // there.
    bool await_fork(slot& target);

    // False: caches drop any tail, or there is no memory for checkpoints.
    bool keeps_checkpoints() const { return kept_.are_kept(); }
    // Call when a step of the slot's has been decoded: takes a checkpoint if one is due.
    void keep_checkpoint(slot& target);

    // Appends the ids of a decoded step, but for the last `n_guessed` of each slot's run, and for
    // those that a consumer has not decided on.
    void append(std::span<const step_token> tokens, std::size_t n_guessed = 0);
    // Drops what is left of a slot's guesses.
    void drop_draft(slot& target);
    // Call before blocks for rows of a slot's step go back undelivered.
    void await_rows(slot& target);
    // Call before adding a token: in a full slot, discards the tokens that the request allows.
    void make_room(slot& target);
    // Rolls the slot back to its last request's prompt and the tokens taken, except the last one,
    // which was not fed. Discarded tokens stay gone, even if they made room for tokens that were
    // never taken. A steered request's consumer has taken all of its text.
    void roll_back(slot& target, int n_taken);
    // The request leaves its slot, which becomes idle and keeps its tokens.
    void release(slot& target);
    // True if a slot has become free since the last call.
    bool take_released() { return std::exchange(has_released_, false); }

    // Number of items that are computed ahead of a request's consumer: tokens, or runs of prompt
    // rows.
    int n_ahead(const request& wanted, bool is_prompt_rows) const;
    int n_ahead(const slot& one) const {
        return n_ahead(*one.active, one.n_prompt_rows > 0 && one.is_in_prompt());
    }

    // ---- a request leaves its slot before its end, and goes on in any slot (sched/parking.h)

    // Whether some request may be held, see is_held().
    bool has_held() const;
    // The slot of a request that can leave it to `wanted`; null: none. One that is held, not before
    // its turn is over, which lasts as long as its evaluation took, so that at most half of the
    // time goes into evaluating texts again where more consumers than slots take turns. Or one of
    // another owner who holds more slots (is_owed).
    slot* parkable_for(const request& wanted, time_point now);
    // When the next turn ends of those that lasted at `now`; empty: none did.
    std::optional<time_point> next_turn(time_point now) const;
    // Call before vacate(): saves the cells, in at most that many bytes, if a fresh evaluation
    // would not reproduce them, because tokens were discarded or shifted, or because the answers to
    // forward passes cut a deterministic text into steps. False: they cannot be saved, and the
    // request stays in its slot for as long as it is held. Changes nothing if it raises.
    bool keep_cells(slot& target, std::size_t n_bytes_max);
    // The request leaves its slot. Changes nothing if it raises.
    request_progress vacate(slot& target);
    // Gives a request that has left its slot a free one, the one that holds most of its text.
    // Requires can_admit().
    slot& readmit(const std::shared_ptr<request>& wanted, request_progress progress);
    // Cuts the slot's cache down to what it has of the text, or restores the cells that were kept;
    // shows the slot as take_over() does.
    void take_over_text(slot& target);

    // Runs a caller's work on an idle slot. Raises busy, and what the work raises.
    void work_on(slot_id id, const slot_work& work);
    // Copies what an idle slot holds to `n` others, of the idle ones those that hold least; returns
    // them. Raises busy if this slot or too many others are in use. An error in a copy leaves the
    // ones made before it.
    std::vector<slot_id> branch(slot_id from, std::size_t n);

    // If all slots that `wanted` may run in wait for their consumers, the requests in those slots;
    // empty if any can go on.
    std::vector<request_id> stalled_on(const request& wanted) const;

    // ---- any thread
    std::vector<token_id> tokens_of(slot_id id) const;
    std::vector<std::size_t> checkpoints_of(slot_id id) const;
    std::vector<slot_view> views() const;
    std::vector<std::shared_ptr<request>> active() const;

private:
    const slot& at(slot_id id) const { return slots_[static_cast<std::size_t>(id)]; }
    reuse_plan plan_of(const slot& candidate, const request& wanted) const;
    void give(slot& target, const std::shared_ptr<request>& wanted);
    // Whether it keeps its slot until its consumer acts: takes what was computed ahead, answers a
    // forward pass, or drops rows.
    bool is_held(const slot& one) const;
    // When a turn ends that began at `begin`, or with its first token there.
    time_point end_of_turn(const slot& one) const;
    time_point end_of_turn(const slot& one, time_point begin) const;
    bool is_owed(const slot& one, const request& wanted, time_point now) const;
    void plan_fork(slot& target);
    void plan_cuts(slot& target);
    static std::size_t cut_at(slot& source, std::size_t n);
    void check_idle(slot_id id) const;
    // The slot's cache is what its request's prompt has of it.
    static void note_cached(slot& target);

    runner& model_;
    const std::chrono::milliseconds least_turn_;
    mutable std::mutex mutex_;  // guards ids, marks and active requests against other threads
    checkpoints kept_;
    const std::size_t n_between_checkpoints_;
    std::deque<slot> slots_;  // never moved
    bool has_released_ = false;
    std::uint64_t n_given_ = 0;  // slots, to any request
};

}  // namespace kqview
