#include "sched/slot_orders.h"

#include <exception>
#include <new>
#include <string>
#include <utility>

namespace kqview {

namespace {

// The running exception as ours, copied: exceptions do not change threads.
error order_failure() {
    try {
        throw;
    } catch (const error& failure) {
        return failure;
    } catch (const std::bad_alloc&) {
        return error(errc::out_of_memory, "slot: no memory left; the slot holds what it held");
    } catch (const std::exception& failure) {
        return error(errc::internal, std::string("slot: ") + failure.what());
    } catch (...) {
        return error(errc::internal, "slot: an exception of no known type");
    }
}

}  // namespace

void slot_orders::run(slot_id slot, const slot_work& work, const std::function<void()>& ring) {
    order mine{slot, work, false, {}};
    {
        const std::lock_guard lock(mutex_);
        if (closed_) throw error(*closed_);
        queue_.push_back(&mine);
    }
    ring();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return mine.is_done; });
    if (mine.failure) throw error(*mine.failure);
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
            failure = order_failure();
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
    done_.notify_all();
}

}  // namespace kqview
