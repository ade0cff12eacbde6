#include "base/compute_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>

#include "base/system.h"

namespace kqview {

namespace {

using clock = std::chrono::steady_clock;

constexpr std::size_t cache_line = 64;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

// How long one thread spins before it sleeps. Waits between the nodes of a graph take a few
// microseconds if all threads run; to fall asleep and wake up takes about as long as `longest`.
class spin_limit {
public:
    clock::duration next() {
        constexpr int n_between_trials = 16;
        is_trial_ = limit_ < longest && ++n_short_ % n_between_trials == 0;
        return is_trial_ ? longest : limit_;
    }

    void note(bool was_enough) {
        if (was_enough) {
            limit_ = is_trial_ ? longest : std::min(longest, 2 * limit_);
        } else if (!is_trial_) {
            limit_ = std::max(shortest, limit_ / 4);
        }
    }

private:
    static constexpr clock::duration longest = std::chrono::microseconds(50);
    static constexpr clock::duration shortest = std::chrono::microseconds(1);

    clock::duration limit_ = longest;
    unsigned n_short_ = 0;  // waits with less than the longest limit
    bool is_trial_ = false;
};

thread_local spin_limit spinning;

// A number that threads wait for to change.
class changing_number {
public:
    std::uint32_t value() const { return value_.load(std::memory_order_relaxed); }

    void set(std::uint32_t value) {
        value_.store(value);
        if (n_asleep_.load() > 0) wake_sleepers(value_);
    }

    void await_other_than(std::uint32_t old, bool may_spin) {
        if (may_spin && spin(old)) return;
        while (is(old)) {
            n_asleep_.fetch_add(1);
            sleep_while(value_, old);
            n_asleep_.fetch_sub(1);
        }
    }

private:
    bool is(std::uint32_t old) const { return value_.load(std::memory_order_acquire) == old; }

    bool spin(std::uint32_t old) {
        constexpr int n_looks = 32;  // between two readings of the clock
        if (!is(old)) return true;
        const auto limit = spinning.next();
        const auto start = clock::now();
        do {
            for (int i = 0; i < n_looks; ++i) {
                relax();
                if (is(old)) continue;
                spinning.note(true);
                return true;
            }
        } while (clock::now() - start < limit);
        spinning.note(false);
        return false;
    }

    // Stored and read in one order by all threads: a thread that falls asleep either sees the new
    // value or is seen.
    alignas(cache_line) std::atomic<std::uint32_t> value_{0};
    std::atomic<std::uint32_t> n_asleep_{0};
};

}  // namespace

// The threads that run one task together. Lives on the stack of run().
class compute_pool::team {
public:
    team(task what, void* data, unsigned n_threads)
        : what_(what), data_(data), n_threads_(n_threads), may_spin_(n_threads <= n_cpus()) {}

    unsigned n_threads() const { return n_threads_; }
    bool may_spin() const { return may_spin_; }

    void compute(unsigned index);

    void barrier() {
        const auto round = round_.value();
        if (n_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < n_threads_) {
            round_.await_other_than(round, may_spin_);
            return;
        }
        n_arrived_.store(0, std::memory_order_relaxed);
        round_.set(round + 1);
    }

    // `n_before`: at how many places the calling thread has asked before.
    bool is_chosen(std::uint32_t n_before) {
        return n_chosen_.compare_exchange_strong(n_before, n_before + 1, std::memory_order_relaxed);
    }

private:
    const task what_;
    void* const data_;
    const unsigned n_threads_;
    const bool may_spin_;
    alignas(cache_line) std::atomic<std::uint32_t> n_arrived_{0};
    changing_number round_;
    std::atomic<std::uint32_t> n_chosen_{0};
};

struct compute_pool::membership {
    team* of = nullptr;
    unsigned index = 0;
    std::uint32_t n_chosen = 0;
};

thread_local compute_pool::membership compute_pool::mine;

void compute_pool::team::compute(unsigned index) {
    const auto before = std::exchange(mine, {this, index, 0});
    what_(data_);
    mine = before;
}

// One thread. It counts what happens to it: even while it is idle, odd while it has a task.
class compute_pool::worker {
public:
    worker() {
        const signals_blocked guard;
        thread_ = std::thread([this] { work(); });
    }
    ~worker() {
        start(nullptr, 0);
        thread_.join();
    }

    void start(team* of, unsigned index) {
        team_ = of;
        index_ = index;
        started_ = count_.value() + 1;
        count_.set(started_);
    }
    void await_end(bool may_spin) { count_.await_other_than(started_, may_spin); }

    bool is_borrowed = false;  // under the pool's lock

private:
    void work() {
        name_this_thread("kqview-compute");
        bool may_spin = false;
        for (std::uint32_t count = 0;; count += 2) {
            count_.await_other_than(count, may_spin);
            if (!team_) return;
            team_->compute(index_);
            may_spin = team_->may_spin();  // the next graph often follows soon
            count_.set(count + 2);
        }
    }

    team* team_ = nullptr;
    unsigned index_ = 0;
    std::uint32_t started_ = 0;  // the count since the last start()
    changing_number count_;
    std::thread thread_;
};

compute_pool::compute_pool() = default;

compute_pool::~compute_pool() {
    if (!fork_.is_forked()) return;
    for (auto& one : workers_) (void)one.release();  // their threads are the parent's
}

std::shared_ptr<compute_pool> compute_pool::shared() {
    struct registry {
        fork_guard fork;
        std::mutex mutex;
        std::weak_ptr<compute_pool> pool;
    };
    // Never destroyed: an engine's thread may outlive static objects.
    static std::atomic<registry*> current{new registry};
    auto* found = current.load();
    if (found->fork.is_forked()) {  // its lock may be locked for ever
        auto* const fresh = new registry;
        if (current.compare_exchange_strong(found, fresh)) {
            found = fresh;
        } else {
            delete fresh;
        }
    }
    const std::lock_guard lock(found->mutex);
    auto pool = found->pool.lock();
    if (!pool) found->pool = pool = std::make_shared<compute_pool>();
    return pool;
}

std::vector<compute_pool::worker*> compute_pool::borrow(unsigned n_wanted) {
    std::vector<worker*> borrowed;
    borrowed.reserve(n_wanted);
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; borrowed.size() < n_wanted; ++i) {
        if (i == workers_.size()) {
            try {
                workers_.push_back(std::make_unique<worker>());
            } catch (const std::exception&) {
                break;
            }
        }
        if (!std::exchange(workers_[i]->is_borrowed, true)) borrowed.push_back(workers_[i].get());
    }
    return borrowed;
}

void compute_pool::give_back(const std::vector<worker*>& borrowed) {
    const std::lock_guard lock(mutex_);
    for (auto* const one : borrowed) one->is_borrowed = false;
}

void compute_pool::run(task what, void* data, unsigned n_threads) {
    std::vector<worker*> others;
    if (n_threads > 1 && !mine.of) others = borrow(n_threads - 1);
    team all(what, data, static_cast<unsigned>(others.size()) + 1);
    for (unsigned i = 0; i < others.size(); ++i) others[i]->start(&all, i + 1);
    all.compute(0);
    for (auto* const one : others) one->await_end(all.may_spin());
    give_back(others);
}

std::size_t compute_pool::n_workers() const {
    const std::lock_guard lock(mutex_);
    return workers_.size();
}

unsigned compute_pool::n_threads() { return mine.of ? mine.of->n_threads() : 1; }

unsigned compute_pool::thread_index() { return mine.index; }

void compute_pool::barrier() {
    if (mine.of) mine.of->barrier();
}

bool compute_pool::is_chosen() { return !mine.of || mine.of->is_chosen(mine.n_chosen++); }

}  // namespace kqview
