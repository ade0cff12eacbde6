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

void mailbox::put(event content, std::optional<end_event> end) {
    const std::lock_guard lock(mutex_);
    if (consumer_ == consuming::cancelled) {
        // The token is dropped, but the usage of the request is reported all the same.
        if (!end || producer_ != producing::open) return;
        end->reason = finish_reason::cancelled;
    } else {
        events_.push_back(std::move(content));
    }
    if (end) set_end(std::move(*end));
    wake_consumer();
}

void mailbox::finish(end_event end) {
    const std::lock_guard lock(mutex_);
    if (producer_ != producing::open) return;
    set_end(std::move(end));
    wake_consumer();
}

void mailbox::settle(end_event end) {
    const std::lock_guard lock(mutex_);
    if (producer_ == producing::open) set_end(std::move(end));
    producer_ = producing::settled;
    wake_consumer();
}

void mailbox::set_end(end_event end) {
    end_ = std::move(end);
    producer_ = producing::ended;
}

bool mailbox::stall(const std::vector<request_id>& holders) {
    const std::lock_guard lock(mutex_);
    if (waiters_.empty()) {
        engine_waits_ = true;  // arm() rings, and the engine checks again
    } else if (stall_ != holders) {
        if (!std::exchange(is_wait_known_, true)) return false;
        stall_ = holders;
        is_stall_new_ = true;
        wake_consumer();
    }
    return true;
}

std::size_t mailbox::n_bytes_ahead() const {
    const std::lock_guard lock(mutex_);
    const auto n_bytes = [](const auto& one) {
        return one.rows.block ? one.rows.block->block_bytes() : 0;
    };
    std::size_t n_all = 0;
    for (const auto& one : events_) n_all += std::visit(n_bytes, one);
    return n_all;
}

std::size_t mailbox::n_ahead() const {
    const std::lock_guard lock(mutex_);
    return events_.size();
}

int mailbox::n_taken() const {
    const std::lock_guard lock(mutex_);
    return n_taken_;
}

std::optional<mailbox::item> mailbox::try_take() {
    std::optional<item> taken;
    bool ring = false;
    {
        const std::lock_guard lock(mutex_);
        const bool has_ended = producer_ != producing::open;
        if (!events_.empty()) {
            taken.emplace();
            if (auto* const token = std::get_if<token_event>(&events_.front())) {
                taken->token = std::move(*token);
                ++n_taken_;
            } else if (auto* const rows = std::get_if<prompt_event>(&events_.front())) {
                taken->prompt = std::move(*rows);
            } else {
                taken->forward = std::move(std::get<forward_event>(events_.front()));
            }
            events_.pop_front();
            ring = std::exchange(engine_waits_, false);
            // A failure comes as an item of its own, to be raised after the last token.
            if (taken->token && events_.empty() && has_ended && !end_.failure) taken->end = end_;
        } else if (has_ended) {
            taken.emplace();
            taken->end = end_;
        }
        if (taken && taken->end && consumer_ == consuming::open) consumer_ = consuming::has_end;
    }
    if (ring) engine_->ring();
    return taken;
}

bool mailbox::is_over() const {
    const std::lock_guard lock(mutex_);
    return producer_ != producing::open || consumer_ == consuming::cancelled;
}

std::optional<end_event> mailbox::end() const {
    const std::lock_guard lock(mutex_);
    return producer_ == producing::open ? std::nullopt : std::optional(end_);
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
    if (producer_ == producing::settled) return true;
    add_waiter(std::move(waiter));
    return false;
}

void mailbox::disarm(const wake_handle* waiter) {
    const std::lock_guard lock(mutex_);
    std::erase_if(waiters_, [&](const auto& one) { return !waiter || one.get() == waiter; });
}

bool mailbox::cancel() {
    std::deque<event> dropped;  // freed outside the lock: releasing a lease rings the engine
    const std::lock_guard lock(mutex_);
    if (consumer_ == consuming::cancelled) return false;
    if (consumer_ == consuming::has_end) {
        producer_ = producing::settled;
        return false;
    }
    consumer_ = consuming::cancelled;
    dropped.swap(events_);
    return true;
}

void mailbox::add_waiter(std::shared_ptr<wake_handle> waiter) {
    is_wait_known_ = false;
    if (std::find(waiters_.begin(), waiters_.end(), waiter) == waiters_.end()) {
        waiters_.push_back(std::move(waiter));
    }
}

void mailbox::wake_consumer() {
    for (const auto& waiter : waiters_) waiter->signal();
    waiters_.clear();
}

}  // namespace kqview
