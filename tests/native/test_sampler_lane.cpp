// scheduler: pickers that take long work in the sampler lane. What one of them does holds up no
// other request.
#include <doctest/doctest.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

// Holds the pickers that have it until it is opened; counts what they do.
class gate {
public:
    // False: stopped.
    bool pass(const std::atomic<bool>& is_stopped) {
        std::unique_lock lock(mutex_);
        ++n_held_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return is_open_ || is_stopped; });
        return is_open_;
    }
    void wake() {
        const std::lock_guard lock(mutex_);
        changed_.notify_all();
    }
    void open() {
        const std::lock_guard lock(mutex_);
        is_open_ = true;
        changed_.notify_all();
    }
    // Blocks until `n` picks have come to the gate.
    bool wait_held(int n) {
        return wait([&] { return n_held_ >= n; });
    }
    bool wait_dead(int n) {
        return wait([&] { return n_dead >= n; });
    }

    std::atomic<int> n_dead{0};  // pickers

private:
    template <class predicate>
    bool wait(predicate is_true) {
        std::unique_lock lock(mutex_);
        const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(20);
        return changed_.wait_until(lock, deadline, is_true);
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_open_ = false;
    int n_held_ = 0;
};

// What only the consumers of steered requests call.
class lane_picker : public token_picker {
    picked_token propose(std::span<const float>, std::optional<float>) override { return {}; }
    void revise(std::size_t, std::span<const token_id>) override {}
};

class gated_picker final : public lane_picker {
public:
    explicit gated_picker(std::shared_ptr<gate> held_by) : gate_(std::move(held_by)) {}
    ~gated_picker() override {
        ++gate_->n_dead;
        gate_->wake();
    }
    picked_token pick(float* logits) override {
        const auto id = static_cast<token_id>(*logits);
        *logits = 0;  // it is the picker's own row
        if (!gate_->pass(is_stopped_)) throw error(errc::invalid_sampling, "stopped");
        return {id, -0.5f, {}};
    }
    bool is_slow() const override { return true; }
    void stop() noexcept override {
        is_stopped_ = true;
        gate_->wake();
    }

private:
    const std::shared_ptr<gate> gate_;
    std::atomic<bool> is_stopped_{false};
};

class refusing_picker final : public lane_picker {
public:
    picked_token pick(float* /*logits*/) override {
        if (++n_picks_ == 3) throw error(errc::invalid_sampling, "too ambiguous");
        return {7, -0.5f, {}};
    }
    bool is_slow() const override { return true; }

private:
    int n_picks_ = 0;
};

auto gated(const std::shared_ptr<gate>& held_by) {
    return [held_by](request& r) { r.picker = std::make_unique<gated_picker>(held_by); };
}

}  // namespace

TEST_CASE("sampler_lane: the other slot generates all its tokens while one picker is stuck") {
    test_engine engine({.n_slots = 2});
    const auto held = std::make_shared<gate>();
    const auto slow_prompt = make_prompt(1, 5);
    const auto slow = engine.submit(slow_prompt, 4, gated(held));
    REQUIRE(held->wait_held(1));
    const auto prompt = make_prompt(2, 5);
    CHECK(consumer(engine.submit(prompt, 100)).rest() == continuation(prompt, 100));
    CHECK(consumer(engine.submit(make_prompt(3, 5), 50)).rest().size() == 50);
    CHECK(engine.sched->slots()[0].state == slot_state::sampling);
    held->open();
    consumer taker(slow);
    CHECK(taker.rest() == continuation(slow_prompt, 4));
    CHECK(taker.reason() == finish_reason::length);
}

TEST_CASE("sampler_lane: only slow pickers have logits copied and threads woken") {
    test_engine engine({.n_slots = 2});
    CHECK(consumer(engine.submit(make_prompt(1, 5), 30)).rest().size() == 30);
    CHECK(engine.sched->counters().n_handed_over == 0);
    const auto open = std::make_shared<gate>();
    open->open();
    const auto slow = engine.submit(make_prompt(2, 5), 20, gated(open));
    const auto plain = engine.submit(make_prompt(3, 5), 20);
    CHECK(consumer(slow).rest() == continuation(make_prompt(2, 5), 20));
    CHECK(consumer(plain).rest() == continuation(make_prompt(3, 5), 20));
    CHECK(engine.sched->counters().n_handed_over == 20);
}

TEST_CASE("sampler_lane: rows travel with the token that the lane picks") {
    test_engine engine({.n_slots = 3});
    const auto open = std::make_shared<gate>();
    open->open();
    std::vector<std::shared_ptr<request>> all;
    for (token_id i = 0; i < 3; ++i) {
        all.push_back(engine.submit(make_prompt(i, 4), 12, [&](request& r) {
            gated(open)(r);
            r.capture = make_plan();
        }));
    }
    for (token_id i = 0; i < 3; ++i) {
        consumer taker(all[static_cast<std::size_t>(i)]);
        const auto expected = continuation(make_prompt(i, 4), 12);
        for (const token_id id : expected) {
            const auto token = taker.next();
            REQUIRE(token);
            CHECK(token->id == id);
            CHECK(is_row_of(*token));
        }
        CHECK_FALSE(taker.next());
    }
}

TEST_CASE("sampler_lane: a cancellation does not wait for the picker, and the slot is free") {
    test_engine engine({.n_slots = 1});
    const auto held = std::make_shared<gate>();
    const auto prompt = make_prompt(1, 9);
    const auto slow = engine.submit(prompt, 50, gated(held));
    REQUIRE(held->wait_held(1));
    engine.cancel(slow);
    consumer taker(slow);
    CHECK(taker.rest().empty());
    CHECK(taker.reason() == finish_reason::cancelled);
    CHECK_FALSE(is_busy(*engine.sched, 0));
    CHECK(held->wait_dead(1));
    CHECK(engine.sched->tokens_of(0) == prompt);
    CHECK(consumer(engine.submit(prompt, 6)).rest() == continuation(prompt, 6));
}

TEST_CASE("sampler_lane: closing ends a request whose picker is stuck") {
    test_engine engine({.n_slots = 2});
    const auto held = std::make_shared<gate>();
    const auto first = engine.submit(make_prompt(1, 3), 5, gated(held));
    const auto second = engine.submit(make_prompt(2, 3), 5, gated(held));
    REQUIRE(held->wait_held(2));
    engine.sched->close();
    for (const auto& one : {first, second}) {
        consumer taker(one);
        CHECK(taker.rest().empty());
        CHECK(taker.code() == errc::closed);
    }
    CHECK(held->n_dead == 2);
}

TEST_CASE("sampler_lane: a picker's error ends its request alone") {
    test_engine engine({.n_slots = 2});
    const auto failing = engine.submit(
        make_prompt(1, 5), 20, [](request& r) { r.picker = std::make_unique<refusing_picker>(); });
    const auto prompt = make_prompt(2, 5);
    const auto plain = engine.submit(prompt, 40);
    consumer taker(failing);
    CHECK(taker.rest() == ids{7, 7});
    CHECK(taker.code() == errc::invalid_sampling);
    CHECK(consumer(plain).rest() == continuation(prompt, 40));
    CHECK(engine.sched->counters().n_failed == 1);
}

TEST_CASE("sampler_lane: a picker that exceeds its limit ends its request with invalid_sampling") {
    test_engine engine({.n_slots = 2});
    const auto held = std::make_shared<gate>();
    consumer taker(engine.submit(make_prompt(1, 5), 20, [&](request& r) {
        gated(held)(r);
        r.pick_limit = std::chrono::milliseconds(20);
    }));
    CHECK(taker.rest().empty());
    CHECK(taker.code() == errc::invalid_sampling);
    CHECK(held->wait_dead(1));
    const auto prompt = make_prompt(2, 5);
    CHECK(consumer(engine.submit(prompt, 10)).rest() == continuation(prompt, 10));
}

TEST_CASE("sampler_lane: a slot in the lane is forked like any other") {
    test_engine engine({.n_slots = 2});
    const auto held = std::make_shared<gate>();
    const auto prompt = make_prompt(1, 60);
    const auto slow = engine.submit(prompt, 5, gated(held));
    REQUIRE(held->wait_held(1));
    consumer twin(engine.submit(prompt, 5));
    CHECK(twin.rest() == continuation(prompt, 5));
    CHECK(twin.usage().cached_tokens == 59);
    CHECK(engine.model->copies().size() == 1);
    held->open();
    CHECK(consumer(slow).rest() == continuation(prompt, 5));
}

TEST_CASE("sampler_lane: many slow requests, cancelled at random, end and leave nothing behind") {
    test_engine engine({.n_slots = 4});
    const auto open = std::make_shared<gate>();
    open->open();
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&, caller] {
            for (int i = 0; i < 25; ++i) {
                const auto prompt = make_prompt(caller * 100 + i, 6);
                const auto wanted = engine.submit(prompt, 12, gated(open));
                consumer taker(wanted);
                if (i % 3 == 0) {
                    taker.take(i % 5);
                    engine.cancel(wanted);
                }
                const auto taken = taker.rest();
                if (i % 3 != 0 && taken != continuation(prompt, 12))
                    throw std::runtime_error("wrong tokens");
            }
        });
    }
    for (auto& caller : callers) caller.join();
    engine.sched->close();
    CHECK(open->n_dead == 100);
}
