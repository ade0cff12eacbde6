#include "sched/parking.h"

#include <algorithm>
#include <utility>

#include "sched/mailbox.h"

namespace kqview {

std::size_t parking::size() const {
    const std::lock_guard lock(mutex_);
    return parked_.size();
}

parking::tally parking::count(const owner_share* owner) const {
    const std::lock_guard lock(mutex_);
    tally all;
    for (const auto& one : parked_) {
        if (owner && one.of->share.get() != owner) continue;
        ++all.n_requests;
        all.n_bytes_ahead += one.n_bytes_ahead;
    }
    return all;
}

std::size_t parking::n_bytes_left_for_cells() const {
    const std::lock_guard lock(mutex_);
    std::size_t n_bytes = 0;
    for (const auto& one : parked_) n_bytes += one.progress.cells.size();
    return n_cell_bytes_max - n_bytes;
}

void parking::make_place() {
    const std::lock_guard lock(mutex_);
    if (parked_.size() == parked_.capacity()) parked_.reserve(2 * parked_.size() + 1);
}

void parking::add(parked_request one) {
    const std::lock_guard lock(mutex_);
    parked_.push_back(std::move(one));
}

std::shared_ptr<request> parking::first(
    const std::function<bool(const parked_request&)>& is_wanted) const {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<request> first;
    for (const auto& one : parked_) {
        if (first && !one.of->comes_before(*first)) continue;
        if (is_wanted(one)) first = one.of;
    }
    return first;
}

std::optional<parked_request> parking::take(const std::shared_ptr<request>& wanted) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(parked_.begin(), parked_.end(),
                                    [&](const parked_request& one) { return one.of == wanted; });
    if (found == parked_.end()) return std::nullopt;
    std::optional taken(std::move(*found));
    parked_.erase(found);
    return taken;
}

std::optional<parked_request> parking::take_any() {
    const std::lock_guard lock(mutex_);
    if (parked_.empty()) return std::nullopt;
    std::optional taken(std::move(parked_.back()));
    parked_.pop_back();
    return taken;
}

std::vector<std::shared_ptr<request>> parking::requests() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<request>> all;
    all.reserve(parked_.size());
    for (const auto& one : parked_) all.push_back(one.of);
    return all;
}

}  // namespace kqview
