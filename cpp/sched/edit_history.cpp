#include "sched/edit_history.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <new>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

// The first position at which one list acts otherwise than the other.
std::size_t first_difference(const edit_keys& a, const edit_keys& b) {
    if (a == b) return edit_history::everywhere;
    std::vector<std::size_t> firsts;
    for (const auto* const keys : {&a, &b})
        for (const auto& key : *keys) firsts.push_back(key.first);
    std::ranges::sort(firsts);
    const auto acting = [](const edit_keys& keys, std::size_t position) {
        edit_keys found;
        std::ranges::copy_if(keys, std::back_inserter(found),
                             [&](const edit_key& key) { return key.first <= position; });
        return found;
    };
    for (const auto first : firsts)
        if (acting(a, first) != acting(b, first)) return first;
    return edit_history::everywhere;
}

template <typename Changes>
auto change_at(Changes& changes, std::size_t position) {
    auto found = changes.end();
    for (auto one = changes.begin(); one != changes.end() && one->start <= position; ++one)
        found = one;
    return found;
}

// Edits that are equal to no others.
edit_history::shared_keys unlike_any() {
    static std::atomic<std::uint64_t> n{0};
    return std::make_shared<const edit_keys>(1, edit_key{text_of("moved ", ++n), 0});
}

}  // namespace

std::optional<error> edit_changes::failure() const {
    for (const auto& one : changes_)
        if (auto why = one.plan->failure()) return why;
    return {};
}

const edit_plan* edit_changes::at(std::size_t position) const {
    const auto found = change_at(changes_, position);
    return found == changes_.end() || found->plan->keys.empty() ? nullptr : found->plan.get();
}

std::size_t edit_changes::n_alike(std::size_t position, std::size_t n) const {
    for (const auto& one : changes_)
        if (one.start > position) return std::min(n, one.start - position);
    return n;
}

void edit_changes::put(std::size_t start, std::shared_ptr<const edit_plan> plan) {
    if (!plan) return;
    std::erase_if(changes_, [&](const change& one) { return one.start >= start; });
    changes_.push_back({start, std::move(plan)});
}

void edit_changes::cut(std::size_t n_kept) {
    if (changes_.empty() || changes_.back().start <= n_kept) return;
    auto last = changes_.back().plan;
    put(n_kept, std::move(last));
}

void edit_changes::move_up(std::size_t n_kept, std::size_t n_gone) {
    for (auto& one : changes_) {
        if (one.start > n_kept)
            one.start = std::max(n_kept, one.start - std::min(one.start, n_gone));
    }
    // Of several that begin at one token the last is in force.
    for (std::size_t i = 1; i < changes_.size();) {
        if (changes_[i].start == changes_[i - 1].start) {
            changes_.erase(changes_.begin() + static_cast<std::ptrdiff_t>(i) - 1);
        } else {
            ++i;
        }
    }
}

std::size_t edit_history::n_agreeing(const edit_keys& wanted) const noexcept {
    if (runs_.empty() && wanted.empty()) return everywhere;
    try {
        return n_agreeing(runs_, {{0, std::make_shared<const edit_keys>(wanted)}});
    } catch (const std::bad_alloc&) {
        return 0;
    }
}

std::size_t edit_history::n_agreeing(const edit_changes& wanted) const noexcept {
    if (runs_.empty() && wanted.changes_.empty()) return everywhere;
    try {
        std::vector<run> theirs;
        for (const auto& [start, plan] : wanted.changes_)
            theirs.push_back({start, std::make_shared<const edit_keys>(plan->keys)});
        return n_agreeing(runs_, theirs);
    } catch (const std::bad_alloc&) {
        return 0;
    }
}

// Both are cut where either begins a run.
std::size_t edit_history::n_agreeing(const std::vector<run>& ours, const std::vector<run>& theirs) {
    const auto keys_at = [](const std::vector<run>& runs,
                            std::size_t position) -> const edit_keys& {
        const edit_keys* found = &no_edits;
        for (const auto& one : runs)
            if (one.start <= position) found = one.keys.get();
        return *found;
    };
    std::vector<std::size_t> starts{0};
    for (const auto* const runs : {&ours, &theirs})
        for (const auto& one : *runs) starts.push_back(one.start);
    std::ranges::sort(starts);
    for (std::size_t i = 0; i < starts.size(); ++i) {
        const auto end = i + 1 < starts.size() ? starts[i + 1] : everywhere;
        if (end == starts[i]) continue;
        const auto n = first_difference(keys_at(ours, starts[i]), keys_at(theirs, starts[i]));
        if (n < end) return std::max(n, starts[i]);
    }
    return everywhere;
}

void edit_history::put(std::size_t start, shared_keys keys) {
    if (!runs_.empty() && runs_.back().start == start) runs_.pop_back();
    if (runs_.empty() ? keys->empty() : *runs_.back().keys == *keys) return;
    if (runs_.empty() && start > 0) runs_.push_back({0, std::make_shared<const edit_keys>()});
    runs_.push_back({start, std::move(keys)});
}

void edit_history::use(std::size_t n_cells, const edit_keys& keys) {
    if (in_force() == keys) return;
    put(n_cells, std::make_shared<const edit_keys>(keys));
}

void edit_history::cut(std::size_t n_kept) {
    if (runs_.empty() || runs_.back().start <= n_kept) return;
    const auto keys = runs_.back().keys;
    while (!runs_.empty() && runs_.back().start >= n_kept) runs_.pop_back();
    put(n_kept, keys);
}

void edit_history::move_up(std::size_t first, std::size_t n_cells) {
    const bool is_edited =
        std::ranges::any_of(runs_, [](const run& one) { return !one.keys->empty(); });
    if (!is_edited) return;
    const auto keys = runs_.back().keys;
    cut(first);
    put(first, unlike_any());
    put(n_cells, keys);
}

void edit_history::copy_from(const edit_history& source, std::size_t n_cells) {
    const auto keys = std::make_shared<const edit_keys>(in_force());
    runs_ = source.runs_;
    while (!runs_.empty() && runs_.back().start >= n_cells) runs_.pop_back();
    put(n_cells, keys);
}

}  // namespace kqview
