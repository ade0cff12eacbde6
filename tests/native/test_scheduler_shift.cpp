// scheduler: prompts that take over what follows pruned tokens, and full slots that make room.
#include <doctest/doctest.h>

#include <new>
#include <vector>

#include "sched/slot_shifting.h"
#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

ids cut_out(ids tokens, std::size_t start, std::size_t n) {
    const auto from = tokens.begin() + static_cast<std::ptrdiff_t>(start);
    tokens.erase(from, from + static_cast<std::ptrdiff_t>(n));
    return tokens;
}

void shifts(request& wanted) { wanted.n_reuse_min = 4; }

fake_options small(int n_ctx, int n_slots = 1) {
    fake_options options;
    options.n_ctx = n_ctx;
    options.n_slots = n_slots;
    return options;
}

// Generates with room made behind the first n_keep tokens: what a model says that sees only what is
// left.
struct shifted {
    ids left;
    ids generated;
    std::vector<int> n_discarded;

    shifted(const ids& prompt, int n, std::size_t n_ctx, std::size_t n_keep, std::size_t n_discard)
        : left(prompt) {
        int n_gone = 0;
        for (int i = 0; i < n; ++i) {
            if (i > 0) {
                if (left.size() == n_ctx) {
                    left = cut_out(left, n_keep, n_discard);
                    n_gone += static_cast<int>(n_discard);
                }
                left.push_back(generated.back());
            }
            generated.push_back(hash_of(left));
            n_discarded.push_back(n_gone);
        }
    }
};

}  // namespace

TEST_CASE("scheduler: what follows pruned tokens is kept, the rest is evaluated") {
    test_engine engine;
    const auto prompt = make_prompt(1, 60);
    consumer(engine.submit(prompt, 1)).rest();
    const auto pruned = cut_out(cut_out(prompt, 40, 5), 10, 7) + make_prompt(2, 6);
    const auto wanted = engine.submit(pruned, 5, shifts);
    consumer taker(wanted);
    CHECK(taker.rest() == continuation(pruned, 5));
    CHECK(taker.usage().cached_tokens == 48);
    CHECK(taker.usage().prompt_tokens == 54);
    CHECK(engine.model->n_discards() == 1);  // both ranges at once
}

TEST_CASE("scheduler: without being asked to, a prompt shifts nothing") {
    test_engine engine;
    const auto prompt = make_prompt(1, 60);
    consumer(engine.submit(prompt, 1)).rest();
    const auto pruned = cut_out(prompt, 10, 7);
    consumer taker(engine.submit(pruned, 5));
    CHECK(taker.rest() == continuation(pruned, 5));
    CHECK(taker.usage().cached_tokens == 10);
    CHECK(engine.model->n_discards() == 0);
}

TEST_CASE("scheduler: an exact request evaluates again what a shift has kept") {
    test_engine engine(small(256, 2));
    const auto prompt = make_prompt(1, 100);
    consumer(engine.submit(prompt, 1)).rest();
    const auto pruned = cut_out(prompt, 40, 7);
    consumer(engine.submit(pruned, 1, shifts)).rest();
    CHECK(engine.sched->tokens_of(0) == pruned);
    {
        // Not copied into another slot either, but for its exact beginning.
        consumer taker(engine.submit(pruned, 3, [](request& r) { r.wanted_slot = 1; }));
        CHECK(taker.rest() == continuation(pruned, 3));
        CHECK(taker.usage().cached_tokens == 40);
    }
    {
        consumer taker(engine.submit(pruned, 3, [](request& r) {
            shifts(r);
            r.wanted_slot = 0;
        }));
        CHECK(taker.rest() == continuation(pruned, 3));
        CHECK(taker.usage().cached_tokens == 92);
    }
    {
        consumer taker(engine.submit(pruned, 3, [](request& r) { r.wanted_slot = 0; }));
        CHECK(taker.rest() == continuation(pruned, 3));
    }
    consumer taker(engine.submit(pruned, 3, [](request& r) { r.wanted_slot = 0; }));
    CHECK(taker.rest() == continuation(pruned, 3));
    CHECK(taker.usage().cached_tokens == 92);  // all of it is exact now
}

TEST_CASE("scheduler: a request that shifts takes the slot with most to keep") {
    test_engine engine(small(256, 3));
    const auto first = make_prompt(1, 60), second = make_prompt(2, 60);
    for (const auto& [prompt, slot] : {std::pair(first, 0), std::pair(second, 2)}) {
        consumer(engine.submit(prompt, 1, [slot = slot](request& r) {
            r.wanted_slot = slot;
        })).rest();
    }
    const auto pruned = cut_out(second, 0, 20);
    const auto wanted = engine.submit(pruned, 2, shifts);
    consumer taker(wanted);
    CHECK(taker.rest() == continuation(pruned, 2));
    CHECK(wanted->slot == 2);
    CHECK(taker.usage().cached_tokens == 39);
    CHECK(engine.sched->tokens_of(0) == first);
}

TEST_CASE("scheduler: a shift that fails leaves the request to evaluate everything") {
    for (const bool refuses : {false, true}) {
        auto options = small(256);
        options.refuses_state = refuses;
        options.can_truncate = refuses;
        test_engine engine(std::move(options));
        const auto prompt = make_prompt(1, 60);
        consumer(engine.submit(prompt, 1)).rest();
        const auto pruned = cut_out(prompt, 10, 7);
        consumer taker(engine.submit(pruned, 4, shifts));
        CHECK(taker.rest() == continuation(pruned, 4));
        CHECK(taker.usage().cached_tokens == 0);
        CHECK(engine.sched->tokens_of(0) == engine.model->cache(0));
    }
}

TEST_CASE("scheduler: rows of the prompt are computed where a shift would have kept them") {
    test_engine engine;
    const auto prompt = make_prompt(1, 60);
    consumer(engine.submit(prompt, 1)).rest();
    const auto pruned = cut_out(prompt, 10, 10);
    const auto wanted = engine.submit(pruned, 1, [](request& r) {
        shifts(r);
        r.capture = make_plan();
        r.n_prompt_rows = 20;
        r.only_attends = true;
    });
    consumer taker(wanted);
    int n_rows = 0;
    while (const auto rows = taker.next_prompt()) n_rows += rows->n_rows;
    CHECK(n_rows == 20);
    CHECK(taker.usage().cached_tokens == 30);
}

TEST_CASE("scheduler: a full slot ends a request, or makes room for it") {
    const auto prompt = make_prompt(1, 10);
    {
        test_engine engine(small(32));
        consumer taker(engine.submit(prompt, 100));
        CHECK(taker.rest() == continuation(prompt, 23));
        CHECK(taker.reason() == finish_reason::length);
    }
    for (const int n_keep : {0, 4, 10}) {
        for (const int n_discard : {1, 5, 22}) {
            test_engine engine(small(32));
            const shifted expected(prompt, 100, 32, static_cast<std::size_t>(n_keep),
                                   static_cast<std::size_t>(n_discard));
            consumer taker(engine.submit(prompt, 100, [&](request& r) {
                r.n_keep = n_keep;
                r.n_discard = n_discard;
                r.capture = make_plan();
            }));
            for (std::size_t i = 0; i < 100; ++i) {
                const auto token = taker.next();
                REQUIRE(token);
                CHECK(token->id == expected.generated[i]);
                CHECK(token->n_discarded == expected.n_discarded[i]);
                CHECK(is_row_of(*token));
            }
            CHECK(!taker.next());
            CHECK(taker.reason() == finish_reason::length);
            CHECK(taker.usage().completion_tokens == 100);
            CHECK(engine.sched->tokens_of(0) == expected.left);
            CHECK(engine.model->cache(0) == expected.left);
        }
    }
}

TEST_CASE("scheduler: a slot that made room below its prompt's length goes on decoding") {
    test_engine engine(small(32, 2));
    const auto prompt = make_prompt(1, 30);
    const shifted expected(prompt, 60, 32, 2, 20);
    const auto wanted = engine.submit(prompt, 60, [](request& r) {
        r.n_keep = 2;
        r.n_discard = 20;
    });
    // Another one of the same prompt meanwhile.
    const auto other = engine.submit(prompt, 2);
    CHECK(consumer(other).rest() == continuation(prompt, 2));
    consumer taker(wanted);
    CHECK(taker.rest() == expected.generated);
    CHECK(engine.sched->counters().n_prompt_tokens == 60);
}

TEST_CASE("scheduler: a cancellation after a shift leaves what was taken and is still there") {
    const auto prompt = make_prompt(1, 10);
    for (const int run_ahead : {0, 8, 40}) {
        for (int n_taken = 1; n_taken < 60; n_taken += 3) {
            test_engine engine(small(32));
            const auto wanted = engine.submit(prompt, 100, [&](request& r) {
                r.n_keep = 4;
                r.n_discard = 14;
                r.run_ahead = run_ahead;
            });
            const auto taken = consumer(wanted).take(n_taken);
            engine.pass_round();
            engine.cancel(wanted);
            const auto held = engine.sched->tokens_of(0);
            CHECK(held == engine.model->cache(0));
            // The prompt and what was taken, less the last one, less a range behind the first 4.
            const auto all = prompt + first_of(taken, taken.size() - 1);
            REQUIRE(held.size() >= 4);
            REQUIRE(held.size() <= all.size());
            const auto n_gone = all.size() - held.size();
            CHECK((n_gone % 14 == 0 || held.size() == 4));
            CHECK(cut_out(all, 4, n_gone) == held);
            const auto next = prompt + taken;
            if (next.size() > 30) continue;
            CHECK(consumer(engine.submit(next, 2)).rest() == continuation(next, 2));
        }
    }
}

TEST_CASE("scheduler: a request whose slot cannot make room ends with the error") {
    auto options = small(32);
    options.refuses_state = true;
    test_engine engine(std::move(options));
    const auto prompt = make_prompt(1, 10);
    consumer taker(engine.submit(prompt, 100, [](request& r) { r.n_discard = 16; }));
    CHECK(taker.rest() == continuation(prompt, 23));
    CHECK(taker.reason() == finish_reason::error);
    CHECK(taker.code() == errc::internal);
    CHECK(engine.sched->tokens_of(0).empty());
    CHECK(engine.model->cache(0).empty());
    CHECK(consumer(engine.submit(prompt, 3)).rest() == continuation(prompt, 3));
}

TEST_CASE("slot_orders: a shift closes several gaps at once") {
    test_engine engine;
    const auto prompt = make_prompt(1, 30);
    consumer(engine.submit(prompt, 1)).rest();
    const std::vector<token_range> gone{{2, 3}, {10, 1}, {20, 10}};
    engine.sched->run_on_slot(0, [&](idle_slot& idle) { discard_tokens(idle, gone); });
    const auto left = cut_out(cut_out(cut_out(prompt, 20, 10), 10, 1), 2, 3);
    CHECK(engine.sched->tokens_of(0) == left);
    CHECK(engine.model->cache(0) == left);
    CHECK(engine.sched->n_exact_of(0) == 2);
    // What a caller has shifted himself is there for who asks for that, and for nobody else.
    const auto next = left + make_prompt(2, 2);
    for (const int n_reuse_min : {1, 0}) {
        consumer taker(engine.submit(next, 3, [&](request& r) { r.n_reuse_min = n_reuse_min; }));
        CHECK(taker.rest() == continuation(next, 3));
        CHECK(taker.usage().cached_tokens == (n_reuse_min > 0 ? 16 : 2));
    }
    CHECK(engine.sched->n_exact_of(0) == engine.sched->tokens_of(0).size());
}
