// scheduler, one slot: how a request runs and ends, what is reused, who is next.
// Cancellation, close and errors: test_scheduler_ends.cpp. Memory: test_scheduler_memory.cpp.
// Several slots and threads: test_scheduler_slots.cpp, test_scheduler_threads.cpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <span>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

TEST_CASE("scheduler: a request runs to max_tokens, each token with the row of its own query") {
    test_engine engine;
    const auto prompt = make_prompt(1, 20);
    const auto wanted = engine.submit(prompt, 6, [](request& r) { r.capture = make_plan(); });
    consumer taker(wanted);
    ids taken;
    int n_columns = 20;
    while (const auto token = taker.next()) {
        taken.push_back(token->id);
        REQUIRE(token->rows.block);
        CHECK(token->rows.layout.n_columns == n_columns++);
        CHECK(token->rows.written_at == token->rows.block->data());
        CHECK(is_row_of(*token));
        CHECK(token->logprob == -0.5f);
        if (taken.size() == 6) break;
    }
    CHECK(taken == continuation(prompt, 6));
    CHECK(taker.reason() == finish_reason::length);
    CHECK(taker.usage().prompt_tokens == 20);
    CHECK(taker.usage().cached_tokens == 0);
    CHECK(taker.usage().completion_tokens == 6);
    CHECK(taker.usage().prefill_s >= 0);
    // The last token was sampled, not decoded.
    CHECK(engine.sched->tokens_of(0) == prompt + first_of(taken, 5));
    CHECK(engine.model->cache(0) == engine.sched->tokens_of(0));
    engine.pass_round();  // the slot is given back after its last token was handed out
    CHECK_FALSE(engine.sched->is_busy(0));

    const auto& counters = engine.sched->counters();
    CHECK(counters.n_requests == 1);
    CHECK(counters.n_prompt_tokens == 20);
    CHECK(counters.n_tokens == 6);
    CHECK(counters.n_decodes == 3 + 5);  // chunks of 8, then a token each
    CHECK(counters.n_attention_bytes == 4 * (20 + 21 + 22 + 23 + 24 + 25));
}

TEST_CASE("scheduler: without capture no block is taken") {
    test_engine engine;
    const auto prompt = make_prompt(1, 3);
    consumer taker(engine.submit(prompt, 4));
    while (const auto token = taker.next()) CHECK_FALSE(token->rows.block);
    CHECK(engine.pool->stats().n_allocations == 0);
}

TEST_CASE("scheduler: the model's end of text ends the request and is not handed out") {
    fake_options options;
    options.next = [](std::span<const token_id> cache) {
        return cache.size() == 7 ? end_token : hash_of(cache);
    };
    test_engine engine(options);
    const auto prompt = make_prompt(1, 4);
    consumer taker(engine.submit(prompt, 50, [](request& r) { r.capture = make_plan(); }));
    CHECK(taker.rest() == continuation(prompt, 3));
    CHECK(taker.reason() == finish_reason::stop);
    CHECK(taker.usage().completion_tokens == 3);
    CHECK(engine.sched->tokens_of(0).size() == 7);
}

TEST_CASE("scheduler: a stop token ends the request and is not handed out") {
    test_engine engine;
    const auto prompt = make_prompt(1, 4);
    const auto all = continuation(prompt, 5);
    consumer taker(engine.submit(prompt, 50, [&](request& r) {
        r.stop_tokens = {all[4], 5'000'000};
        std::sort(r.stop_tokens.begin(), r.stop_tokens.end());
    }));
    CHECK(taker.rest() == first_of(all, 4));
    CHECK(taker.reason() == finish_reason::stop_token);
}

TEST_CASE("scheduler: a full slot ends the request with length") {
    fake_options options;
    options.n_ctx = 12;
    test_engine engine(options);
    SUBCASE("while it generates") {
        const auto prompt = make_prompt(1, 9);
        consumer taker(engine.submit(prompt, 50));
        CHECK(taker.rest() == continuation(prompt, 4));
        CHECK(taker.reason() == finish_reason::length);
    }
    SUBCASE("with a prompt that fills it") {
        const auto prompt = make_prompt(1, 12);
        consumer taker(engine.submit(prompt, 50));
        CHECK(taker.rest() == continuation(prompt, 1));
        CHECK(taker.reason() == finish_reason::length);
    }
    CHECK(engine.sched->tokens_of(0).size() == 12);
}

TEST_CASE("scheduler: run_ahead bounds the tokens computed while nobody takes") {
    test_engine engine;
    for (const int run_ahead : {0, 1, 2, 8}) {
        CAPTURE(run_ahead);
        const auto n_before = engine.model->decodes().size();
        const auto prompt = make_prompt(run_ahead + 1, 12);
        const auto wanted = engine.submit(prompt, 20, [=](request& r) { r.run_ahead = run_ahead; });
        // The first chunk gives no token, the second one the first token.
        const auto n = static_cast<std::size_t>(1 + run_ahead);
        CHECK(engine.settled_decodes(n_before + n) == n_before + n);
        consumer taker(wanted);
        CHECK(taker.take(3) == continuation(prompt, 3));
        const auto n_after = n + 3;
        CHECK(engine.settled_decodes(n_before + n_after) == n_before + n_after);
        CHECK(taker.rest().size() == 17);
    }
}

TEST_CASE("scheduler: a model that cannot truncate never runs ahead") {
    fake_options options;
    options.can_truncate = false;
    test_engine engine(options);
    const auto prompt = make_prompt(1, 4);
    const auto wanted = engine.submit(prompt, 10);
    engine.pass_round();
    CHECK(engine.model->decodes().empty());
    consumer taker(wanted);
    CHECK(taker.take(3) == continuation(prompt, 3));
    CHECK(engine.settled_decodes(3) == 3);
    engine.cancel(wanted);
    // Nothing beyond what was taken is in the cache, so nothing had to be dropped.
    CHECK(engine.sched->tokens_of(0) == prompt + continuation(prompt, 2));
    CHECK(engine.model->cache(0) == engine.sched->tokens_of(0));
}

TEST_CASE("scheduler: a prompt keeps the common prefix of its slot") {
    test_engine engine;
    const auto first = make_prompt(1, 20);
    consumer(engine.submit(first, 5)).rest();
    const auto second = first_of(first, 13) + make_prompt(2, 4);
    consumer taker(engine.submit(second, 3));
    CHECK(taker.rest() == continuation(second, 3));
    CHECK(taker.usage().cached_tokens == 13);
    CHECK(taker.usage().prompt_tokens == 17);
    CHECK(engine.model->truncations() == std::vector<std::pair<slot_id, int>>{{0, 13}});
    CHECK(engine.sched->counters().n_prompt_tokens == 20 + 4);
}

TEST_CASE("scheduler: the last prompt token is decoded even when all of the prompt is cached") {
    test_engine engine;
    const auto prompt = make_prompt(1, 10);
    const auto all = continuation(prompt, 4);
    consumer(engine.submit(prompt, 4)).rest();
    SUBCASE("the same prompt") {
        const auto n_before = engine.model->decodes().size();
        consumer taker(engine.submit(prompt, 1));
        CHECK(taker.rest() == first_of(all, 1));
        CHECK(taker.usage().cached_tokens == 9);
        REQUIRE(engine.model->decodes().size() == n_before + 1);
        CHECK(engine.model->decodes().back().size() == 1);
        CHECK(engine.model->decodes().back()[0].position == 9);
    }
    SUBCASE("the prompt with all that was generated goes on where it ended") {
        consumer taker(engine.submit(prompt + all, 2));
        CHECK(taker.rest() == continuation(prompt + all, 2));
        CHECK(taker.usage().cached_tokens == 13);
        CHECK(engine.model->truncations().empty());
    }
}

TEST_CASE("scheduler: a model that cannot truncate prefills again after other tokens") {
    fake_options options;
    options.can_truncate = false;
    test_engine engine(options);
    const auto first = make_prompt(1, 10);
    const auto all = continuation(first, 3);
    consumer(engine.submit(first, 3)).rest();
    SUBCASE("a prompt that goes on keeps all") {
        consumer taker(engine.submit(first + all, 2));
        CHECK(taker.rest() == continuation(first + all, 2));
        CHECK(taker.usage().cached_tokens == 12);
    }
    SUBCASE("a prompt that differs keeps nothing") {
        const auto second = first_of(first, 6) + make_prompt(2, 3);
        consumer taker(engine.submit(second, 2));
        CHECK(taker.rest() == continuation(second, 2));
        CHECK(taker.usage().cached_tokens == 0);
    }
}

TEST_CASE("scheduler: the queue goes by priority, then by arrival") {
    test_engine engine;
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> all{engine.submit(make_prompt(100, 1), 1)};
    REQUIRE(engine.model->wait_held());
    const std::vector<int> priorities{0, 5, 0, 5, -1, 9};
    for (std::size_t i = 0; i < priorities.size(); ++i) {
        all.push_back(engine.submit(make_prompt(static_cast<token_id>(i), 1), 1,
                                    [&](request& r) { r.priority = priorities[i]; }));
    }
    CHECK(engine.sched->n_queued() == 6);
    engine.model->allow_all();
    for (const auto& wanted : all) consumer(wanted).rest();
    ids order;
    for (const auto& batch : engine.model->decodes()) order.push_back(batch[0].id / 1000);
    CHECK(order == ids{100, 5, 1, 3, 0, 2, 4});
    CHECK(engine.sched->n_queued() == 0);
}

TEST_CASE("scheduler: a full queue refuses until one leaves it") {
    test_engine engine({}, mib, 2);
    engine.model->allow(0);
    const auto running = engine.submit(make_prompt(1, 1), 1);
    REQUIRE(engine.model->wait_held());
    const auto queued = engine.submit(make_prompt(2, 1), 1);
    const auto last = engine.submit(make_prompt(3, 1), 1);
    const auto refused = [&] {
        try {
            engine.submit(make_prompt(4, 1), 1);
            return false;
        } catch (const error& failure) {
            CHECK(failure.code() == errc::queue_full);
            return true;
        }
    };
    CHECK(refused());
    CHECK(engine.sched->n_queued() == 2);
    engine.cancel(queued);  // although the engine thread is in a decode
    CHECK_FALSE(refused());
    CHECK(refused());
    engine.model->allow_all();
    CHECK(consumer(last).rest().size() == 1);
}

TEST_CASE("scheduler: request ids count up from 1 in the order of submission") {
    test_engine engine;
    for (int i = 1; i <= 3; ++i) CHECK(engine.submit(make_prompt(i, 1), 1)->id == i);
}
