// Tells a forked child from its parent, whose engine threads the child does not have and whose
// locks nobody in it will release. Cheap enough for every call: one relaxed load and a comparison.
#pragma once

#include <pthread.h>

#include <atomic>

namespace kqview {

class fork_guard {
public:
    fork_guard() noexcept : epoch_(epoch()) {}

    // True in a child that was forked after this object was made.
    bool is_forked() const noexcept { return epoch_ != epoch(); }

private:
    // How many forks lie between the first process that asked and this one.
    static int epoch() noexcept {
        [[maybe_unused]] static const int installed = pthread_atfork(
            nullptr, nullptr, [] { n_forks_.fetch_add(1, std::memory_order_relaxed); });
        return n_forks_.load(std::memory_order_relaxed);
    }

    static inline std::atomic<int> n_forks_{0};
    int epoch_;
};

}  // namespace kqview
