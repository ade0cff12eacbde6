#include "sched/sampler_lane.h"

#include <algorithm>
#include <utility>

#include "sched/request.h"

namespace kqview {

void sampler_lane::start(const std::shared_ptr<ticket>& one, std::span<const float> logits,
                         float tie_tolerance) {
    one->logits_.assign(logits.begin(), logits.end());
    one->tie_tolerance_ = tie_tolerance;
    one->started_ = clock::now();
    {
        const std::lock_guard lock(mutex_);
        if (n_idle_ <= waiting_.size() && workers_.size() < n_workers_max_) {
            workers_.emplace_back([this] { work(); });
        }
        waiting_.push_back(one);
        try {
            working_.push_back(one);
        } catch (...) {
            waiting_.pop_back();
            throw;
        }
        one->is_working_ = true;
    }
    has_work_.notify_one();
}

bool sampler_lane::is_done(const ticket& one) const {
    const std::lock_guard lock(mutex_);
    return !one.is_working_;
}

std::optional<picked_token> sampler_lane::take(ticket& one) {
    const std::lock_guard lock(mutex_);
    if (one.failure_) throw error(*one.failure_);
    return std::exchange(one.picked_, std::nullopt);
}

void sampler_lane::abandon(ticket& one) noexcept {
    one.picker_->stop();
    const std::lock_guard lock(mutex_);
    one.is_abandoned_ = true;
}

void sampler_lane::await_quick(clock::duration bound) {
    std::unique_lock lock(mutex_);
    for (;;) {
        const auto now = clock::now();
        std::optional<clock::time_point> until;
        for (const auto& one : working_) {
            const auto last = one->started_ + bound;
            if (!one->is_abandoned_ && last > now) until = std::min(until.value_or(last), last);
        }
        if (!until) return;
        has_picked_.wait_until(lock, *until);
    }
}

void sampler_lane::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        ++n_idle_;
        has_work_.wait(lock, [this] { return is_closing_ || !waiting_.empty(); });
        --n_idle_;
        if (waiting_.empty()) return;
        auto one = std::move(waiting_.front());
        waiting_.pop_front();
        std::optional<picked_token> picked;
        std::optional<error> failure;
        if (!one->is_abandoned_) {
            lock.unlock();
            try {
                auto& picker = *one->picker_;
                const bool is_tied =
                    one->tie_tolerance_ >= 0 && picker.is_tied(one->logits_, one->tie_tolerance_);
                if (!is_tied) picked = picker.pick(one->logits_.data());
            } catch (...) {
                failure = failure_of_request();
            }
            lock.lock();
        }
        one->picked_ = std::move(picked);
        one->failure_ = std::move(failure);
        one->is_working_ = false;
        std::erase(working_, one);
        has_picked_.notify_all();
        const bool is_wanted = !one->is_abandoned_;
        lock.unlock();
        if (is_wanted) engine_->ring();
        // Outside the lock: this may be the last reference to the picker, which takes time to
        // destroy.
        one.reset();
        lock.lock();
    }
}

void sampler_lane::close() {
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
        for (const auto& one : working_) {
            one->is_abandoned_ = true;
            one->picker_->stop();
        }
    }
    has_work_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
}

}  // namespace kqview
