// Wake-ups in both directions: consumers ring the engine thread's doorbell, and the engine thread
// signals a consumer's wake handle.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

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

// Wakes a waiter through a file descriptor: asyncio adds it as a reader; a synchronous wait polls
// it and so notices signals, through which a condition variable would sleep.
class wake_handle {
public:
    wake_handle();  // eventfd on Linux, else a pipe; raises internal when descriptors ran out
    ~wake_handle();

    int fd() const noexcept { return read_fd_; }

    // Makes fd() readable. Coalesced: one write until the next drain().
    void signal() noexcept;

    // Clears the signal; call it before looking at what it announced.
    void drain() noexcept;

    // Blocks until signalled, or for `timeout_ms` unless that is -1. False: a signal handler ran
    // (EINTR); handle that and wait again.
    bool wait(int timeout_ms = -1) noexcept;

private:
    int read_fd_ = -1;
    int write_fd_ = -1;
    std::atomic<bool> is_signalled_{false};
};

}  // namespace kqview
