// scheduler: parking. A request whose consumer is behind leaves its slot to one whose consumer
// waits, and goes on later: with the same tokens and rows, in turn with others, and with one end.
// Consumers on many threads: test_scheduler_threads.cpp.
#include <doctest/doctest.h>

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

std::function<void(request&)> ahead(int n) {
    return [n](request& r) { r.run_ahead = n; };
}

// A request that gave its slot to another one after its first token.
std::shared_ptr<request> park(test_engine& engine, const ids& prompt, int max_tokens,
                              const std::function<void(request&)>& adjust = ahead(1)) {
    const auto wanted = engine.submit(prompt, max_tokens, adjust);
    consumer(wanted).take(1);
    const auto n_before = engine.sched->n_parked();
    consumer(engine.submit(make_prompt(90, 4), 2)).rest();
    REQUIRE(engine.sched->n_parked() == n_before + 1);
    REQUIRE(wanted->slot == -1);
    return wanted;
}

// What the fake model generates as tokens i, i + 1, ... i + n - 1.
ids generated(const ids& prompt, int i, int n) {
    const auto all = continuation(prompt, i + n);
    return {all.begin() + i, all.end()};
}

errc refusal_of(const std::shared_ptr<request>& wanted) {
    consumer taker(wanted);
    taker.rest();
    return taker.code();
}

}  // namespace

TEST_CASE("parking: requests taken in turn in one slot have the tokens and rows of each alone") {
    for (const bool can_truncate : {true, false}) {
        for (const int run_ahead : {0, 1, 2, 8}) {
            CAPTURE(can_truncate);
            CAPTURE(run_ahead);
            test_engine engine({.can_truncate = can_truncate});
            std::vector<ids> prompts;
            std::vector<consumer> takers;
            std::vector<ids> taken(3);
            for (token_id i = 0; i < 3; ++i) {
                prompts.push_back(make_prompt(i + 1, 1 + 9 * i));
                takers.emplace_back(engine.submit(prompts.back(), 12, [&](request& r) {
                    r.run_ahead = run_ahead;
                    r.capture = make_plan();
                }));
            }
            for (int round = 0; round < 12; ++round) {
                for (std::size_t i = 0; i < 3; ++i) {
                    const auto token = takers[i].next();
                    REQUIRE(token);
                    CHECK(is_row_of(*token));
                    const auto n_columns = prompts[i].size() + taken[i].size();
                    CHECK(token->rows.layout.n_columns == static_cast<int>(n_columns));
                    taken[i].push_back(token->id);
                }
            }
            for (std::size_t i = 0; i < 3; ++i) {
                CHECK(taken[i] == continuation(prompts[i], 12));
                CHECK_FALSE(takers[i].next());
                CHECK(takers[i].reason() == finish_reason::length);
                CHECK(takers[i].usage().prompt_tokens == static_cast<int>(prompts[i].size()));
                CHECK(takers[i].usage().completion_tokens == 12);
                CHECK(takers[i].stalls().empty());
            }
            CHECK(engine.sched->counters().n_requests == 3);
            CHECK(engine.sched->counters().n_parkings >= 2);
            CHECK(engine.sched->n_parked() == 0);
        }
    }
}

TEST_CASE("parking: consumers that take at random get exactly their own tokens") {
    for (const unsigned seed : {1u, 2u, 3u, 4u, 5u, 6u}) {
        CAPTURE(seed);
        std::mt19937 rng(seed);
        const auto below = [&](int n) {
            return static_cast<int>(rng() % static_cast<unsigned>(n));
        };
        const int n_slots = 1 + below(3);
        test_engine engine(
            {.n_slots = n_slots, .n_chunk = 1 + below(16), .can_truncate = below(4) > 0});
        struct reader {
            ids prompt;
            lora_scales lora;
            std::shared_ptr<request> wanted;
            consumer taker{wanted};
            ids taken{};
        };
        std::vector<std::unique_ptr<reader>> readers;
        for (token_id i = 0; i < 7; ++i) {
            // Few first ids: what one left in a slot may be the beginning of another one's text.
            const auto prompt = make_prompt(1 + below(3), 1 + below(40));
            const lora_scales lora{below(3) == 0 ? 0.5f : 1.0f};
            const auto wanted = engine.submit(prompt, 30, [&](request& r) {
                r.run_ahead = below(5);
                r.priority = below(2);
                r.owner = std::string(1, static_cast<char>('a' + below(3)));
                r.is_alone = below(4) == 0;
                r.cache_prompt = below(3) > 0;
                r.lora = lora;
                if (below(2) == 0) r.capture = make_plan();
                if (below(4) == 0) r.wanted_slot = below(n_slots);
            });
            readers.push_back(std::make_unique<reader>(reader{prompt, lora, wanted}));
        }
        while (!readers.empty()) {
            const auto i = static_cast<std::size_t>(below(static_cast<int>(readers.size())));
            auto& one = *readers[i];
            const auto token = below(40) > 0 ? one.taker.next() : std::nullopt;
            if (token) {
                one.taken.push_back(token->id);
                if (token->rows.block) CHECK(is_row_of(*token));
                continue;
            }
            const auto whole = continuation(one.prompt, 30, one.lora);
            CHECK(one.taken == first_of(whole, one.taken.size()));
            engine.cancel(one.wanted);  // wherever it is
            CHECK(one.wanted->box->end());
            readers.erase(readers.begin() + static_cast<std::ptrdiff_t>(i));
        }
        CHECK(engine.sched->counters().n_parkings > 0);
        CHECK(engine.sched->n_parked() == 0);
        for (slot_id slot = 0; slot < n_slots; ++slot) CHECK_FALSE(is_busy(*engine.sched, slot));
    }
}

TEST_CASE("parking: what a slot still holds of the text is not evaluated again") {
    test_engine engine({.n_slots = 2});
    const auto prompt = make_prompt(1, 20);
    const auto wanted = engine.submit(prompt, 30, [](request& r) { r.wanted_slot = 0; });
    consumer taker(wanted);
    auto taken = taker.take(1);
    // It has the slot's first 20 tokens in common.
    const auto other = prompt + make_prompt(2, 3);
    consumer(engine.submit(other, 2, [](request& r) { r.wanted_slot = 0; })).rest();
    CHECK(engine.sched->n_parked() == 1);
    const auto n_before = engine.sched->counters().n_prompt_tokens.load();
    taken = taken + taker.rest();
    CHECK(taken == continuation(prompt, 30));
    // 9 tokens were computed; all but the last are evaluated again, and that with the next ones.
    CHECK(engine.sched->counters().n_prompt_tokens - n_before == 8);
}

TEST_CASE("parking: rows of a prompt go on where they were") {
    test_engine engine;
    const auto prompt = make_prompt(1, 40);
    for (const bool only_attends : {true, false}) {
        CAPTURE(only_attends);
        const auto wanted = engine.submit(prompt, 3, [=](request& r) {
            r.capture = make_plan();
            r.n_prompt_rows = 33;
            r.only_attends = only_attends;
        });
        consumer taker(wanted);
        int next = 7;
        ids taken;
        for (int i = 0;; ++i) {
            auto item = taker.take_item();
            if (item.prompt) {
                CHECK(item.prompt->start == next);
                next += item.prompt->n_rows;
            } else if (item.token) {
                taken.push_back(item.token->id);
            } else {
                break;
            }
            if (item.end) break;
            item = {};
            consumer(engine.submit(make_prompt(5 + i, 3), 1)).rest();
        }
        CHECK(next == 40);
        CHECK(taken == continuation(prompt, only_attends ? 0 : 3));
    }
    CHECK(engine.sched->counters().n_parkings >= 4);
}

TEST_CASE("parking: deterministic text is evaluated again in the steps that it had") {
    test_engine engine({.n_slots = 1, .n_chunk = 8});
    const auto alone = [](request& r) {
        r.is_alone = true;
        r.cache_prompt = false;
        r.run_ahead = 2;
    };
    const auto prompt = make_prompt(1, 20);
    const auto wanted = park(engine, prompt, 10, alone);
    const auto n_before = engine.model->decodes().size();
    consumer taker(wanted);
    CHECK(taker.take(3) == generated(prompt, 1, 3));
    std::vector<std::size_t> sizes;
    const auto decodes = engine.model->decodes();
    for (auto i = n_before; i < n_before + 7; ++i) sizes.push_back(decodes[i].size());
    CHECK(sizes == std::vector<std::size_t>{8, 8, 3, 1, 1, 1, 1});
    engine.cancel(wanted);
}

TEST_CASE("parking: deterministic text behind rows of its prompt goes on from its own cells") {
    test_engine engine({.n_slots = 1, .n_chunk = 8});
    const auto prompt = make_prompt(1, 20);
    const auto wanted = engine.submit(prompt, 10, [](request& r) {
        r.is_alone = true;
        r.cache_prompt = false;
        r.run_ahead = 2;
        r.capture = make_plan();
        r.n_prompt_rows = 20;
    });
    consumer taker(wanted);
    while (!taker.take_item().token) {
    }
    consumer(engine.submit(make_prompt(90, 4), 2)).rest();
    REQUIRE(engine.sched->n_parked() == 1);
    const auto n_before = engine.model->decodes().size();
    CHECK(taker.take(4) == generated(prompt, 1, 4));
    const auto decodes = engine.model->decodes();
    REQUIRE(decodes.size() > n_before);
    for (auto i = n_before; i < decodes.size(); ++i) CHECK(decodes[i].size() == 1);
    engine.cancel(wanted);
}

// ---- who is parked, and for whom

TEST_CASE("parking: nobody leaves its slot to a request whose consumer does not wait") {
    test_engine engine;
    const auto holder = engine.submit(make_prompt(1, 5), 20, ahead(1));
    consumer taker(holder);
    taker.take(2);
    const auto queued = engine.submit(make_prompt(2, 5), 3);
    taker.take(10);
    engine.pass_round();
    CHECK(engine.sched->n_parked() == 0);
    CHECK(queued->slot == -1);
    CHECK(engine.sched->n_queued() == 1);
    CHECK(consumer(queued).rest().size() == 3);
}

TEST_CASE("parking: a request whose consumer keeps up keeps its slot") {
    test_engine engine;
    const auto prompt = make_prompt(1, 5);
    consumer taker(engine.submit(prompt, 30, ahead(40)));
    taker.take(1);
    const auto late = engine.submit(make_prompt(2, 5), 2);
    CHECK(consumer(late).rest().size() == 2);  // behind all 30
    CHECK(engine.sched->counters().n_parkings == 0);
    CHECK(taker.rest().size() == 29);
}

TEST_CASE("parking: requests that discarded tokens go on where they were") {
    const auto submit = [](test_engine& engine, token_id first) {
        return engine.submit(make_prompt(first, 20), 60, [](request& r) {
            r.n_keep = 4;
            r.n_discard = 8;
            r.run_ahead = 2;
            r.capture = make_plan();
        });
    };
    test_engine engine({.n_ctx = 24}), undisturbed({.n_ctx = 24});
    std::vector<consumer> takers, alone;
    for (token_id i = 1; i <= 3; ++i) {
        takers.emplace_back(submit(engine, i));
        alone.emplace_back(submit(undisturbed, i));
    }
    for (int round = 0; round < 60; ++round) {
        for (auto& taker : takers) {
            const auto found = taker.next();
            const auto wanted = alone[static_cast<std::size_t>(&taker - takers.data())].next();
            REQUIRE(found);
            REQUIRE(wanted);
            REQUIRE(found->id == wanted->id);
            REQUIRE(is_row_of(*found));
            REQUIRE(found->n_discarded == wanted->n_discarded);
        }
    }
    CHECK(engine.sched->counters().n_parkings > 20);
    CHECK(engine.model->n_discards() > 6);
}

TEST_CASE("parking: rows that find no room in the pool hold up nobody") {
    constexpr std::size_t block_bytes = 4096;
    test_engine engine({.n_ctx = 64}, 4 * block_bytes);
    const auto prompt = make_prompt(1, 5);
    const auto holder = engine.submit(prompt, 20, [](request& r) { r.capture = make_plan(); });
    consumer taker(holder);
    taker.take(1);
    engine.pass_round();
    REQUIRE(engine.sched->slots()[0].state == slot_state::starved);
    CHECK(consumer(engine.submit(make_prompt(2, 5), 3)).rest().size() == 3);
    CHECK(taker.rest() == generated(prompt, 1, 19));
}

TEST_CASE("parking: a request whose cells are needed and cannot be saved keeps its slot") {
    test_engine engine({.can_save = false});
    const auto holder = engine.submit(make_prompt(1, 20), 60, [](request& r) {
        r.is_steered = true;
        r.is_alone = true;
    });
    REQUIRE(consumer(holder).take_item().forward);
    const auto late = engine.submit(make_prompt(2, 5), 2);
    const auto waiter = std::make_shared<wake_handle>();
    (void)late->box->arm(waiter);
    await(*waiter);  // the holder's turn ends first
    CHECK(late->box->take_stall() == std::vector{holder->id});
    CHECK(engine.sched->counters().n_parkings == 0);
    engine.cancel(holder);
    CHECK(consumer(late).rest().size() == 2);
}

TEST_CASE("parking: of several the one with the lowest priority leaves its slot") {
    test_engine engine({.n_slots = 3});
    std::vector<std::shared_ptr<request>> holders;
    for (const int priority : {1, 0, 2}) {
        holders.push_back(engine.submit(make_prompt(priority + 1, 5), 20, [=](request& r) {
            r.run_ahead = 1;
            r.priority = priority;
        }));
        consumer(holders.back()).take(1);
    }
    engine.pass_round();
    consumer(engine.submit(make_prompt(9, 5), 2)).rest();
    CHECK(engine.sched->n_parked() == 1);
    CHECK(holders[1]->slot == -1);
}

TEST_CASE("parking: the slot goes to whoever has waited longest, parked before or not") {
    for (const bool is_queued_first : {false, true}) {
        CAPTURE(is_queued_first);
        test_engine engine;
        const auto parked = engine.submit(make_prompt(1, 5), 9, ahead(0));
        consumer(parked).take(1);
        std::shared_ptr<request> queued;
        const auto submit_third = [&] { queued = engine.submit(make_prompt(3, 5), 9, ahead(0)); };
        if (is_queued_first) submit_third();
        engine.model->allow(0);
        const auto taker = engine.submit(make_prompt(2, 5), 9, ahead(0));
        consumer second(taker);
        (void)taker->box->arm(second.waiter());
        REQUIRE(engine.model->wait_held());  // the first one is parked
        if (!is_queued_first) submit_third();
        consumer first(parked), third(queued);
        (void)parked->box->arm(first.waiter());
        (void)queued->box->arm(third.waiter());
        engine.model->allow_all();
        third.take(1);
        first.take(1);
        ids order;
        for (const auto& batch : engine.model->decodes()) {
            if (batch.size() > 1) order.push_back(batch[0].id / 1000);
        }
        CHECK(order == (is_queued_first ? ids{1, 2, 3, 1} : ids{1, 2, 1, 3}));
    }
}

TEST_CASE("parking: a parked request goes on before those that came after it") {
    test_engine engine;
    const auto prompt = make_prompt(1, 5);
    const auto first = engine.submit(prompt, 20, ahead(4));
    consumer taker(first);
    taker.take(1);
    consumer other(engine.submit(make_prompt(2, 5), 3));
    const auto last = engine.submit(make_prompt(3, 5), 3);
    CHECK(other.rest().size() == 3);  // the first one is parked for it
    engine.pass_round();
    CHECK(taker.take(4) == generated(prompt, 1, 4));
    CHECK(consumer(last).rest().size() == 3);
    CHECK(taker.rest().size() == 15);
}

TEST_CASE("parking: rows ahead of parked consumers leave half of the pool to others") {
    constexpr std::size_t block_bytes = 4096;
    test_engine engine({.n_ctx = 64}, 8 * block_bytes);
    const auto captures = [](request& r) {
        r.run_ahead = 2;
        r.capture = make_plan();
    };
    std::vector<consumer> holders;
    std::vector<std::shared_ptr<request>> all;
    const auto add = [&] {
        all.push_back(
            engine.submit(make_prompt(static_cast<token_id>(all.size()) + 1, 5), 20, captures));
        holders.emplace_back(all.back());
    };
    for (int i = 0; i < 4; ++i) {  // the rows of three are ahead then, two each
        add();
        holders.back().take(1);
    }
    CHECK(engine.sched->n_parked() == 3);
    add();
    const auto waiter = std::make_shared<wake_handle>();
    (void)all.back()->box->arm(waiter);
    engine.pass_round();
    CHECK(engine.sched->n_parked() == 3);
    CHECK(all.back()->box->take_stall() == std::vector{all[3]->id});
    // One that needs no rows is let in all the same.
    CHECK(consumer(engine.submit(make_prompt(50, 5), 3)).rest().size() == 3);
    for (const auto& one : all) engine.cancel(one);
}

// ---- ends

TEST_CASE("parking: a parked request is cancelled at once, with what it cost") {
    test_engine engine;
    const auto wanted = park(engine, make_prompt(1, 5), 20);
    engine.cancel(wanted);
    CHECK(engine.sched->n_parked() == 0);
    const auto end = wanted->box->end();
    REQUIRE(end);
    CHECK(end->reason == finish_reason::cancelled);
    CHECK(end->usage.prompt_tokens == 5);
    CHECK(end->usage.completion_tokens == 2);
    CHECK(engine.sched->counters().n_cancelled == 1);
    consumer taker(wanted);
    CHECK(taker.rest().empty());
    const auto prompt = make_prompt(3, 5);
    CHECK(consumer(engine.submit(prompt, 4)).rest() == continuation(prompt, 4));
}

TEST_CASE("parking: closing ends parked requests") {
    test_engine engine;
    const auto wanted = park(engine, make_prompt(1, 5), 20);
    engine.sched->close();
    CHECK(engine.sched->n_parked() == 0);
    CHECK(refusal_of(wanted) == errc::closed);
    wait_settled(*wanted->box);
}

TEST_CASE("parking: an engine thread that is lost leaves no parked request waiting") {
    test_engine engine;
    const auto wanted = park(engine, make_prompt(1, 5), 20);
    engine.model->allow(0);
    const auto running = engine.submit(make_prompt(2, 5), 20);
    REQUIRE(engine.model->wait_held());
    engine.sched->close(std::chrono::milliseconds(20));
    REQUIRE(engine.sched->is_lost());
    CHECK(refusal_of(wanted) == errc::closed);
    CHECK(refusal_of(running) == errc::closed);
}

TEST_CASE("parking: memory that runs out ends requests with their right tokens, and none waits") {
    long i_failed = 0;
    for (bool has_failed = true; has_failed; ++i_failed) {
        CAPTURE(i_failed);
        const int n_before = n_allocations_failed;
        fake_options options;
        options.on_decode = allocation_failure(i_failed);
        test_engine engine(options);
        std::vector<ids> prompts;
        std::vector<consumer> takers;
        std::vector<ids> taken(2);
        for (token_id i = 0; i < 2; ++i) {
            prompts.push_back(make_prompt(i + 1, 9));
            takers.emplace_back(engine.submit(prompts.back(), 4, ahead(1)));
        }
        for (int round = 0; round < 5; ++round) {
            for (std::size_t i = 0; i < 2; ++i) {
                if (const auto token = takers[i].next()) taken[i].push_back(token->id);
            }
        }
        has_failed = n_allocations_failed > n_before;
        for (std::size_t i = 0; i < 2; ++i) {
            CHECK(taken[i] == first_of(continuation(prompts[i], 4), taken[i].size()));
            const bool is_whole = takers[i].reason() == finish_reason::length;
            CHECK(is_whole == (taken[i].size() == 4));
            if (!is_whole) CHECK(takers[i].code() == errc::out_of_memory);
        }
        if (has_failed) {
            const auto prompt = make_prompt(7, 5);
            CHECK(consumer(engine.submit(prompt, 3)).rest() == continuation(prompt, 3));
        }
    }
    CHECK(i_failed > 20);
}
