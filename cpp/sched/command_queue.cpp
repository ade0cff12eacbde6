#include "sched/command_queue.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/system.h"

namespace kqview {

// ---- any thread

void command_queue::check_open() const {
    if (is_closed_) throw error(closed_error);
}

void command_queue::push(command one) {
    {
        const std::lock_guard lock(mutex_);
        check_open();
        commands_.push_back(std::move(one));
    }
    engine_->ring();
}

bool command_queue::submit(const std::shared_ptr<request>& wanted) {
    {
        const std::lock_guard lock(mutex_);
        check_open();
        const auto n_own = std::count_if(waiting_.begin(), waiting_.end(), [&](const auto& other) {
            return other->owner == wanted->owner;
        });
        if (static_cast<std::size_t>(n_own) >= n_waiting_max_) return false;
        wanted->share = share_of(wanted->owner);
        waiting_.push_back(wanted);
        wanted->id = ++last_id_;
        wanted->waits_since = std::chrono::steady_clock::now();
    }
    engine_->ring();
    return true;
}

std::shared_ptr<owner_share> command_queue::share_of(const std::string& owner) {
    std::erase_if(shares_, [](const auto& one) { return one.second.expired(); });
    for (const auto& [name, known] : shares_) {
        if (name != owner) continue;
        if (auto share = known.lock()) return share;
    }
    auto share = std::make_shared<owner_share>();
    shares_.emplace_back(owner, share);
    return share;
}

command_queue::cancelling command_queue::cancel(const std::shared_ptr<request>& wanted) {
    {
        const std::lock_guard lock(mutex_);
        if (std::erase(waiting_, wanted) > 0) return cancelling::withdrawn;
        if (is_closed_) return cancelling::closed;
        commands_.push_back({.what = command::kind::cancel, .of = wanted});
    }
    engine_->ring();
    return cancelling::ordered;
}

void command_queue::answer(const std::shared_ptr<request>& wanted, pass_answer given) {
    push({.what = command::kind::answer, .of = wanted, .answer = std::move(given)});
}

bool command_queue::run_on_slots(const table_work& work, const std::function<bool()>& goes_on) {
    order mine{.work = work};
    push({.what = command::kind::work, .work = &mine});
    for (bool is_wanted = true;;) {
        const bool goes_on_waiting =
            mine.done.wait() != wait_end::interrupted || !is_wanted || goes_on();
        const std::lock_guard lock(mutex_);
        if (!goes_on_waiting) {
            is_wanted = false;
            const auto is_mine = [&](const command& one) { return one.work == &mine; };
            if (std::erase_if(commands_, is_mine) > 0) return false;  // it never began
        }
        if (!mine.is_done) continue;
        if (is_wanted && mine.failure) throw error(*mine.failure);
        return is_wanted;
    }
}

void command_queue::close() {
    {
        const std::lock_guard lock(mutex_);
        is_closed_ = true;
    }
    engine_->ring();
}

bool command_queue::is_closed() const {
    const std::lock_guard lock(mutex_);
    return is_closed_;
}

std::size_t command_queue::n_waiting() const {
    const std::lock_guard lock(mutex_);
    return waiting_.size();
}

// ---- engine thread

command_queue::command command_queue::take_first() {
    if (commands_.empty()) return {};
    auto first = std::move(commands_.front());
    commands_.pop_front();
    return first;
}

command_queue::command command_queue::take() {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return {.what = command::kind::close};
    return take_first();
}

command_queue::command command_queue::take_left() {
    const std::lock_guard lock(mutex_);
    return take_first();
}

// Signals under the lock, which the caller needs to see the end: the order is on the caller's
// stack.
void command_queue::finish(order& one, std::optional<error> failure) {
    const std::lock_guard lock(mutex_);
    one.failure = std::move(failure);
    one.is_done = true;
    one.done.signal();
}

command_queue::waiting_list::const_iterator command_queue::next_of(
    const std::function<bool(const request&)>& is_wanted) const {
    auto next = waiting_.end();
    for (auto one = waiting_.begin(); one != waiting_.end(); ++one) {
        if (next != waiting_.end() && !(*one)->comes_before(**next)) continue;
        if (is_wanted(**one)) next = one;
    }
    return next;
}

std::shared_ptr<request> command_queue::take_waiting(
    const std::function<bool(const request&)>& may_run) {
    const std::lock_guard lock(mutex_);
    const auto found = next_of(may_run);
    if (found == waiting_.end()) return nullptr;
    auto taken = *found;
    waiting_.erase(found);
    return taken;
}

std::shared_ptr<request> command_queue::first_waiting(
    const std::function<bool(const request&)>& is_wanted) const {
    const std::lock_guard lock(mutex_);
    const auto found = next_of(is_wanted);
    return found == waiting_.end() ? nullptr : *found;
}

bool command_queue::take(const std::shared_ptr<request>& wanted) {
    const std::lock_guard lock(mutex_);
    return std::erase(waiting_, wanted) > 0;
}

bool command_queue::has_owners() const {
    const std::lock_guard lock(mutex_);
    return shares_.size() > 1;
}

std::vector<std::shared_ptr<request>> command_queue::waiting() const {
    const std::lock_guard lock(mutex_);
    return {waiting_.begin(), waiting_.end()};
}

}  // namespace kqview
