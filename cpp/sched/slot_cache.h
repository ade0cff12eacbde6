// What the cells of one slot hold: the ids of its tokens, and how many of them are exact. Whatever
// changes the cells goes through here, so that the ids are true afterwards, also after a failure.
// Owner:   its slot. Threads: the engine thread; others read tokens() and n_exact() under the lock
//          that the slot table keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <span>
#include <vector>

#include "base/ids.h"
#include "sched/runner.h"

namespace kqview {

inline constexpr std::size_t all_exact = std::numeric_limits<std::size_t>::max();

class slot_cache {
public:
    // `readers` is held while the ids or the mark change.
    slot_cache(slot_id id, runner& model, std::mutex& readers)
        : id_(id), model_(model), readers_(readers) {}

    slot_id id() const { return id_; }
    const std::vector<token_id>& tokens() const { return tokens_; }
    std::size_t size() const { return tokens_.size(); }
    // The tokens from here on differ from what a fresh evaluation of the same ids would compute:
    // others, which are gone, stood before them, or they came out of a blob of unknown origin, or
    // they saw what followed them. Exact reuse evaluates them again. all_exact: there are none.
    std::size_t n_exact() const { return n_exact_; }
    // Grows with each change other than decoding.
    std::uint64_t n_changes() const { return n_changes_; }

    // Reserves room for the ids of a step: once llama.cpp has decoded, nothing may fail for want of
    // memory.
    void make_place(std::size_t n_tokens);
    // A token that was decoded. The caller holds the readers' lock, once for the whole step.
    void append(token_id id, bool is_exact);
    // After a step that failed: whatever the cells hold beyond the known ids goes.
    void drop_unknown();

    // Keeps the first `n_keep` tokens; fewer (none) where the cache cannot drop that tail. Raises
    // request when there are fewer.
    void truncate(std::size_t n_keep);
    void clear();
    // The model keeps nothing between requests: only the ids have to go.
    void forget() { set({}, all_exact); }

    // Holds what `source` holds. Copies the whole cache. Empty after an error.
    void copy_from(const slot_cache& source);

    // Removes ranges of tokens, which are not empty, in order, and apart; the tokens behind them
    // move up and keep what was computed for them, and are exact no more. Raises unsupported_model
    // and out_of_memory for its own memory, and has changed nothing then; any other error leaves
    // the slot empty. Copies the slot's cache twice, however many ranges there are.
    void discard(std::span<const token_range> gone);
    // As discard(), for `n_discard` tokens behind the first `n_keep`. Raises request for others
    // than there are.
    void shift(std::uint64_t n_keep, std::uint64_t n_discard);

    // Writes the slot as a SES1 blob to the front of `out` and returns the blob's size. Where `out`
    // is too small nothing is written and more than its size is returned: the room that is needed,
    // a little more than the blob. Raises unsupported_model.
    std::size_t save(std::span<std::byte> out);
    // Holds what the blob holds, of which the first `n_exact` tokens are known to be exact. Raises
    // state_format, state_mismatch and unsupported_model, and has changed nothing then; an internal
    // error leaves the slot empty.
    void restore(std::span<const std::byte> blob, std::size_t n_exact);

private:
    void set(std::vector<token_id> tokens, std::size_t n_exact);
    void shrink(std::size_t n_keep, std::size_t n_exact);
    void erase_ids(std::span<const token_range> gone);
    void close_gaps(std::span<std::byte> room);

    const slot_id id_;
    runner& model_;
    std::mutex& readers_;  // guards tokens_ and n_exact_ against other threads
    std::vector<token_id> tokens_;
    std::size_t n_exact_ = all_exact;
    std::uint64_t n_changes_ = 0;
};

// What an order does with the cache of an idle slot.
using slot_work = std::function<void(slot_cache&)>;

}  // namespace kqview
