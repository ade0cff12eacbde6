// The compute threads of the process, shared by its engines: whoever computes a graph borrows the
// threads it asks for and is the first of its team. The others sleep, so that an engine that waits
// for requests costs its neighbours nothing.
//
// A thread that waits for its team spins for a short time, then sleeps. Spinning is faster while
// all threads of a team run. But where threads outnumber CPUs, or other processes want these, the
// thread that is waited for may run only once the waiting one leaves its CPU. So a thread that
// mostly spins in vain hardly spins at all, until a trial shows that it helps again.
//
// Teams that compute at the same time run side by side; the system shares the CPUs among them.
// Turns of 5 ms, with whole teams waiting for each other, were no faster on a quiet machine, and
// twice as slow on a busy one, which takes the CPUs at every change.
//
// Threads: any. A task must not throw. Workers start when a task first needs them and end with the
// pool: while no engine is open there are none.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork_guard.h"

namespace kqview {

class compute_pool {
public:
    using task = void (*)(void*);

    // The pool of this process, or of this forked child. It lives as long as anybody holds it, and
    // is made anew after that.
    static std::shared_ptr<compute_pool> shared();

    compute_pool();
    ~compute_pool();  // no task runs

    // Calls `what(data)` on `n_threads` threads at once, the calling one among them, and returns
    // when all have returned. There are fewer if the system refuses to start one. Within a task,
    // another one runs on the calling thread alone.
    void run(task what, void* data, unsigned n_threads);

    std::size_t n_workers() const;

    // ---- for a task, on each of its threads

    static unsigned n_threads();     // of the team; 1 outside of tasks
    static unsigned thread_index();  // below n_threads(); 0 is the thread that called run
    // Waits for all threads of the team. What they wrote before it can be read behind it.
    static void barrier();
    // True for one thread of the team, at each place that all of them pass.
    static bool is_chosen();

private:
    class team;
    class worker;
    struct membership;
    static thread_local membership mine;

    std::vector<worker*> borrow(unsigned n_wanted);
    void give_back(const std::vector<worker*>& borrowed);

    mutable std::mutex mutex_;
    std::vector<std::unique_ptr<worker>> workers_;  // never fewer, until the pool ends
    fork_guard fork_;
};

}  // namespace kqview
