#include "sched/checkpoints.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>
#include <span>
#include <utility>

namespace kqview {

void checkpoints::take(slot_id slot, std::size_t n_tokens) {
    if (!are_kept() || n_tokens == 0 || last_of(slot, n_tokens) == n_tokens) return;
    add(slot, n_tokens, model_.snapshot_bytes(slot),
        [&](std::span<std::byte> out) { model_.write_snapshot(slot, out); });
}

void checkpoints::put(slot_id slot, const saved_checkpoint& one) {
    add(slot, one.n_tokens, one.parts.size(),
        [&](std::span<std::byte> out) { std::ranges::copy(one.parts, out.begin()); });
}

template <class function>
void checkpoints::add(slot_id slot, std::size_t n_tokens, std::size_t n_bytes, function write) {
    if (n_bytes == 0 || n_bytes > budget_bytes_) return;
    try {
        while (n_bytes_ + n_bytes > budget_bytes_) {
            if (!evict()) return;
        }
        auto bytes = std::make_shared_for_overwrite<std::byte[]>(n_bytes);
        write(std::span(bytes.get(), n_bytes));
        const std::lock_guard lock(readers_);
        // Those of more tokens were dropped when the slot was cut.
        of(slot).push_back({n_tokens, n_bytes, std::move(bytes), evicted_});
        n_bytes_ += n_bytes;
    } catch (const std::bad_alloc&) {
        // Going back then costs more evaluation.
    }
}

std::vector<saved_checkpoint> checkpoints::all_of(slot_id slot) const {
    std::vector<saved_checkpoint> all;
    for (const auto& one : of(slot)) {
        all.push_back({one.n_tokens, {one.bytes.get(), one.n_bytes}});
    }
    return all;
}

std::size_t checkpoints::last_of(slot_id slot, std::size_t n_most) const {
    const auto& mine = of(slot);
    const auto after = std::ranges::upper_bound(mine, n_most, {}, &snapshot::n_tokens);
    return after == mine.begin() ? 0 : std::prev(after)->n_tokens;
}

std::size_t checkpoints::go_back(slot_id slot, std::size_t n_most) noexcept {
    const auto n_tokens = last_of(slot, n_most);
    if (n_tokens == 0) return 0;
    auto& used = *std::ranges::find(of(slot), n_tokens, &snapshot::n_tokens);
    used.base = evicted_;
    try {
        model_.read_snapshot(slot, {used.bytes.get(), used.n_bytes}, static_cast<int>(n_tokens));
        return n_tokens;
    } catch (const std::exception&) {
        return 0;  // what is missing is evaluated; a broken context says so then
    }
}

void checkpoints::drop_after(slot_id slot, std::size_t n_most) {
    auto& mine = of(slot);
    if (mine.empty() || mine.back().n_tokens <= n_most) return;
    erase(mine, std::ranges::upper_bound(mine, n_most, {}, &snapshot::n_tokens), mine.end());
}

void checkpoints::copy(slot_id from, slot_id to, std::size_t n_most) {
    const auto& source = of(from);
    const auto last = std::ranges::upper_bound(source, n_most, {}, &snapshot::n_tokens);
    list copied(source.begin(), last);
    const std::lock_guard lock(readers_);
    of(to).swap(copied);
}

// Drops the one that is worth least. False: there is none.
bool checkpoints::evict() {
    list* from = nullptr;
    std::size_t i_least = 0, least = 0;
    for (auto& each : kept_) {
        for (std::size_t i = 0; i < each.size(); ++i) {
            const auto n_before = i > 0 ? each[i - 1].n_tokens : 0;
            const auto worth = each[i].base + each[i].n_tokens - n_before;
            if (!from || worth < least) from = &each, i_least = i, least = worth;
        }
    }
    if (!from) return false;
    evicted_ = std::max(evicted_, least);
    const auto gone = from->begin() + static_cast<std::ptrdiff_t>(i_least);
    erase(*from, gone, gone + 1);
    return true;
}

void checkpoints::erase(list& from, list::iterator first, list::iterator last) {
    for (auto one = first; one != last; ++one) {
        if (one->bytes.use_count() == 1) n_bytes_ -= one->n_bytes;
        one->bytes.reset();
    }
    const std::lock_guard lock(readers_);
    from.erase(first, last);
}

std::vector<std::size_t> checkpoints::counts_of(slot_id slot) const {
    std::vector<std::size_t> counts;
    std::ranges::transform(of(slot), std::back_inserter(counts), &snapshot::n_tokens);
    return counts;
}

}  // namespace kqview
