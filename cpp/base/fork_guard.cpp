#include "base/fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace kqview {

namespace {

std::atomic<int> n_forks{0};

void count_fork() { n_forks.fetch_add(1, std::memory_order_relaxed); }

bool install() {
    pthread_atfork(nullptr, nullptr, count_fork);
    return true;
}

}  // namespace

int fork_epoch() noexcept {
    static const bool installed = install();
    (void)installed;
    return n_forks.load(std::memory_order_relaxed);
}

}  // namespace kqview
