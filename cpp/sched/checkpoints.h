// Snapshots of what slots' caches cannot cut back (recurrent state, compressed keys, caches that
// keep only what windows see), within a budget of bytes. A slot that has to drop its newest tokens
// goes back to the last snapshot before them.
// Owner:   the slot table.
// Threads: the engine thread; counts_of(): any, under the readers' lock.
// Which go first: each is worth what the evaluation up to it from the one before costs, counted in
// tokens. Age counts as in GreedyDual: a snapshot that is taken or used starts from the worth of
// the one that went last, so an old one goes before a new one that saves as much.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/ids.h"
#include "sched/runner.h"
#include "state/ses1.h"

namespace kqview {

class checkpoints {
public:
    // `readers` is locked while the counts change.
    checkpoints(runner& model, std::mutex& readers, std::size_t budget_bytes)
        : model_(model),
          readers_(readers),
          budget_bytes_(model.needs_snapshots() ? budget_bytes : 0),
          kept_(static_cast<std::size_t>(model.n_slots())) {}

    // False: the model's caches drop any tail, or there is no memory for snapshots.
    bool are_kept() const { return budget_bytes_ > 0; }

    // Takes one of a slot that has evaluated `n_tokens` and nothing else; none if memory is short.
    void take(slot_id slot, std::size_t n_tokens);
    // Copies one of a slot that was restored, behind those that it has.
    void put(slot_id slot, const saved_checkpoint& one);
    // Views, valid until the slot's change.
    std::vector<saved_checkpoint> all_of(slot_id slot) const;

    // The tokens of the slot's last one that has at most `n_most`; 0: it has none.
    std::size_t last_of(slot_id slot, std::size_t n_most) const;
    // Cuts the slot's cache back to last_of(). 0: there is none, or it failed; the cache is then
    // undefined.
    std::size_t go_back(slot_id slot, std::size_t n_most) noexcept;

    // Drops those of more than `n_most` tokens: the slot holds other ones from there on.
    void drop_after(slot_id slot, std::size_t n_most);
    // Gives slot `to`, which has none, those of at most `n_most` tokens; the bytes are shared.
    void copy(slot_id from, slot_id to, std::size_t n_most);

    // Ascending.
    std::vector<std::size_t> counts_of(slot_id slot) const;
    std::size_t n_bytes() const { return n_bytes_; }

private:
    struct snapshot {
        std::size_t n_tokens;
        std::size_t n_bytes;
        std::shared_ptr<std::byte[]> bytes;
        std::size_t base;  // see above
    };
    using list = std::vector<snapshot>;  // ascending

    list& of(slot_id slot) { return kept_[static_cast<std::size_t>(slot)]; }
    const list& of(slot_id slot) const { return kept_[static_cast<std::size_t>(slot)]; }
    template <class function>
    void add(slot_id slot, std::size_t n_tokens, std::size_t n_bytes, function write);
    bool evict();
    void erase(list& from, list::iterator first, list::iterator last);

    runner& model_;
    std::mutex& readers_;
    const std::size_t budget_bytes_;
    std::vector<list> kept_;   // by slot
    std::size_t n_bytes_ = 0;  // shared ones count once
    std::size_t evicted_ = 0;  // the worth of the one that went last
};

}  // namespace kqview
