// Wakes a waiter through a file descriptor: asyncio adds it as a reader, a synchronous wait polls
// it and so notices signals, which a condition variable would sleep through.
// Threads: signal() from any thread; wait() and drain() from the one waiter.
#pragma once

#include <atomic>

namespace kqview {

class wake_handle {
public:
    wake_handle();  // eventfd on Linux, else a pipe; raises internal when descriptors ran out
    ~wake_handle();
    wake_handle(const wake_handle&) = delete;
    wake_handle& operator=(const wake_handle&) = delete;

    int fd() const noexcept { return read_fd_; }

    // Makes fd() readable. Coalesced: one write until the next drain().
    void signal() noexcept;

    // Takes the signal back; call it before looking at what it announced.
    void drain() noexcept;

    // Blocks until signalled, or for `timeout_ms` where that is not -1. False: a signal handler ran
    // (EINTR); look at it and wait again.
    bool wait(int timeout_ms = -1) noexcept;

private:
    int read_fd_ = -1;
    int write_fd_ = -1;
    std::atomic<bool> is_signalled_{false};
};

}  // namespace kqview
