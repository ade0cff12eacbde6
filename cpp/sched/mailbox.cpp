#include "sched/mailbox.h"

#include <algorithm>
#include <utility>

namespace kqview {

bool mailbox::has_room(int run_ahead) {
    const std::lock_guard lock(mutex_);
    const bool has_room = static_cast<int>(events_.size()) < run_ahead || is_awaited();
    engine_waits_ = !has_room;
    return has_room;
}

bool mailbox::is_starving() {
    const std::lock_guard lock(mutex_);
    const bool is_starving = is_awaited();
    engine_waits_ = !is_starving;
    return is_starving;
}

void mailbox::put(token_event token, std::optional<end_event> end) {
    const std::lock_guard lock(mutex_);
    if (is_cancelled_) {
        // The token is dropped, what the request cost is told all the same.
        if (!end || end_) return;
        end_ = std::move(end);
        end_->reason = finish_reason::cancelled;
    } else {
        events_.emplace_back(std::move(token));
        if (end) end_ = std::move(end);
    }
    wake_consumer();
}

void mailbox::put(prompt_event rows) {
    const std::lock_guard lock(mutex_);
    if (is_cancelled_) return;
    events_.emplace_back(std::move(rows));
    wake_consumer();
}

void mailbox::finish(end_event end) {
    const std::lock_guard lock(mutex_);
    if (end_) return;
    end_ = std::move(end);
    wake_consumer();
}

void mailbox::stall(const std::vector<request_id>& holders) {
    const std::lock_guard lock(mutex_);
    if (waiters_.empty()) {
        engine_waits_ = true;  // arm() rings, and the engine looks again
    } else if (stall_ != holders) {
        stall_ = holders;
        is_stall_new_ = true;
        wake_consumer();
    }
}

bool mailbox::is_cancelled() const {
    const std::lock_guard lock(mutex_);
    return is_cancelled_;
}

int mailbox::n_taken() const {
    const std::lock_guard lock(mutex_);
    return n_taken_;
}

void mailbox::settle() {
    {
        const std::lock_guard lock(mutex_);
        is_settled_.store(true, std::memory_order_release);
        wake_consumer();
    }
    is_settled_.notify_all();
}

std::optional<mailbox::item> mailbox::try_take() {
    std::optional<item> taken;
    bool ring = false;
    {
        const std::lock_guard lock(mutex_);
        if (!events_.empty()) {
            taken.emplace();
            if (auto* const token = std::get_if<token_event>(&events_.front())) {
                taken->token = std::move(*token);
                ++n_taken_;
            } else {
                taken->prompt = std::move(std::get<prompt_event>(events_.front()));
            }
            events_.pop_front();
            // A failure is raised, after the token that came before it.
            if (taken->token && events_.empty() && end_ && !end_->failure) taken->end = end_;
            is_end_taken_ = taken->end.has_value();
            ring = std::exchange(engine_waits_, false);
        } else if (end_) {
            taken.emplace();
            taken->end = end_;
            is_end_taken_ = true;
        }
    }
    if (ring) engine_->ring();
    return taken;
}

std::optional<end_event> mailbox::end() const {
    const std::lock_guard lock(mutex_);
    return end_;
}

std::vector<request_id> mailbox::take_stall() {
    const std::lock_guard lock(mutex_);
    return std::exchange(is_stall_new_, false) ? stall_ : std::vector<request_id>{};
}

void mailbox::forget_stall() {
    const std::lock_guard lock(mutex_);
    stall_.clear();
    is_stall_new_ = false;
    engine_waits_ = true;
}

bool mailbox::arm(std::shared_ptr<wake_handle> waiter) {
    bool ring = false;
    {
        const std::lock_guard lock(mutex_);
        if (has_something()) return true;
        add_waiter(std::move(waiter));
        ring = std::exchange(engine_waits_, false);
    }
    if (ring) engine_->ring();
    return false;
}

bool mailbox::arm_settled(std::shared_ptr<wake_handle> waiter) {
    const std::lock_guard lock(mutex_);
    if (is_settled_.load(std::memory_order_relaxed)) return true;
    add_waiter(std::move(waiter));
    return false;
}

void mailbox::disarm(const wake_handle* waiter) {
    const std::lock_guard lock(mutex_);
    std::erase_if(waiters_, [&](const auto& one) { return !waiter || one.get() == waiter; });
}

bool mailbox::cancel() {
    std::deque<event> dropped;  // dies outside the lock: releasing a lease rings the engine
    {
        const std::lock_guard lock(mutex_);
        if (is_cancelled_) return false;
        is_cancelled_ = true;
        if (is_end_taken_) {
            is_settled_.store(true, std::memory_order_release);
            return false;
        }
        dropped.swap(events_);
    }
    return true;
}

void mailbox::wait_settled() const { is_settled_.wait(false, std::memory_order_acquire); }

void mailbox::add_waiter(std::shared_ptr<wake_handle> waiter) {
    if (std::find(waiters_.begin(), waiters_.end(), waiter) == waiters_.end()) {
        waiters_.push_back(std::move(waiter));
    }
}

void mailbox::wake_consumer() {
    for (const auto& waiter : waiters_) waiter->signal();
    waiters_.clear();
}

}  // namespace kqview
