#include "sample/work_limit.h"

#include <time.h>

#include <algorithm>
#include <cstdio>

#include "base/error.h"

namespace kqview {

double thread_cpu_s() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void work_limit::restart() {
    start_s_ = thread_cpu_s();
    left_s_ = std::min(limit_s_, left_s_ + refill_s_);
    n_unchecked_ = 0;
}

void work_limit::pause() { left_s_ -= thread_cpu_s() - start_s_; }

void work_limit::check() {
    n_unchecked_ = 0;
    if (is_stopped()) throw error(errc::invalid_sampling, what_, ": its request has ended");
    const double used_s = thread_cpu_s() - start_s_;
    if (used_s <= left_s_) return;
    char figures[160];
    if (refill_s_ < limit_s_) {
        std::snprintf(figures, sizeof figures,
                      " has used up its CPU time; the limits are %.2f s for one token and %.2f s a "
                      "token on average",
                      limit_s_, refill_s_);
    } else {
        std::snprintf(figures, sizeof figures, " has used %.2f s of CPU time, the limit is %.2f s",
                      used_s, limit_s_);
    }
    throw error(errc::invalid_sampling, what_, figures, "; make it smaller or less ambiguous");
}

}  // namespace kqview
