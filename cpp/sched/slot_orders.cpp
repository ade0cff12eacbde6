#include "sched/slot_orders.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

const error no_memory(errc::out_of_memory, "slot: no memory left; the slot holds what it held");

}  // namespace

bool slot_orders::run(slot_id slot, const slot_work& work, const std::function<void()>& ring,
                      const std::function<bool()>& goes_on) {
    order mine{.slot = slot, .work = work};
    {
        const std::lock_guard lock(mutex_);
        if (closed_) throw error(*closed_);
        queue_.push_back(&mine);
    }
    ring();
    bool is_wanted = true;
    while (!is_done(mine)) {
        if (mine.done.wait() || !is_wanted || goes_on()) continue;
        is_wanted = false;
        if (withdraw(mine)) return false;
    }
    if (is_wanted && mine.failure) throw error(*mine.failure);
    return is_wanted;
}

bool slot_orders::is_done(order& one) {
    const std::lock_guard lock(mutex_);
    return one.is_done;
}

// False: it was begun.
bool slot_orders::withdraw(order& one) {
    const std::lock_guard lock(mutex_);
    return std::erase(queue_, &one) > 0;
}

void slot_orders::carry_out(const std::function<void(slot_id, const slot_work&)>& do_work) {
    for (;;) {
        order* next = nullptr;
        {
            const std::lock_guard lock(mutex_);
            if (queue_.empty()) return;
            next = queue_.front();
            queue_.pop_front();
        }
        std::optional<error> failure;
        try {
            do_work(next->slot, next->work);
        } catch (...) {
            failure = running_failure("slot", errc::internal, no_memory);
        }
        const std::lock_guard lock(mutex_);
        finish(*next, std::move(failure));
    }
}

void slot_orders::close(const error& failure) {
    const std::lock_guard lock(mutex_);
    closed_ = failure;
    for (auto* const one : queue_) finish(*one, failure);
    queue_.clear();
}

// Under the lock, which the caller needs to see the end: the order is on its stack.
void slot_orders::finish(order& one, std::optional<error> failure) {
    one.failure = std::move(failure);
    one.is_done = true;
    one.done.signal();
}

}  // namespace kqview
