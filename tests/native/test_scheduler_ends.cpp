// scheduler: requests that end early. Cancelled in every phase, failed, or the engine closed; and
// the slot after it. An engine thread that hangs, and what a watcher sees of it.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <new>
#include <span>
#include <stdexcept>
#include <thread>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

// The slot still works, and its cache is what it says.
void check_usable(test_engine& engine, const ids& prompt) {
    consumer taker(engine.submit(prompt, 3));
    CHECK(taker.rest() == continuation(prompt, 3));
    CHECK(taker.reason() == finish_reason::length);
}

void with_rows(request& r) { r.capture = make_plan(); }

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

TEST_CASE("scheduler: a queued request that is cancelled never runs") {
    test_engine engine;
    engine.model->allow(0);
    const auto running = engine.submit(make_prompt(1, 3), 2);
    REQUIRE(engine.model->wait_held());
    const auto queued = engine.submit(make_prompt(2, 3), 2);
    engine.cancel(queued);  // does not wait for the decode that runs
    consumer taker(queued);
    CHECK(taker.rest().empty());
    CHECK(taker.reason() == finish_reason::cancelled);
    CHECK(taker.usage().prompt_tokens == 3);
    CHECK(queued->slot == -1);
    engine.model->allow_all();
    CHECK(consumer(running).rest().size() == 2);
    CHECK(engine.sched->counters().n_requests == 1);
}

TEST_CASE("scheduler: a prefill that is cancelled keeps the chunks that were decoded") {
    test_engine engine;
    engine.model->allow(0);
    const auto prompt = make_prompt(1, 30);
    const auto wanted = engine.submit(prompt, 5, with_rows);
    REQUIRE(engine.model->wait_held());
    engine.sched->cancel(wanted);
    engine.model->allow_all();
    wait_settled(*wanted->box);
    CHECK(engine.sched->tokens_of(0) == first_of(prompt, 8));
    CHECK(engine.model->cache(0) == first_of(prompt, 8));
    CHECK(engine.model->decodes().size() == 1);
    consumer taker(wanted);
    CHECK(taker.rest().empty());
    CHECK(taker.reason() == finish_reason::cancelled);
    check_usable(engine, prompt);
}

TEST_CASE("scheduler: a cancelled generation rolls back to the last token taken") {
    for (const int n_taken : {0, 1, 3}) {
        CAPTURE(n_taken);
        test_engine engine;
        const auto prompt = make_prompt(1, 10);
        const auto all = continuation(prompt, 20);
        const auto wanted = engine.submit(prompt, 20, with_rows);
        consumer taker(wanted);
        CHECK(taker.take(n_taken) == first_of(all, static_cast<std::size_t>(n_taken)));
        engine.settled_decodes(2);
        engine.cancel(wanted);
        const auto n_kept = static_cast<std::size_t>(std::max(n_taken - 1, 0));
        CHECK(engine.sched->tokens_of(0) == prompt + first_of(all, n_kept));
        CHECK(engine.model->cache(0) == engine.sched->tokens_of(0));
        CHECK_FALSE(is_busy(*engine.sched, 0));
        CHECK(engine.pool->stats().n_leased == 0);  // what was not taken is dropped
        CHECK(taker.rest().empty());
        CHECK(taker.reason() == finish_reason::cancelled);
        check_usable(engine, prompt + first_of(all, 5));
    }
}

TEST_CASE("scheduler: a request that ended before it was taken rolls back when it is cancelled") {
    test_engine engine;
    const auto prompt = make_prompt(1, 10);
    const auto all = continuation(prompt, 5);
    const auto wanted = engine.submit(prompt, 5, with_rows);
    engine.settled_decodes(6);
    CHECK(engine.sched->tokens_of(0) == prompt + first_of(all, 4));
    consumer taker(wanted);
    taker.take(2);
    engine.cancel(wanted);
    CHECK(engine.sched->tokens_of(0) == prompt + first_of(all, 1));
    CHECK(engine.pool->stats().n_leased == 0);
    CHECK(taker.rest().empty());
    CHECK(taker.reason() == finish_reason::length);  // it had ended before
    check_usable(engine, prompt + all);
}

TEST_CASE("scheduler: a late cancellation leaves the slot to the request that has it now") {
    test_engine engine;
    const auto first = engine.submit(make_prompt(1, 4), 3);
    engine.settled_decodes(3);
    const auto prompt = make_prompt(2, 4);
    const auto second = engine.submit(prompt, 3);
    engine.settled_decodes(6);
    const auto tokens = engine.sched->tokens_of(0);
    engine.cancel(first);
    CHECK(engine.sched->tokens_of(0) == tokens);
    CHECK(consumer(second).rest() == continuation(prompt, 3));
}

TEST_CASE("scheduler: a second cancellation does nothing, and both are settled") {
    test_engine engine;
    const auto wanted = engine.submit(make_prompt(1, 4), 50);
    engine.cancel(wanted);
    engine.cancel(wanted);
    CHECK(consumer(wanted).rest().empty());
}

TEST_CASE(
    "scheduler: a decode that fails ends its requests with the error and the engine goes on") {
    struct failure_kind {
        std::function<void()> raise;
        errc code;
    };
    const std::vector<failure_kind> kinds{
        {[] { throw error(errc::unsupported_model, "fake"); }, errc::unsupported_model},
        {[] { throw std::runtime_error("fake"); }, errc::decode},
        {[] { throw std::bad_alloc(); }, errc::out_of_memory}};
    for (const auto& kind : kinds) {
        for (const bool leaves_tokens : {false, true}) {
            for (const bool can_truncate : {true, false}) {
                for (const std::size_t n_at : {std::size_t{0}, std::size_t{8}, std::size_t{14}}) {
                    CAPTURE(kqview::name_of(kind.code));
                    CAPTURE(leaves_tokens);
                    CAPTURE(can_truncate);
                    CAPTURE(n_at);  // cached tokens: first chunk, second chunk, third token
                    auto has_failed = std::make_shared<std::atomic<bool>>(false);
                    fake_options options;
                    options.leaves_tokens = leaves_tokens;
                    options.can_truncate = can_truncate;
                    options.on_decode = [=](std::span<const step_token> tokens) {
                        const auto position = static_cast<std::size_t>(tokens[0].position);
                        if (position == n_at && !has_failed->exchange(true)) kind.raise();
                    };
                    test_engine engine(options);
                    const auto prompt = make_prompt(1, 12);
                    consumer taker(engine.submit(prompt, 8, with_rows));
                    const auto n_good = n_at < 12 ? 0u : n_at - 12 + 1;
                    CHECK(taker.rest() == continuation(prompt, static_cast<int>(n_good)));
                    CHECK(taker.reason() == finish_reason::error);
                    CHECK(taker.code() == kind.code);
                    engine.pass_round();
                    CHECK(engine.model->cache(0) == engine.sched->tokens_of(0));
                    const bool is_lost = leaves_tokens && !can_truncate;
                    CHECK(engine.sched->tokens_of(0).size() == (is_lost ? 0 : n_at));
                    check_usable(engine, prompt);
                }
            }
        }
    }
}

TEST_CASE(
    "scheduler: an error while tokens are chosen reaches its request and the engine goes on") {
    const auto prompt = make_prompt(1, 5);
    const auto all = continuation(prompt, 8);
    fake_options options;
    options.on_pick = [bad = all[3], n = 0](token_id id) mutable {
        if (id == bad && ++n == 1) throw error(errc::invalid_sampling, "fake");
    };
    test_engine engine(options);
    consumer taker(engine.submit(prompt, 8, with_rows));
    CHECK(taker.rest() == first_of(all, 3));
    CHECK(taker.code() == errc::invalid_sampling);
    check_usable(engine, prompt + all);
}

TEST_CASE("scheduler: an error at admission reaches its request and keeps what the slot held") {
    auto fails = std::make_shared<std::atomic<bool>>(false);
    fake_options options;
    options.on_want = [=] {
        if (*fails) throw error(errc::unsupported_model, "fake");
    };
    test_engine engine(options);
    const auto prompt = make_prompt(1, 5);
    consumer(engine.submit(prompt, 3)).rest();
    const auto tokens = engine.sched->tokens_of(0);
    *fails = true;
    consumer taker(engine.submit(make_prompt(2, 5), 3));
    CHECK(taker.rest().empty());
    CHECK(taker.code() == errc::unsupported_model);
    CHECK(engine.sched->tokens_of(0) == tokens);
    *fails = false;
    check_usable(engine, prompt);
}

TEST_CASE("scheduler: close ends running, queued and cancelled requests, and waits for none") {
    test_engine engine;
    engine.model->allow(0);
    const auto running = engine.submit(make_prompt(1, 3), 50, with_rows);
    REQUIRE(engine.model->wait_held());
    const auto queued = engine.submit(make_prompt(2, 3), 2);
    const auto cancelled = engine.submit(make_prompt(3, 3), 2);
    engine.sched->cancel(cancelled);
    std::thread closing([&] { engine.sched->close(); });
    while (!engine.sched->is_closed()) std::this_thread::yield();
    engine.model->allow_all();
    closing.join();
    for (const auto& wanted : {running, queued}) {
        consumer taker(wanted);
        taker.rest();
        CHECK(taker.reason() == finish_reason::error);
        CHECK(taker.code() == errc::closed);
    }
    wait_settled(*cancelled->box);
    CHECK(consumer(cancelled).rest().empty());
    CHECK(cancelled->box->end().has_value());
    for (const auto& wanted : {running, queued, cancelled}) engine.cancel(wanted);

    const auto is_refused = [](const auto& call) {
        try {
            call();
            return false;
        } catch (const error& failure) {
            return failure.code() == errc::closed;
        }
    };
    CHECK(is_refused([&] { engine.submit(make_prompt(4, 1), 1); }));
    CHECK(is_refused([&] { engine.sched->tokens_of(0); }));
    engine.sched->close();
}

TEST_CASE("scheduler: tokens computed before close stay takeable after it") {
    test_engine engine;
    const auto prompt = make_prompt(1, 3);
    const auto wanted = engine.submit(prompt, 50, [](request& r) { r.run_ahead = 4; });
    engine.settled_decodes(4);
    engine.sched->close();
    consumer taker(wanted);
    CHECK(taker.rest() == continuation(prompt, 4));
    CHECK(taker.code() == errc::closed);
}

TEST_CASE("scheduler: a view outlives the engine that made it") {
    std::optional<token_event> token;
    {
        block_pool_options pool_options;
        pool_options.budget_bytes = mib;
        const auto pool = block_pool::create(pool_options);
        const auto model = std::make_shared<fake_model>(fake_options{});
        scheduler sched(std::make_unique<fake_runner>(model), pool);
        const auto wanted = std::make_shared<request>();
        wanted->picker = std::make_unique<fake_picker>(model);
        wanted->prompt = make_prompt(1, 3);
        wanted->capture = make_plan();
        sched.submit(wanted);
        token = consumer(wanted).next();
    }
    REQUIRE(token);
    CHECK(is_row_of(*token));
}

// ---- an engine thread that hangs

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
    CHECK(engine.sched->health().n_steps == 3);  // the prompt's last token goes on its own
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
            engine.sched->run_on_slot(1, [](slot_cache&) {});
        } catch (const error& failure) {
            is_refused = failure.code() == errc::closed;
        }
    });
    engine.sched->close(std::chrono::milliseconds(20));
    CHECK(engine.sched->is_lost());
    CHECK(engine.sched->health().phase == engine_phase::decoding);
    order.join();
    CHECK(is_refused);
    for (const auto& wanted : {running, cancelled}) wait_settled(*wanted->box);
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
    engine.model->allow(2);
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
