// Wake-ups in both directions: consumers ring the engine thread's doorbell, and the engine thread
// signals a consumer's wake handle.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "base/system.h"

namespace kqview {

// Wakes the engine thread when there may be something to do. Rings are coalesced and never lost.
// Threads: ring() from any thread, wait() from the engine thread alone.
class doorbell {
public:
    using time_point = std::chrono::steady_clock::time_point;

    void ring() {
        {
            const std::lock_guard lock(mutex_);
            has_rung_ = true;
        }
        rung_.notify_one();
    }

    // Blocks until rung since the last wait, or until `deadline`.
    void wait(std::optional<time_point> deadline) {
        std::unique_lock lock(mutex_);
        const auto is_rung = [this] { return has_rung_; };
        if (deadline) {
            rung_.wait_until(lock, *deadline, is_rung);
        } else {
            rung_.wait(lock, is_rung);
        }
        has_rung_ = false;
    }

private:
    std::mutex mutex_;
    std::condition_variable rung_;
    bool has_rung_ = false;
};

// Wakes a waiter through the kernel: asyncio adds its descriptor as a reader; a synchronous wait
// notices signals.
class wake_handle {
public:
    int fd() const noexcept { return flag_.fd(); }

    // Makes fd() readable. Coalesced: one write until the next drain().
    void signal() noexcept {
        if (!is_signalled_.exchange(true, std::memory_order_acq_rel)) flag_.set();
    }

    // Clears the signal; call it before looking at what it announced.
    void drain() noexcept {
        flag_.clear();
        is_signalled_.store(false, std::memory_order_release);
    }

    wait_end wait(int timeout_ms = -1) const noexcept { return flag_.wait(timeout_ms); }

private:
    kernel_flag flag_;
    std::atomic<bool> is_signalled_{false};
};

}  // namespace kqview
