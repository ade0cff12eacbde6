// Wakes the engine thread when there may be something to do. Rings are coalesced and never lost.
// Threads: ring() from any thread, wait() from the engine thread alone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

namespace kqview {

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

}  // namespace kqview
