// Tracks the content of one slot's cells: the ids of its tokens, and how many of them are exact.
// Every change of the cells goes through here, so that the ids match them afterwards, also after a
// failure.
// Owner:   its slot.
// Threads: the engine thread; others read tokens() and n_exact() under the slot table's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <span>
#include <vector>

#include "base/ids.h"
#include "sched/checkpoints.h"
#include "sched/edit_history.h"
#include "sched/runner.h"
#include "tap/edits.h"

namespace kqview {

inline constexpr std::size_t all_exact = std::numeric_limits<std::size_t>::max();

class slot_cache {
public:
    // `readers` is locked while the ids or the exact mark change.
    slot_cache(slot_id id, runner& model, checkpoints& kept, std::mutex& readers)
        : id_(id), model_(model), kept_(kept), readers_(readers) {}

    slot_id id() const { return id_; }
    const std::vector<token_id>& tokens() const { return tokens_; }
    std::size_t size() const { return tokens_.size(); }
    // Index of the first inexact token. From there on, the cache differs from a fresh evaluation of
    // the same ids: removed tokens stood before them, or they come from a blob of unknown origin,
    // or they attended to later tokens. Exact reuse evaluates them again. all_exact: there are
    // none.
    std::size_t n_exact() const { return n_exact_; }
    // The scales that the cells were computed with; those of the next token while there is none.
    const lora_scales& lora() const { return lora_; }
    // Empties a cache that was computed with other scales.
    void use(const lora_scales& scales);
    // The edits that the cells were computed with, and those of the next tokens.
    const edit_history& edits() const { return edits_; }
    // Keeps the cells that these edits would have left as they are; the next token's are in force.
    void use(const edit_changes& edits);
    // Puts those of the next token into force.
    void go_on_with(const edit_plan* plan);
    // Counts the changes other than decoding.
    std::uint64_t n_changes() const { return n_changes_; }

    // Reserves room for the ids of a step: after llama.cpp has decoded, nothing may fail for lack
    // of memory.
    void make_place(std::size_t n_tokens);
    // Appends a decoded token. The caller holds the readers' lock, once for the whole step.
    void append(token_id id, bool is_exact);
    // The next step's run is longer than what will be appended of it: there are cells beyond the
    // known ids until these are, or something is cut.
    void expect_unknown() { has_unknown_ = true; }
    bool has_unknown() const { return has_unknown_; }
    // Removes all cells beyond the known ids, which a failed step leaves as well.
    void drop_unknown();

    // Keeps the first `n_keep` tokens. A cache that cannot drop that tail goes back to the last
    // checkpoint before it; without one it is emptied. Raises request if the slot has fewer tokens.
    void truncate(std::size_t n_keep);
    // How many tokens that would leave, as far as is known before.
    std::size_t n_left_by(std::size_t n_keep) const;
    // Takes a checkpoint of a cache that cannot drop its tail; see checkpoints::take().
    // Not of cells beyond the known ids.
    void keep_checkpoint() {
        if (!has_unknown_) kept_.take(id_, tokens_.size());
    }
    void clear();
    // For a model that keeps nothing between requests: only the ids have to go.
    void forget() { shrink(0, all_exact); }

    // Copies the first `n_tokens` of `source`, with its checkpoints; readers never see its other
    // ones. Fewer where truncate() would leave fewer; empty after an error.
    void copy_from(const slot_cache& source, std::size_t n_tokens);

    // Removes ranges of tokens, which must be non-empty, ascending and disjoint. The tokens after
    // them move up and keep their computed values, but are inexact from then on. Raises
    // unsupported_model, and out_of_memory for its own buffer, without any change; any other error
    // leaves the slot empty. Copies the slot's cache twice, however many ranges there are. One
    // range at the end is truncate().
    void discard(std::span<const token_range> gone);
    // As discard(). Raises request if the slot does not have the tokens.
    void remove(std::span<const token_range> gone);

    // Writes the slot as a SES1 blob to the front of `out` and returns the blob's size. If `out` is
    // too small, writes nothing and returns the required size, a little more than the blob's.
    // Raises unsupported_model.
    std::size_t save(std::span<std::byte> out);
    // Writes its checkpoints in the same way; no bytes if there are none.
    std::size_t save_checkpoints(std::span<std::byte> out) const;
    // Restores the slot from a blob whose first `n_exact` tokens are known to be exact. Raises
    // state_format, state_mismatch and unsupported_model without any change; an internal error
    // leaves the slot empty. `lora` and `edits`: those that the blob was computed with.
    // `checkpoints`: what save_checkpoints() wrote; as many are kept as the budget allows.
    void restore(std::span<const std::byte> blob, std::size_t n_exact, const lora_scales& lora = {},
                 std::vector<edit_history::run> edits = {},
                 std::span<const std::byte> checkpoints = {});

private:
    void set(std::vector<token_id> tokens, std::size_t n_exact);
    void shrink(std::size_t n_keep, std::size_t n_exact);
    std::size_t cut(std::size_t n_keep);
    void erase_ids(std::span<const token_range> gone);
    void close_gaps(std::span<std::byte> room);

    const slot_id id_;
    runner& model_;
    checkpoints& kept_;
    std::mutex& readers_;  // guards tokens_ and n_exact_ against other threads
    std::vector<token_id> tokens_;
    std::size_t n_exact_ = all_exact;
    bool has_unknown_ = false;
    lora_scales lora_;
    edit_history edits_;
    std::uint64_t n_changes_ = 0;
};

// A caller's work on the cache of an idle slot.
using slot_work = std::function<void(slot_cache&)>;

}  // namespace kqview
