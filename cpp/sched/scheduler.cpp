#include "sched/scheduler.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/system.h"

namespace kqview {

scheduler::scheduler(std::unique_ptr<runner> model, std::shared_ptr<block_pool> pool,
                     int n_queue_max, const pace& given)
    : pool_(std::move(pool)),
      runner_(std::move(model)),
      queue_(std::make_unique<command_queue>(bell_, static_cast<std::size_t>(n_queue_max))),
      loop_(std::make_unique<engine_loop>(*runner_, pool_, heart_, bell_, *queue_, given)),
      n_slots_(runner_->n_slots()) {
    // A forked child drops views too, where the doorbell's lock may be locked forever.
    pool_->set_release_listener([bell = bell_, fork = fork_] {
        if (!fork.is_forked()) bell->ring();
    });
    runner_->watch(heart_);
    std::promise<void> ended;
    ended_ = ended.get_future();
    const signals_blocked guard;  // for the thread, and for compute threads started from it
    thread_ = std::make_unique<std::thread>([this, ended = std::move(ended)]() mutable {
        loop_->run();
        ended.set_value();
    });
}

scheduler::~scheduler() {
    if (fork_.is_forked()) {
        // The thread, its locks and the compute threads belong to the parent: leave everything as
        // it is.
        (void)thread_.release();
        (void)loop_.release();
        (void)queue_.release();
        (void)runner_.release();
        new auto(bell_);  // destroying a condition variable waits for its waiter
        return;
    }
    close();
}

void scheduler::deleter::operator()(scheduler* one) const {
    one->close();
    if (!one->is_lost()) delete one;
}

void scheduler::submit(const std::shared_ptr<request>& wanted) {
    check_open();
    wanted->box = std::make_shared<mailbox>(bell_);
    if (queue_->submit(wanted)) return;
    ++loop_->counters().n_refused;
    const auto limit = queue_->n_waiting_max();
    throw error(errc::queue_full, limit, " requests wait already, the limit is ", limit,
                "; try again later");
}

void scheduler::cancel(const std::shared_ptr<request>& wanted) {
    if (fork_.is_forked() || !wanted->box->cancel()) return;
    const auto how = queue_->cancel(wanted);
    if (how == command_queue::cancelling::ordered) return;
    // It has no slot, or the engine is closed: nothing needs to be rolled back.
    if (how == command_queue::cancelling::withdrawn) ++loop_->counters().n_cancelled;
    wanted->box->settle(end_without_slot(*wanted, finish_reason::cancelled));
}

void scheduler::answer(const std::shared_ptr<request>& wanted, forward_pass& pass,
                       pass_answer given) {
    check_open();
    pass.answer(*wanted, given);
    queue_->answer(wanted, std::move(given));
}

bool scheduler::run_on_slot(slot_id id, const slot_work& work,
                            const std::function<bool()>& goes_on) {
    check_slot(id);
    return queue_->run_on_slots([&](slot_table& slots) { slots.work_on(id, work); }, goes_on);
}

bool scheduler::branch(slot_id from, int n, std::vector<slot_id>& branches,
                       const std::function<bool()>& goes_on) {
    check_slot(from);
    if (n < 1 || n >= n_slots_) {
        throw error(errc::request, "n is ", n, ", but the engine has ", n_slots_ - 1,
                    " other slots; open it with more n_slots, or make 1..", n_slots_ - 1,
                    " branches");
    }
    const auto n_branches = static_cast<std::size_t>(n);
    return queue_->run_on_slots(
        [&](slot_table& slots) { branches = slots.branch(from, n_branches); }, goes_on);
}

void scheduler::check_slot(slot_id id) const {
    check_open();
    if (id >= 0 && id < n_slots_) return;
    throw error(errc::unknown_slot, "slot is ", id, ", but the engine has slots 0..", n_slots_ - 1);
}

void scheduler::close(std::chrono::duration<double> limit) {
    if (fork_.is_forked()) return;
    const std::lock_guard close_lock(close_mutex_);
    if (!thread_) return;
    queue_->close();
    heart_->stop();
    if (ended_.wait_for(limit) != std::future_status::ready) {
        if (!is_lost_.exchange(true)) loop_->abandon();
        return;
    }
    thread_->join();
    thread_.reset();
    pool_->clear_release_listener();
    runner_.reset();  // frees the context's memory here, not when the last handle dies
    is_lost_ = false;
}

void scheduler::check_not_forked() const {
    if (!fork_.is_forked()) return;
    throw error(errc::closed,
                "this process was forked from the one that opened the engine, whose threads are "
                "not here; open an Engine after the fork");
}

void scheduler::check_open() const {
    check_not_forked();
    if (is_closed()) throw error(errc::closed, "the engine is closed; make a new Engine");
}

std::vector<token_id> scheduler::tokens_of(slot_id id) const {
    check_open();
    return loop_->slots().tokens_of(id);
}

std::vector<std::size_t> scheduler::checkpoints_of(slot_id id) const {
    check_open();
    return loop_->slots().checkpoints_of(id);
}

double scheduler::uptime_s() const {
    return std::chrono::duration<double>(engine_loop::clock::now() - opened_).count();
}

}  // namespace kqview
