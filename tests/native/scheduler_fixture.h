// What the scheduler's tests share: an engine over the fake model, and a consumer that takes tokens
// as the bindings do.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "fake_runner.h"
#include "memory/block_pool.h"
#include "sched/mailbox.h"
#include "sched/scheduler.h"
#include "sched/wakeup.h"

namespace kqview::test {

using ids = std::vector<token_id>;

inline constexpr std::size_t mib = std::size_t{1} << 20;

// `n` ids that no other `first` shares.
inline ids make_prompt(token_id first, int n) {
    ids prompt;
    for (int i = 0; i < n; ++i) prompt.push_back(first * 1000 + i);
    return prompt;
}

// For fake_options::on_decode: once the first step is decoded, `n` allocations of the engine thread
// succeed and the next one fails.
inline std::function<void(std::span<const step_token>)> allocation_failure(long n) {
    return [=, is_first = true](std::span<const step_token>) mutable {
        if (std::exchange(is_first, false)) n_allocations_left = n;
    };
}

// What the fake model generates after `prompt` with these scales of its adapters.
inline ids continuation(ids prompt, int n, const lora_scales& lora = {}) {
    for (auto& id : prompt) id = cached(id, lora);
    ids generated;
    for (int i = 0; i < n; ++i) {
        generated.push_back(hash_of(prompt));
        prompt.push_back(cached(generated.back(), lora));
    }
    return generated;
}

inline ids first_of(const ids& all, std::size_t n) {
    return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(n)};
}

inline ids operator+(ids left, const ids& right) {
    left.insert(left.end(), right.begin(), right.end());
    return left;
}

inline std::shared_ptr<const capture_plan> make_plan(int n_head = 1) {
    capture_options options;
    options.kind = row_kind::probs;
    return std::make_shared<const capture_plan>(
        options, capture_source{{{0, n_head, 1, 0.125f}}, {}, 0, {}});
}

// Does every value of the row say that it belongs to this token?
inline bool is_row_of(const token_event& token) {
    const auto n = token.rows.layout.size_bytes;
    for (std::size_t at = 0; at < n; at += sizeof(token_id)) {
        if (std::memcmp(token.rows.block->data() + at, &token.id, sizeof(token_id)) != 0)
            return false;
    }
    return n > 0 && n <= token.rows.block->size_bytes();
}

inline bool is_busy(const scheduler& engine, slot_id slot) {
    return engine.slots()[static_cast<std::size_t>(slot)].active != 0;
}

// Blocks until a signal; throws when none comes for 20 s.
inline void await(const wake_handle& waiter) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (waiter.wait(20'000) != wait_end::is_set) {
        if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("nothing came");
    }
}

// Blocks until a cancellation was carried out; throws when that takes 20 s.
inline void wait_settled(mailbox& box) {
    const auto waiter = std::make_shared<wake_handle>();
    for (;;) {
        waiter->drain();
        if (box.arm_settled(waiter)) return;
        await(*waiter);
    }
}

// Takes one request's tokens. One thread; throws when nothing comes for 20 s.
class consumer {
public:
    explicit consumer(std::shared_ptr<request> wanted) : wanted_(std::move(wanted)) {}

    // The next token, none at the end. Waits on when it is told of a stall.
    std::optional<token_event> next() { return take_item().token; }

    // The next run of prompt rows, none at the end.
    std::optional<prompt_event> next_prompt() { return take_item().prompt; }

    mailbox::item take_item() {
        for (;;) {
            if (auto item = wanted_->box->try_take()) {
                if (item->end) end_ = item->end;
                return std::move(*item);
            }
            if (auto holders = wanted_->box->take_stall(); !holders.empty())
                stalls_.push_back(holders);
            waiter_->drain();
            if (wanted_->box->arm(waiter_)) continue;
            await(*waiter_);
        }
    }

    ids take(int n) {
        ids taken;
        for (int i = 0; i < n; ++i) {
            auto token = next();
            if (!token) throw std::runtime_error("consumer: ended early");
            taken.push_back(token->id);
        }
        return taken;
    }

    ids rest() {
        ids taken;
        while (auto token = next()) taken.push_back(token->id);
        return taken;
    }

    finish_reason reason() const { return end_.value().reason; }
    request_usage usage() const { return end_.value().usage; }
    errc code() const { return end_.value().failure.value().code(); }
    const std::shared_ptr<wake_handle>& waiter() const { return waiter_; }
    // Whom the request had to wait for, in the order it was told.
    const std::vector<std::vector<request_id>>& stalls() const { return stalls_; }

private:
    const std::shared_ptr<request> wanted_;
    const std::shared_ptr<wake_handle> waiter_ = std::make_shared<wake_handle>();
    std::optional<end_event> end_;
    std::vector<std::vector<request_id>> stalls_;
};

// An engine whose destructor tells what its scheduler did against the runner's contract.
class test_engine {
public:
    explicit test_engine(fake_options options = {}, std::size_t budget_bytes = mib,
                         int n_queue = 64, std::shared_ptr<host_allocator> allocator = nullptr,
                         const pace& given = {std::chrono::milliseconds(0),
                                              step_costs::seconds(-1),
                                              {.budget_bytes = mib, .n_between = 0}},
                         std::shared_ptr<fake_model> guessing = nullptr)
        : model(std::make_shared<fake_model>(std::move(options))), draft(std::move(guessing)) {
        block_pool_options pool_options;
        pool_options.budget_bytes = budget_bytes;
        pool_options.allocator = std::move(allocator);
        pool_options.poison = true;
        pool = block_pool::create(pool_options);
        sched.reset(
            new scheduler(std::make_unique<fake_runner>(model, draft), pool, n_queue, given));
    }
    ~test_engine() {
        model->allow_all();
        sched.reset();
        for (const auto& what : model->violations()) FAIL_CHECK(what);
        if (draft) {
            for (const auto& what : draft->violations()) FAIL_CHECK(what);
        }
        CHECK(pool->stats().n_leased == 0);
    }
    test_engine(const test_engine&) = delete;
    test_engine& operator=(const test_engine&) = delete;

    std::shared_ptr<request> submit(ids prompt, int max_tokens,
                                    const std::function<void(request&)>& adjust = {}) {
        auto wanted = std::make_shared<request>();
        wanted->prompt = std::move(prompt);
        wanted->max_tokens = max_tokens;
        if (adjust) adjust(*wanted);
        if (!wanted->only_attends && !wanted->picker)
            wanted->picker = std::make_unique<fake_picker>(model);
        sched->submit(wanted);
        return wanted;
    }

    // Cancels and waits until that is carried out.
    void cancel(const std::shared_ptr<request>& wanted) {
        sched->cancel(wanted);
        wait_settled(*wanted->box);
    }

    // Returns when the engine thread can do no more: it has carried out the cancellation of nothing
    // and gone to sleep after it.
    void pass_round() {
        cancel_nothing();
        const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        for (;;) {
            const auto phase = sched->health().phase;
            if (phase == engine_phase::waiting || phase == engine_phase::ended) return;
            if (std::chrono::steady_clock::now() > limit)
                throw std::runtime_error("the engine thread does not come to rest");
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }

    // Waits for `n` decodes; then how many there are when the engine can do no more.
    std::size_t settled_decodes(std::size_t n) {
        model->wait_decodes(n);
        pass_round();
        return model->decodes().size();
    }

    const std::shared_ptr<fake_model> model;
    const std::shared_ptr<fake_model> draft;  // guesses; null: none does
    std::shared_ptr<block_pool> pool;
    scheduler_handle sched;

private:
    void cancel_nothing() {
        const auto nothing = std::make_shared<request>();
        nothing->box = std::make_shared<mailbox>(std::make_shared<doorbell>());
        cancel(nothing);
    }
};

}  // namespace kqview::test
