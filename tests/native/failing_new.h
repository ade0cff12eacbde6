// Makes one allocation of a thread fail: operator new of this program counts down and throws
// bad_alloc at zero.
// Threads: each has a count of its own.
#pragma once

#include <atomic>
#include <utility>

namespace kqview::test {

// Allocations of this thread that succeed before one fails; -1: none fails.
extern thread_local long n_allocations_left;
extern std::atomic<int> n_allocations_failed;

// What a fake allocates for itself does not count. Setting the count in here stays.
class uncounted_allocations {
public:
    uncounted_allocations() : n_left_(std::exchange(n_allocations_left, -1)) {}
    ~uncounted_allocations() {
        if (n_allocations_left < 0) n_allocations_left = n_left_;
    }
    uncounted_allocations(const uncounted_allocations&) = delete;
    uncounted_allocations& operator=(const uncounted_allocations&) = delete;

private:
    const long n_left_;
};

}  // namespace kqview::test
