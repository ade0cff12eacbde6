// Orders on idle slots: save, restore, truncate and clear between the steps of a running engine.
#include <doctest/doctest.h>
#ifndef _WIN32  // where every wait is interrupted now and then
#include <pthread.h>
#include <signal.h>
#endif

#include <atomic>
#include <chrono>
#include <thread>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

std::vector<std::byte> save(test_engine& engine, slot_id slot) {
    std::vector<std::byte> blob;
    for (;;) {
        std::size_t n = 0;
        engine.sched->run_on_slot(slot, [&](slot_cache& idle) { n = idle.save(blob); });
        const bool is_done = n <= blob.size();
        blob.resize(n);
        if (is_done) return blob;
    }
}

void restore(test_engine& engine, slot_id slot, std::span<const std::byte> blob) {
    engine.sched->run_on_slot(slot, [&](slot_cache& idle) { idle.restore(blob, all_exact); });
}

void truncate(test_engine& engine, slot_id slot, std::size_t n) {
    engine.sched->run_on_slot(slot, [&](slot_cache& idle) { idle.truncate(n); });
}

ids run(test_engine& engine, const ids& prompt, int n) {
    const auto wanted = engine.submit(prompt, n);
    return consumer(wanted).rest();
}

errc code_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const error& failure) {
        return failure.code();
    }
    return errc::internal;
}

// Work on a slot that another thread waits for, which gets signals until its wait is over.
class interrupted_wait {
public:
    interrupted_wait(test_engine& engine, slot_id slot, slot_work work, bool goes_on) {
#ifndef _WIN32
        struct sigaction action {};
        action.sa_handler = [](int) {};  // without SA_RESTART, as Python sets its own
        sigaction(SIGUSR1, &action, nullptr);
#endif
        waiting_ = std::thread([this, &engine, slot, work = std::move(work), goes_on] {
            was_done_ = engine.sched->run_on_slot(slot, work, [this, goes_on] {
                ++n_asked;
                return goes_on;
            });
            is_over_ = true;
        });
    }
    ~interrupted_wait() {
        if (waiting_.joinable()) waiting_.join();
    }

    void signal() {
#ifndef _WIN32
        pthread_kill(waiting_.native_handle(), SIGUSR1);
#endif
    }
    // A signal may come before the thread waits: it gets more of them.
    void signal_until_asked() {
        while (n_asked == 0 && !is_over_) {
            signal();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    bool was_done() {
        waiting_.join();
        return was_done_;
    }

    std::atomic<int> n_asked{0};

private:
    std::atomic<bool> is_over_{false};
    bool was_done_ = false;
    std::thread waiting_;
};

fake_options two_slots() {
    fake_options options;
    options.n_slots = 2;
    return options;
}

}  // namespace

TEST_CASE("slot_cache: a saved slot goes on in another one as if nothing had happened") {
    test_engine engine(two_slots());
    const auto prompt = make_prompt(1, 5);
    const auto generated = run(engine, prompt, 6);
    CHECK(generated == continuation(prompt, 6));
    const auto held = engine.sched->tokens_of(0);
    const auto blob = save(engine, 0);
    CHECK(save(engine, 0) == blob);
    engine.sched->run_on_slot(0, &slot_cache::clear);
    CHECK(engine.sched->tokens_of(0).empty());
    CHECK(engine.model->cache(0).empty());
    restore(engine, 1, blob);
    CHECK(engine.sched->tokens_of(1) == held);
    CHECK(engine.model->cache(1) == held);
    const auto wanted = engine.submit(prompt + generated, 4);
    consumer taker(wanted);
    CHECK(taker.rest() == continuation(prompt + generated, 4));
    CHECK(wanted->slot == 1);
    CHECK(taker.usage().cached_tokens == static_cast<int>(held.size()));
}

TEST_CASE("slot_cache: a refused blob leaves the slot as it was") {
    test_engine engine;
    run(engine, make_prompt(1, 5), 4);
    const auto held = engine.sched->tokens_of(0);
    const auto n_truncations = engine.model->truncations().size();
    auto blob = save(engine, 0);
    blob.pop_back();
    CHECK(code_of([&] { restore(engine, 0, blob); }) == errc::state_format);
    CHECK(code_of([&] { restore(engine, 0, {}); }) == errc::state_format);
    CHECK(engine.sched->tokens_of(0) == held);
    CHECK(engine.model->cache(0) == held);
    CHECK(engine.model->truncations().size() == n_truncations);
}

TEST_CASE("slot_cache: a slot is empty when its cache is unknown after a failure") {
    auto options = two_slots();
    options.refuses_state = true;
    test_engine engine(options);
    run(engine, make_prompt(1, 5), 4);
    const auto blob = save(engine, 0);
    CHECK(code_of([&] { restore(engine, 0, blob); }) == errc::internal);
    CHECK(engine.sched->tokens_of(0).empty());
    CHECK(engine.model->cache(0).empty());
    const auto prompt = make_prompt(2, 5);
    CHECK(run(engine, prompt, 3) == continuation(prompt, 3));
}

TEST_CASE("slot_cache: an empty slot is saved, and restored over a full one") {
    test_engine engine;
    const auto blob = save(engine, 0);
    CHECK(blob.size() == 24);
    run(engine, make_prompt(1, 5), 4);
    restore(engine, 0, blob);
    CHECK(engine.sched->tokens_of(0).empty());
    CHECK(engine.model->cache(0).empty());
}

TEST_CASE("slot_cache: a slot in use is refused at once, the others are not") {
    test_engine engine(two_slots());
    const auto wanted = engine.submit(make_prompt(1, 3), 100);
    consumer taker(wanted);
    taker.take(2);
    CHECK(code_of([&] { save(engine, 0); }) == errc::busy);
    CHECK(code_of([&] { truncate(engine, 0, 0); }) == errc::busy);
    CHECK_NOTHROW(save(engine, 1));
    CHECK(taker.take(2).size() == 2);
    engine.cancel(wanted);
    CHECK_NOTHROW(save(engine, 0));
}

TEST_CASE("slot_cache: truncate keeps the first tokens, or none where the cache cannot") {
    for (const bool can_truncate : {true, false}) {
        fake_options options;
        options.can_truncate = can_truncate;
        test_engine engine(options);
        run(engine, make_prompt(1, 5), 4);
        const auto held = engine.sched->tokens_of(0);
        CHECK(code_of([&] { truncate(engine, 0, held.size() + 1); }) == errc::request);
        truncate(engine, 0, held.size());
        CHECK(engine.sched->tokens_of(0) == held);
        truncate(engine, 0, 3);
        CHECK(engine.sched->tokens_of(0) == (can_truncate ? first_of(held, 3) : ids{}));
        CHECK(engine.model->cache(0) == engine.sched->tokens_of(0));
    }
}

TEST_CASE("slot_cache: a late cancellation does not roll back what was restored") {
    test_engine engine;
    const auto wanted = engine.submit(make_prompt(1, 5), 6);
    consumer taker(wanted);
    taker.take(1);
    engine.settled_decodes(6);  // it ended, with tokens that nobody took
    const auto blob = save(engine, 0);
    const auto held = engine.sched->tokens_of(0);
    CHECK(held.size() == 10);
    restore(engine, 0, blob);
    engine.cancel(wanted);
    CHECK(engine.sched->tokens_of(0) == held);
}

TEST_CASE("slot_cache: a slot that is not there, and a closed engine") {
    test_engine engine;
    CHECK(code_of([&] { save(engine, 1); }) == errc::unknown_slot);
    CHECK(code_of([&] { save(engine, -1); }) == errc::unknown_slot);
    engine.sched->close();
    CHECK(code_of([&] { save(engine, 0); }) == errc::closed);
}

TEST_CASE("slot_cache: what waits when the engine closes ends with closed") {
    test_engine engine(two_slots());
    engine.model->allow(0);
    const auto wanted = engine.submit(make_prompt(1, 3), 4);
    REQUIRE(engine.model->wait_held());
    std::atomic<int> n_ended{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&] {
            try {
                save(engine, 1);
            } catch (const error& failure) {
                if (failure.code() != errc::closed) return;
            }
            ++n_ended;
        });
    }
    std::thread closer([&] { engine.sched->close(); });
    engine.model->allow_all();
    closer.join();
    for (auto& thread : threads) thread.join();
    CHECK(n_ended == 3);
}

TEST_CASE("slot_cache: who gives up after a signal is not kept waiting by a decode") {
    test_engine engine(two_slots());
    engine.model->allow(0);
    const auto wanted = engine.submit(make_prompt(1, 3), 4);
    REQUIRE(engine.model->wait_held());
    std::atomic<bool> has_run{false};
    interrupted_wait wait(engine, 1, [&](slot_cache&) { has_run = true; }, false);
    wait.signal_until_asked();
    CHECK_FALSE(wait.was_done());  // while the decode goes on
    engine.model->allow_all();
    CHECK(consumer(wanted).rest().size() == 4);
    engine.pass_round();
    CHECK_FALSE(has_run);
}

TEST_CASE("slot_cache: who waits on after a signal gets the work done") {
    test_engine engine(two_slots());
    engine.model->allow(0);
    const auto wanted = engine.submit(make_prompt(1, 3), 4);
    REQUIRE(engine.model->wait_held());
    std::atomic<bool> has_run{false};
    interrupted_wait wait(engine, 1, [&](slot_cache&) { has_run = true; }, true);
    wait.signal_until_asked();
    engine.model->allow_all();
    CHECK(wait.was_done());
    CHECK(has_run);
    CHECK(consumer(wanted).rest().size() == 4);
}

TEST_CASE("slot_cache: work that was begun when its caller gives up is done when he returns") {
    test_engine engine(two_slots());
    std::atomic<bool> has_begun{false};
    std::atomic<bool> may_end{false};
    std::atomic<bool> has_ended{false};
    interrupted_wait wait(
        engine, 1,
        [&](slot_cache&) {
            has_begun = true;
            while (!may_end) std::this_thread::yield();
            has_ended = true;
        },
        false);
    while (!has_begun) std::this_thread::yield();
    wait.signal_until_asked();
    may_end = true;
    CHECK_FALSE(wait.was_done());
    CHECK(has_ended);
}

TEST_CASE("slot_cache: many threads save and restore while others generate") {
    auto options = two_slots();
    test_engine engine(options, 4 * mib);
    const auto prompt = make_prompt(1, 5);
    run(engine, prompt, 4);
    const auto blob = save(engine, 0);
    std::atomic<int> n_wrong{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&, i] {
            for (int round = 0; round < 40; ++round) {
                try {
                    if (i == 0) restore(engine, round % 2, blob);
                    if (i == 1) truncate(engine, round % 2, 0);
                    if (i == 2) save(engine, round % 2);
                } catch (const error& failure) {
                    if (failure.code() != errc::busy) ++n_wrong;
                }
            }
        });
    }
    for (int round = 0; round < 20; ++round) {
        const auto other = make_prompt(2 + round, 4);
        if (run(engine, other, 3) != continuation(other, 3)) ++n_wrong;
        if (run(engine, prompt, 3) != continuation(prompt, 3)) ++n_wrong;
    }
    for (auto& thread : threads) thread.join();
    CHECK(n_wrong == 0);
}
