// The edits that the cells of one slot were computed with. A cache is worth something to a request
// up to the first position at which its own edits would have acted otherwise.
// Owner:   the slot's slot_cache.
// Threads: the engine thread.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tap/edits.h"

namespace kqview {

// The edits that a request puts into force, and from which position of its text on.
class edit_changes {
public:
    // Why an edit failed; empty if none did.
    std::optional<error> failure() const;
    // Null: none.
    const edit_plan* at(std::size_t position) const;
    // How many of the tokens from `position` on have the same edits as the first of them, of `n`.
    std::size_t n_alike(std::size_t position, std::size_t n) const;
    // All plans, for the nodes that graphs need.
    template <typename Use>
    void each(Use use) const {
        for (const auto& one : changes_) use(*one.plan);
    }

    void put(std::size_t start, std::shared_ptr<const edit_plan> plan);
    // The text from `n_kept` on is evaluated anew: the edits in force stay.
    void cut(std::size_t n_kept);
    // `n_gone` tokens after the first `n_kept` are gone.
    void move_up(std::size_t n_kept, std::size_t n_gone);

private:
    friend class edit_history;
    struct change {
        std::size_t start;
        std::shared_ptr<const edit_plan> plan;
    };
    std::vector<change> changes_;  // ascending
};

class edit_history {
public:
    static constexpr std::size_t everywhere = std::numeric_limits<std::size_t>::max();
    using shared_keys = std::shared_ptr<const edit_keys>;

    // Cells from `start` on, up to those of the next run.
    struct run {
        std::size_t start;
        shared_keys keys;
    };

    // No edits: no run, or one without keys.
    const std::vector<run>& runs() const { return runs_; }
    // Those of the next cell.
    const edit_keys& in_force() const { return runs_.empty() ? no_edits : *runs_.back().keys; }
    // How many of the cells, and of those that follow while nothing else comes into force, are as
    // these edits would have left them. 0 if there is no memory to find out: evaluating all of them
    // gives the same result.
    std::size_t n_agreeing(const edit_keys& wanted) const noexcept;
    std::size_t n_agreeing(const edit_changes& wanted) const noexcept;

    // Sets the edits of the cells from `n_cells` on, all that there are being kept.
    void use(std::size_t n_cells, const edit_keys& keys);
    // The cells from `n_kept` on are gone; the edits in force stay.
    void cut(std::size_t n_kept);
    // Cells from `first` on have moved up, `n_cells` are left: what was edited there is as no other
    // request's edits would have left it.
    void move_up(std::size_t first, std::size_t n_cells);
    // Takes over the first `n_cells` cells of another slot; the edits in force stay.
    void copy_from(const edit_history& source, std::size_t n_cells);
    // Replaces everything.
    void set(std::vector<run> runs) { runs_ = std::move(runs); }

private:
    static std::size_t n_agreeing(const std::vector<run>& ours, const std::vector<run>& theirs);
    void put(std::size_t start, shared_keys keys);

    std::vector<run> runs_;  // ascending, the first from cell 0 on
};

}  // namespace kqview
