// Tokens and prompt rows on their way to their mailboxes. Rows of the CPU are there when a decode
// returns; those of a device arrive while the next step computes, and so does the token they belong
// to.
// Threads: the engine thread.
#include <algorithm>
#include <string>
#include <utility>

#include "sched/step.h"

namespace kqview {

namespace {

void put(mailbox& box, token_event content, std::optional<end_event> end) {
    box.put(std::move(content), std::move(end));
}

void put(mailbox& box, prompt_event content, std::optional<end_event> /*end*/) {
    box.put(std::move(content));
}

}  // namespace

// What a request gets of this step has to wait for this: what comes without rows must not overtake
// what comes with them.
transfer_id step::awaited(const request& to, const step_result& result) const {
    const bool has_rows = std::any_of(rows_.begin(), rows_.end(),
                                      [&](const auto& row) { return row.plan == to.capture; });
    return has_rows ? result.transfer : 0;
}

void step::deliver(parcel one, transfer_id rows) {
    if (rows != 0) {
        rows_on_the_way_ = std::max(rows_on_the_way_, rows);
        parcels_.push_back(std::move(one));
        return;
    }
    const auto has_rows = [](const auto& content) { return content.rows.block != nullptr; };
    if (std::visit(has_rows, one.content)) count_view();
    auto& box = *one.to->box;
    std::visit([&](auto& content) { put(box, std::move(content), std::move(one.end)); },
               one.content);
}

// Before a block that nobody will see goes back to the pool: a device may still write into it.
void step::await_rows(const captured_rows& dropped, transfer_id rows) noexcept {
    if (!dropped.block || rows == 0) return;
    try {
        model_.await(rows);
    } catch (...) {
        // The next decode says what is wrong with the device.
    }
}

// Waits for the rows of the last decode and hands out what belongs to them.
void step::collect() {
    if (parcels_.empty()) return;
    auto parcels = std::exchange(parcels_, {});
    std::optional<error> lost;
    try {
        model_.await(rows_on_the_way_);
    } catch (...) {
        lost = current_failure();
    }
    for (auto& one : parcels) {
        const auto to = one.to;
        const auto usage = one.end ? std::optional(one.end->usage) : std::nullopt;
        std::optional<error> failure = lost;
        if (!failure) {
            try {
                deliver(std::move(one), 0);
                continue;
            } catch (...) {
                failure = current_failure();
            }
        }
        const auto running = std::find_if(slots_.begin(), slots_.end(), [&](const slot& candidate) {
            return candidate.active == to;
        });
        if (running != slots_.end()) {
            finish(*running, finish_reason::error, failure);
        } else if (usage) {  // it had its last token and has left its slot
            to->box->finish({finish_reason::error, *usage, failure});
        }
    }
}

void step::note_computed() {
    if (!computed_) computed_ = clock::now();
}

// A view of the last step goes out. Counted before its consumer can see it.
void step::count_view() {
    if (!computed_) return;
    const auto now = clock::now();
    const auto spent = now - *std::exchange(computed_, now);
    if (!std::exchange(is_counted_, true)) ++counters_.n_captured_steps;
    counters_.step_to_view_ns += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
}

int step::n_on_the_way(const slot& target) const {
    return static_cast<int>(std::count_if(parcels_.begin(), parcels_.end(), [&](const parcel& one) {
        return one.to == target.active;
    }));
}

}  // namespace kqview
