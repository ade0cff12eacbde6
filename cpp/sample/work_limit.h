// A budget of CPU time. Long computations check it from inside, so that they end when it is
// exhausted, or when another thread reports that the result is not needed.
// Threads: the computing one; stop(): any.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <utility>

namespace kqview {

// Set by whoever no longer wants the result of a computation that another thread does.
using stop_flag = std::atomic<bool>;

class work_limit {
public:
    // `what` begins the error's message, for example "grammar". Each restart adds `refill_s` back,
    // up to `limit_s`: it is the limit on average.
    work_limit(std::string what, double limit_s, double refill_s)
        : what_(std::move(what)), limit_s_(limit_s), refill_s_(refill_s), left_s_(limit_s) {}
    // Each restart restores the whole budget.
    work_limit(std::string what, double limit_s) : work_limit(std::move(what), limit_s, limit_s) {}

    // Begins a piece of work on this thread, with the remaining budget plus the refill.
    void restart();
    // Ends it, on the same thread; the used time is deducted.
    void pause();

    // One unit is about a tenth of a microsecond of work. Raises invalid_sampling when the budget
    // is exhausted or after stop().
    void spend(std::size_t n_units = 1) {
        n_unchecked_ += n_units;
        if (n_unchecked_ >= n_between_checks) check();
    }
    void check();
    // CPU time that another process used for this one.
    void charge(double used_s) { left_s_ -= used_s; }

    void stop() noexcept { is_stopped_.store(true, std::memory_order_relaxed); }
    bool is_stopped() const noexcept { return is_stopped_.load(std::memory_order_relaxed); }
    double limit_s() const { return limit_s_; }
    const std::string& what() const { return what_; }

private:
    static constexpr std::size_t n_between_checks = 2048;

    const std::string what_;
    const double limit_s_;
    const double refill_s_;
    double left_s_;
    double start_s_ = 0.0;
    std::size_t n_unchecked_ = 0;
    std::atomic<bool> is_stopped_{false};
};

// CPU time of the calling thread; waiting for other threads does not count.
double thread_cpu_s();

}  // namespace kqview
