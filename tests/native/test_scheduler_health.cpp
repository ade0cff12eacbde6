// scheduler: what a watcher sees of the engine thread, and an engine thread that hangs when it is
// closed.

#include <doctest/doctest.h>

#include <chrono>
#include <thread>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

// Polls for 20 s at most.
template <class predicate>
bool comes_about(predicate is_true) {
    for (int i = 0; i < 4000; ++i) {
        if (is_true()) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
}

}  // namespace

TEST_CASE("scheduler: the heartbeat shows a decode that hangs, and for how long") {
    test_engine engine;
    CHECK(comes_about([&] { return engine.sched->health().phase == engine_phase::waiting; }));
    CHECK(engine.sched->health().n_steps == 0);
    engine.model->allow(0);
    const auto wanted = engine.submit(make_prompt(1, 3), 2);
    REQUIRE(engine.model->wait_held());
    const auto first = engine.sched->health();
    CHECK(first.phase == engine_phase::decoding);
    CHECK(first.n_steps == 1);
    CHECK(comes_about([&] { return engine.sched->health().quiet_s > first.quiet_s + 0.02; }));
    engine.model->allow_all();
    consumer taker(wanted);
    CHECK(taker.rest().size() == 2);
    CHECK(comes_about([&] { return engine.sched->health().phase == engine_phase::waiting; }));
    CHECK(engine.sched->health().n_steps == 2);
    engine.sched->close();
    CHECK(engine.sched->health().phase == engine_phase::ended);
    CHECK(!engine.sched->is_lost());
}

TEST_CASE("heartbeat: signs of life within a phase are seen without leaving it") {
    heartbeat heart;
    heart.enter(engine_phase::decoding);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    const auto quiet_s = heart.read().quiet_s;
    CHECK(quiet_s >= 0.03);
    for (int i = 0; i < 8; ++i) heart.note_progress();
    CHECK(heart.read().quiet_s < quiet_s);
    CHECK(heart.read().phase == engine_phase::decoding);
    CHECK(heart.read().n_steps == 1);
}

TEST_CASE("scheduler: close gives a thread that hangs up, and every request ends") {
    test_engine engine({.n_slots = 2});
    engine.model->allow(0);
    const auto running = engine.submit(make_prompt(1, 3), 50);
    REQUIRE(engine.model->wait_held());
    const auto waits_for_the_loop = engine.submit(make_prompt(2, 3), 2);
    const auto cancelled = engine.submit(make_prompt(3, 3), 2);
    engine.sched->cancel(running);
    engine.sched->cancel(cancelled);
    bool is_refused = false;
    std::thread order([&] {
        try {
            engine.sched->run_on_slot(1, [](idle_slot&) {});
        } catch (const error& failure) {
            is_refused = failure.code() == errc::closed;
        }
    });
    engine.sched->close(std::chrono::milliseconds(20));
    CHECK(engine.sched->is_lost());
    CHECK(engine.sched->health().phase == engine_phase::decoding);
    order.join();
    CHECK(is_refused);
    for (const auto& wanted : {running, cancelled}) engine.sched->wait_settled(wanted);
    consumer taker(waits_for_the_loop);
    CHECK(taker.rest().empty());
    CHECK(taker.code() == errc::closed);
    engine.sched->close(std::chrono::milliseconds(20));  // it still hangs
    CHECK(engine.sched->is_lost());

    engine.model->allow_all();
    engine.sched->close();
    CHECK(!engine.sched->is_lost());
    CHECK(engine.sched->health().phase == engine_phase::ended);
}

TEST_CASE("scheduler: a request that runs in a thread that hangs ends with its engine") {
    test_engine engine;
    engine.model->allow(1);
    const auto wanted =
        engine.submit(make_prompt(1, 3), 50, [](request& r) { r.capture = make_plan(); });
    consumer taker(wanted);
    REQUIRE(taker.next());
    REQUIRE(engine.model->wait_held());
    engine.sched->close(std::chrono::milliseconds(20));
    CHECK(engine.sched->is_lost());
    CHECK(taker.rest().empty());
    CHECK(taker.code() == errc::closed);
    engine.cancel(wanted);  // returns
}
