// scheduler under many threads: consumers, cancellations, submissions and close at once. The cases
// count outside doctest's macros; the races themselves are the sanitizer's to find.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

fake_options make_options(int n_slots) {
    fake_options options;
    options.n_slots = n_slots;
    return options;
}

}  // namespace

TEST_CASE("scheduler: consumers on many threads each get exactly their own tokens") {
    constexpr int n_threads = 8;
    constexpr int n_requests = 15;
    test_engine engine(make_options(4), 64 * 4096);
    std::atomic<int> n_wrong{0};
    std::atomic<int> n_right{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; ++t) {
        threads.emplace_back([&, t] {
            for (int i = 0; i < n_requests; ++i) {
                const auto prompt = make_prompt(t * 100 + i, 3 + (t * 7 + i) % 20);
                const int max_tokens = 5 + (t + i) % 20;
                consumer taker(engine.submit(prompt, max_tokens, [&](request& r) {
                    r.run_ahead = (t + i) % 4;
                    r.priority = t % 3;
                    r.on_full = i % 2 == 0 ? full_policy::wait : full_policy::drop;
                    if (i % 3 != 0) r.capture = make_plan();
                }));
                ids taken;
                while (const auto token = taker.next()) {
                    taken.push_back(token->id);
                    if (token->rows.block && !is_row_of(*token)) ++n_wrong;
                }
                ++(taken == continuation(prompt, max_tokens) ? n_right : n_wrong);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    CHECK(n_wrong == 0);
    CHECK(n_right == n_threads * n_requests);
    CHECK(engine.sched->counters().n_requests == n_threads * n_requests);
}

TEST_CASE("scheduler: cancellations from other threads leave every cache true to its tokens") {
    constexpr int n_threads = 6;
    constexpr int n_requests = 40;
    for (const bool can_truncate : {true, false}) {
        auto options = make_options(4);
        options.can_truncate = can_truncate;
        test_engine engine(options);
        std::atomic<int> n_wrong{0};
        std::vector<std::thread> threads;
        for (int t = 0; t < n_threads; ++t) {
            threads.emplace_back([&, t] {
                for (int i = 0; i < n_requests; ++i) {
                    // Few first ids, so that requests meet what others left.
                    const auto prompt = make_prompt(1 + (t + i) % 3, 4 + i % 11);
                    const auto wanted = engine.submit(prompt, 12, [&](request& r) {
                        r.run_ahead = i % 5;
                        r.capture = make_plan();
                    });
                    std::thread cancelling([&, t, i] {
                        std::this_thread::sleep_for(
                            std::chrono::microseconds((t * 131 + i * 37) % 500));
                        engine.cancel(wanted);
                    });
                    consumer taker(wanted);
                    const auto taken = taker.rest();
                    cancelling.join();
                    if (taken != first_of(continuation(prompt, 12), taken.size())) ++n_wrong;
                    const auto reason = taker.reason();
                    const bool is_whole = reason == finish_reason::length;
                    if (!is_whole && reason != finish_reason::cancelled) ++n_wrong;
                    if (!is_whole && taken.size() == 12) ++n_wrong;
                }
            });
        }
        for (auto& thread : threads) thread.join();
        CHECK(n_wrong == 0);
        for (slot_id slot = 0; slot < 4; ++slot) {
            CHECK_FALSE(engine.sched->is_busy(slot));
            CHECK(engine.model->cache(slot) == engine.sched->tokens_of(slot));
        }
    }
}

TEST_CASE("scheduler: every request that was let in ends when close comes between submissions") {
    constexpr int n_threads = 4;
    constexpr int n_rounds = 25;
    std::atomic<int> n_let_in{0};
    std::atomic<int> n_ended{0};
    std::atomic<int> n_refused{0};
    std::atomic<int> n_wrong{0};
    for (int round = 0; round < n_rounds; ++round) {
        test_engine engine(make_options(2));
        std::vector<std::thread> threads;
        for (int t = 0; t < n_threads; ++t) {
            threads.emplace_back([&, t] {
                for (int i = 0;; ++i) {
                    std::shared_ptr<request> wanted;
                    try {
                        wanted = engine.submit(make_prompt(t + 1, 5 + i % 4), 30,
                                               [&](request& r) { r.capture = make_plan(); });
                    } catch (const error& failure) {
                        ++(failure.code() == errc::closed ? n_refused : n_wrong);
                        return;
                    }
                    ++n_let_in;
                    if (i % 3 == 1) engine.sched->cancel(wanted);
                    if (i % 3 == 2) engine.cancel(wanted);
                    consumer taker(wanted);
                    taker.rest();
                    const auto reason = taker.reason();
                    const bool is_closed = reason == finish_reason::error;
                    if (is_closed && taker.code() != errc::closed) ++n_wrong;
                    ++n_ended;
                }
            });
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
        std::vector<std::thread> closers;
        for (int t = 0; t < 2; ++t) closers.emplace_back([&] { engine.sched->close(); });
        for (auto& closer : closers) closer.join();
        for (auto& thread : threads) thread.join();
    }
    CHECK(n_wrong == 0);
    CHECK(n_refused == n_threads * n_rounds);
    CHECK(n_ended == n_let_in);
    CHECK(n_let_in > n_rounds);
}

TEST_CASE("scheduler: close wakes consumers that wait on their threads") {
    constexpr int n_threads = 5;
    test_engine engine(make_options(2));
    engine.model->allow(0);
    std::atomic<int> n_closed{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; ++t) {
        const auto wanted = engine.submit(make_prompt(t + 1, 20), 30);
        threads.emplace_back([&, wanted] {
            consumer taker(wanted);
            taker.rest();
            if (taker.code() == errc::closed) ++n_closed;
        });
    }
    REQUIRE(engine.model->wait_held());
    std::thread closing([&] { engine.sched->close(); });
    while (!engine.sched->is_closed()) std::this_thread::yield();
    engine.model->allow_all();
    closing.join();
    for (auto& thread : threads) thread.join();
    CHECK(n_closed == n_threads);
}

TEST_CASE("scheduler: state is readable from other threads while it runs") {
    test_engine engine(make_options(4));
    std::atomic<bool> is_done{false};
    std::atomic<int> n_wrong{0};
    std::thread reading([&] {
        while (!is_done) {
            for (slot_id slot = 0; slot < 4; ++slot) {
                const auto tokens = engine.sched->tokens_of(slot);
                if (!tokens.empty() && tokens[0] % 1000 != 0) ++n_wrong;
                (void)engine.sched->is_busy(slot);
            }
            if (engine.sched->n_queued() < 0) ++n_wrong;
            (void)engine.sched->counters().n_tokens.load();
            (void)engine.pool->stats();
            std::this_thread::yield();
        }
    });
    for (int i = 0; i < 30; ++i) consumer(engine.submit(make_prompt(i, 10), 20)).rest();
    is_done = true;
    reading.join();
    CHECK(n_wrong == 0);
}
