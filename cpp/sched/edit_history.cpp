#include "sched/edit_history.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
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

// Edits that are equal to no others.
edit_history::shared_keys unlike_any() {
    static std::atomic<std::uint64_t> n{0};
    return std::make_shared<const edit_keys>(1, edit_key{text_of("moved ", ++n), 0});
}

}  // namespace

const edit_keys& edit_history::none() {
    static const edit_keys nothing;
    return nothing;
}

std::size_t edit_history::n_agreeing(const edit_keys& wanted) const {
    if (runs_.empty()) return first_difference({}, wanted);
    for (std::size_t i = 0; i < runs_.size(); ++i) {
        const auto end = i + 1 < runs_.size() ? runs_[i + 1].start : everywhere;
        const auto n = first_difference(*runs_[i].keys, wanted);
        if (n < end) return std::max(n, runs_[i].start);
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
