// Signals belong to Python's main thread: one that is delivered to another would not interrupt the
// wait that it is meant for.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace kqview {

// Blocks every signal on this thread, and on those that start meanwhile, for its lifetime.
class signals_blocked {
public:
    signals_blocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~signals_blocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    signals_blocked(const signals_blocked&) = delete;
    signals_blocked& operator=(const signals_blocked&) = delete;

private:
    sigset_t before_;
};

}  // namespace kqview
