#include "sched/scheduler.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

// Made before memory can be short.
const error closed_error(errc::closed, "generate: the engine was closed; make a new Engine");
const error slot_closed_error(errc::closed, "slot: the engine was closed; make a new Engine");
const error lost_error(
    errc::closed,
    "generate: the engine was closed while a step hung, and did not end; make a new Engine");
const error no_memory(errc::out_of_memory,
                      "engine: no memory left; lower n_ctx or hold fewer tokens");

// Signals belong to Python's main thread: one that landed here, or on a compute thread started from
// here, would not interrupt the wait it is meant for.
void block_signals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

scheduler::scheduler(std::unique_ptr<runner> model, std::shared_ptr<block_pool> pool,
                     int n_queue_max)
    : pool_(std::move(pool)),
      runner_(std::move(model)),
      step_(std::make_unique<step>(*runner_, pool_, heart_, bell_)),
      n_slots_(runner_->n_slots()),
      n_queue_max_(static_cast<std::size_t>(n_queue_max)) {
    // A forked child drops views too, and the engine thread's locks may be locked there for ever.
    pool_->set_release_listener([bell = bell_, fork = fork_] {
        if (!fork.is_forked()) bell->ring();
    });
    runner_->watch(heart_);
    std::promise<void> ended;
    ended_ = ended.get_future();
    thread_ = std::make_unique<std::thread>([this, ended = std::move(ended)]() mutable {
        loop();
        ended.set_value();
    });
}

scheduler::~scheduler() {
    if (fork_.is_forked()) {
        // The thread, its locks and the compute threads are the parent's: leave everything as it
        // is.
        (void)thread_.release();
        (void)step_.release();
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
    {
        const std::lock_guard lock(mutex_);
        if (is_closing_) throw error(closed_error);
        if (queue_.size() >= n_queue_max_) {
            ++step_->counters().n_refused;
            throw error(errc::queue_full, "generate: " + std::to_string(queue_.size()) +
                                              " requests wait already, the limit is " +
                                              std::to_string(n_queue_max_) + "; try again later");
        }
        wanted->id = ++last_id_;
        const auto behind = std::find_if(queue_.begin(), queue_.end(), [&](const auto& other) {
            return other->priority < wanted->priority;
        });
        queue_.insert(behind, wanted);
    }
    bell_->ring();
}

void scheduler::cancel(const std::shared_ptr<request>& wanted) {
    if (fork_.is_forked() || !wanted->box->cancel()) return;
    bool is_queued = false;
    {
        const std::lock_guard lock(mutex_);
        is_queued = std::erase(queue_, wanted) > 0;
        if (!is_queued && !is_closing_) {
            cancels_.push_back(wanted);
            bell_->ring();
            return;
        }
    }
    // It has no slot, or the thread ends everything: nothing is to be rolled back.
    if (is_queued) ++step_->counters().n_cancelled;
    end_event end;
    end.usage.prompt_tokens = static_cast<int>(wanted->prompt.size());
    wanted->box->finish(std::move(end));
    wanted->box->settle();
}

void scheduler::wait_settled(const std::shared_ptr<request>& wanted) const {
    if (!fork_.is_forked()) wanted->box->wait_settled();
}

bool scheduler::run_on_slot(slot_id id, const slot_work& work,
                            const std::function<bool()>& goes_on) {
    check_open();
    if (id < 0 || id >= n_slots_) {
        throw error(errc::unknown_slot, "slot: " + std::to_string(id) + ", the engine has 0.." +
                                            std::to_string(n_slots_ - 1));
    }
    return slot_orders_.run(id, work, [this] { bell_->ring(); }, goes_on);
}

void scheduler::close(std::chrono::duration<double> limit) {
    if (fork_.is_forked()) return;
    const std::lock_guard close_lock(close_mutex_);
    if (!thread_) return;
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
    }
    heart_->stop();
    bell_->ring();
    if (ended_.wait_for(limit) != std::future_status::ready) return abandon();
    thread_->join();
    thread_.reset();
    pool_->clear_release_listener();
    runner_.reset();  // the context's memory is free now, not when the last handle dies
    is_lost_ = false;
}

// What close_requests does, without the thread that hangs. Who waits for its work on a slot waits
// on: the thread may be at it.
void scheduler::abandon() {
    if (is_lost_.exchange(true)) return;
    slot_orders_.close(slot_closed_error);
    step_->abandon(lost_error);
    std::vector<std::shared_ptr<request>> cancels;
    {
        const std::lock_guard lock(mutex_);
        cancels.swap(cancels_);
    }
    for (const auto& wanted : cancels) {
        wanted->box->finish({});
        wanted->box->settle();
    }
    fail_queued();
}

void scheduler::check_not_forked() const {
    if (!fork_.is_forked()) return;
    throw error(
        errc::closed,
        "engine: this process was forked from the one that opened the engine, whose threads "
        "are not here; open an Engine after the fork");
}

void scheduler::check_open() const {
    check_not_forked();
    if (is_closed()) throw error(errc::closed, "engine: it is closed; make a new Engine");
}

bool scheduler::is_closed() const {
    if (fork_.is_forked()) return true;
    const std::lock_guard lock(mutex_);
    return is_closing_;
}

int scheduler::n_queued() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(queue_.size());
}

std::vector<token_id> scheduler::tokens_of(slot_id id) const {
    check_open();
    return step_->tokens_of(id);
}

std::size_t scheduler::n_exact_of(slot_id id) const {
    check_open();
    return step_->n_exact_of(id);
}

bool scheduler::is_busy(slot_id id) const {
    check_open();
    return step_->is_busy(id);
}

double scheduler::uptime_s() const {
    return std::chrono::duration<double>(step::clock::now() - opened_).count();
}

// ---- engine thread

void scheduler::loop() {
    block_signals();
    for (;;) {
        try {
            heart_->enter(engine_phase::ordering);
            if (!take_orders()) break;
            heart_->enter(engine_phase::admitting);
            admit_queued();
            if (step_->run()) continue;
            tell_stalled();
        } catch (...) {
            // Memory ran out where no request asked for it: what they hold comes back.
            step_->fail_all(running_failure("engine", errc::internal, no_memory));
            continue;
        }
        heart_->enter(engine_phase::waiting);
        bell_->wait(step_->next_deadline());
    }
    heart_->enter(engine_phase::closing);
    close_requests();
    heart_->enter(engine_phase::ended);
}

// Carries cancellations and the work on idle slots out. False: the engine closes.
bool scheduler::take_orders() {
    std::vector<std::shared_ptr<request>> cancels;
    {
        const std::lock_guard lock(mutex_);
        if (is_closing_) return false;
        cancels.swap(cancels_);
    }
    for (const auto& wanted : cancels) step_->cancel(wanted);
    slot_orders_.carry_out([this](slot_id id, const slot_work& work) { step_->work_on(id, work); });
    return true;
}

void scheduler::admit_queued() {
    for (;;) {
        std::shared_ptr<request> next;
        {
            // One that waits for a slot of its own does not hold up those behind it.
            const std::lock_guard lock(mutex_);
            const auto found = std::find_if(queue_.begin(), queue_.end(), [&](const auto& wanted) {
                return step_->can_admit(*wanted);
            });
            if (found == queue_.end()) return;
            next = std::move(*found);
            queue_.erase(found);
        }
        step_->admit(next);
    }
}

// When every slot waits for its consumer, that may be the thread which waits for a queued request
// here. Only the consumers can know.
void scheduler::tell_stalled() {
    std::deque<std::shared_ptr<request>> queued;
    {
        const std::lock_guard lock(mutex_);
        if (queue_.empty()) return;
        queued = queue_;
    }
    for (const auto& wanted : queued) {
        const auto holders = step_->stalled_on(*wanted);
        if (!holders.empty()) wanted->box->stall(holders);
    }
}

std::shared_ptr<request> scheduler::take_queued() {
    const std::lock_guard lock(mutex_);
    if (queue_.empty()) return nullptr;
    auto first = std::move(queue_.front());
    queue_.pop_front();
    return first;
}

void scheduler::close_requests() {
    std::vector<std::shared_ptr<request>> cancels;
    {
        const std::lock_guard lock(mutex_);
        cancels.swap(cancels_);
    }
    slot_orders_.close(slot_closed_error);
    step_->fail_all(closed_error);
    fail_queued();
    for (const auto& wanted : cancels) step_->cancel(wanted);
    step_->close();
}

void scheduler::fail_queued() {
    // One by one: even an empty deque would have to be allocated, and nothing is added any more.
    while (const auto wanted = take_queued()) {
        ++step_->counters().n_failed;
        wanted->box->finish({finish_reason::error, {}, closed_error});
        wanted->box->settle();
    }
}

}  // namespace kqview
