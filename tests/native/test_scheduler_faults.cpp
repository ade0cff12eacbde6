// scheduler under injected failures: a decode, an admission, a copy, a sampler, or an allocation
// fails at every point of one scenario, in which slots share batches, fork, capture and queue.
// Whoever was hit ends with a typed error, everybody else has the right tokens, and the slots work
// afterwards.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <thread>

#include "failing_new.h"
#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

constexpr int n_slots = 4;

struct asked {
    ids prompt;
    int max_tokens;
    std::function<void(request&)> adjust;
};

// The second one's prompt is a copy of the first one's for the most part, the fourth captures its
// prompt, the last one waits for a slot.
std::vector<asked> make_scenario() {
    const auto captures = [](request& r) {
        r.run_ahead = 64;
        r.capture = make_plan();
    };
    const auto first = make_prompt(1, 40);
    return {{first, 6, captures},
            {first_of(first, 36) + ids{7, 8, 9}, 6, captures},
            {make_prompt(3, 5), 8, [](request& r) { r.run_ahead = 64; }},
            {make_prompt(4, 20), 5,
             [=](request& r) {
                 captures(r);
                 r.n_prompt_rows = 20;
             }},
            {make_prompt(5, 6), 4, [=](request& r) {
                 captures(r);
                 r.on_full = full_policy::drop;
             }}};
}

struct ended {
    std::shared_ptr<request> wanted;
    ids taken;
    finish_reason reason = finish_reason::cancelled;
    std::optional<errc> code;
    int n_prompt_rows = 0;
    bool has_wrong_row = false;
};

void drain(ended& one) {
    consumer taker(one.wanted);
    for (;;) {
        try {
            const auto item = taker.take_item();
            if (!item.token && !item.prompt) break;
            if (item.prompt) one.n_prompt_rows += item.prompt->n_rows;
            if (!item.token) continue;
            one.taken.push_back(item.token->id);
            if (item.token->rows.block && !is_row_of(*item.token)) one.has_wrong_row = true;
        } catch (const std::runtime_error&) {
            one.code = errc::internal;  // nothing came: the engine forgot it
            return;
        }
    }
    one.reason = taker.reason();
    if (one.reason == finish_reason::error) one.code = taker.code();
}

fake_options make_options(bool leaves_tokens = false) {
    fake_options options;
    options.n_slots = n_slots;
    options.leaves_tokens = leaves_tokens;
    return options;
}

// All of the scenario: the engine is held in a decode, the first that request `i_held` has part in,
// until all are submitted.
std::vector<ended> run(test_engine& engine, std::size_t i_held = 0) {
    std::vector<ended> all;
    engine.model->allow(0);
    for (const auto& one : make_scenario()) {
        all.push_back({});
        all.back().wanted = engine.submit(one.prompt, one.max_tokens, one.adjust);
        if (all.size() == i_held + 1) engine.model->wait_held();
    }
    engine.model->allow_all();
    for (auto& one : all) drain(one);
    return all;
}

// Who was hit has a part of its tokens, the others have all.
void check_tokens(const std::vector<ended>& all) {
    const auto scenario = make_scenario();
    for (std::size_t i = 0; i < all.size(); ++i) {
        CAPTURE(i);
        const auto& one = all[i];
        const auto whole = continuation(scenario[i].prompt, scenario[i].max_tokens);
        CHECK_FALSE(one.has_wrong_row);
        CHECK(one.code != errc::internal);
        if (one.code) {
            CHECK(one.taken == first_of(whole, one.taken.size()));
        } else {
            CHECK(one.reason == finish_reason::length);
            CHECK(one.taken == whole);
            CHECK(one.n_prompt_rows == one.wanted->n_prompt_rows);
        }
    }
}

// Every slot is idle, holds what it says, and works.
void check_slots(test_engine& engine) {
    for (slot_id slot = 0; slot < n_slots; ++slot) {
        CHECK_FALSE(is_busy(*engine.sched, slot));
        CHECK(engine.model->cache(slot) == engine.sched->tokens_of(slot));
    }
    CHECK(engine.sched->n_queued() == 0);
    for (slot_id slot = 0; slot < n_slots; ++slot) {
        const auto prompt = first_of(make_prompt(1, 40), 38) + ids{slot};
        consumer taker(engine.submit(prompt, 3, [=](request& r) {
            r.wanted_slot = slot;
            r.capture = make_plan();
        }));
        CHECK(taker.rest() == continuation(prompt, 3));
    }
}

std::set<std::size_t> failed(const std::vector<ended>& all) {
    std::set<std::size_t> hit;
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i].code) hit.insert(i);
    }
    return hit;
}

// The requests in a recorded batch. The last one takes over the slot of one that ended.
std::set<std::size_t> owners(test_engine& engine, const std::vector<ended>& all,
                             std::size_t i_decode) {
    if (i_decode == 0) return {0};  // the others were not submitted yet
    const auto decodes = engine.model->decodes();
    const auto last = all.size() - 1;
    const auto start_of_last = make_scenario()[last].prompt.front();
    bool has_last_begun = false;
    for (std::size_t i = 0; i <= i_decode; ++i) {
        for (const auto& token : decodes[i]) has_last_begun |= token.id == start_of_last;
    }
    std::set<std::size_t> found;
    for (const auto& token : decodes[i_decode]) {
        if (has_last_begun && all[last].wanted->slot == token.slot) {
            found.insert(last);
            continue;
        }
        for (std::size_t i = 0; i < last; ++i) {
            if (all[i].wanted->slot == token.slot) found.insert(i);
        }
    }
    return found;
}

}  // namespace

TEST_CASE("scheduler: a failed decode ends the requests of its batch, at every step") {
    for (const bool leaves_tokens : {false, true}) {
        std::size_t n_decodes =
            1;  // of the scenario; known after the first run, in which none fails
        std::size_t n_hit = 0;
        for (std::size_t i_failed = 0; i_failed <= n_decodes; ++i_failed) {
            CAPTURE(leaves_tokens);
            CAPTURE(i_failed);
            auto options = make_options(leaves_tokens);
            options.on_decode = [=, n = std::size_t{0}](std::span<const step_token>) mutable {
                if (++n == i_failed) throw error(errc::decode, "fake");
            };
            test_engine engine(options);
            const auto all = run(engine);
            if (i_failed == 0) n_decodes = engine.model->decodes().size();
            check_tokens(all);
            const auto hit = failed(all);
            if (i_failed == 0) {
                CHECK(hit.empty());
                CHECK(engine.model->copies().size() == 1);  // the fork came about
            } else if (engine.model->decodes().size() >= i_failed) {
                CHECK(hit == owners(engine, all, i_failed - 1));
                for (const auto i : hit) CHECK(all[i].code == errc::decode);
                n_hit = std::max(n_hit, hit.size());
            }
            CHECK(engine.sched->counters().n_failed == hit.size());
            CHECK(engine.sched->counters().n_finished == all.size() - hit.size());
            check_slots(engine);
        }
        CHECK(n_hit >= 3);  // batches of several slots were among them
    }
}

TEST_CASE("scheduler: an admission that fails ends its request alone") {
    const auto n_requests = make_scenario().size();
    for (std::size_t i_failed = 0; i_failed < n_requests; ++i_failed) {
        CAPTURE(i_failed);
        auto options = make_options();
        options.on_want = [=, n = std::size_t{0}]() mutable {
            if (n++ == i_failed) throw error(errc::out_of_memory, "fake");
        };
        test_engine engine(options);
        const auto all = run(engine, i_failed == 0 ? 1 : 0);  // the first has no decode then
        check_tokens(all);
        CHECK(failed(all) == std::set{i_failed});
        CHECK(all[i_failed].code == errc::out_of_memory);
        check_slots(engine);
    }
}

// What an earlier request left there may belong to somebody else.
TEST_CASE("scheduler: a request whose admission fails never has the slot that it would have got") {
    auto options = fake_options{};
    auto fails = std::make_shared<std::atomic<bool>>(false);
    options.on_want = [=] {
        if (*fails) throw error(errc::out_of_memory, "fake");
    };
    test_engine engine(options);
    const auto parked = engine.submit(make_prompt(1, 5), 9, [](request& r) { r.run_ahead = 0; });
    consumer returning(parked);
    CHECK(returning.take(1).size() == 1);
    const auto prompt = make_prompt(2, 5);
    consumer(engine.submit(prompt, 4)).rest();
    REQUIRE(engine.sched->n_parked() == 1);
    const auto held = engine.sched->tokens_of(0);
    REQUIRE(held == prompt + continuation(prompt, 3));

    *fails = true;
    const auto refused = engine.submit(make_prompt(3, 5), 4);
    consumer taker(refused);
    CHECK(taker.rest().empty());
    CHECK(taker.code() == errc::out_of_memory);
    CHECK(refused->slot == -1);
    CHECK(returning.rest().empty());
    CHECK(returning.code() == errc::out_of_memory);
    CHECK(parked->slot == -1);
    CHECK(engine.sched->tokens_of(0) == held);

    *fails = false;
    const auto next = engine.submit(prompt, 2);
    CHECK(consumer(next).rest() == continuation(prompt, 2));
    CHECK(next->slot == 0);
}

TEST_CASE("scheduler: a copy of a cache that fails ends the request that wanted it") {
    auto options = make_options();
    options.on_copy = [n = 0]() mutable {
        if (n++ == 0) throw std::bad_alloc();
    };
    test_engine engine(options);
    const auto all = run(engine);
    check_tokens(all);
    CHECK(failed(all) == std::set<std::size_t>{1});
    CHECK(all[1].code == errc::out_of_memory);
    check_slots(engine);
}

TEST_CASE("scheduler: a sampler that fails ends its request alone, at every token") {
    const int n_tokens = 6 + 6 + 8 + 5 + 4;
    for (int i_failed = 0; i_failed < n_tokens; ++i_failed) {
        CAPTURE(i_failed);
        auto options = make_options();
        options.on_pick = [=, n = 0](token_id) mutable {
            if (n++ == i_failed) throw std::runtime_error("fake");
        };
        test_engine engine(options);
        const auto all = run(engine);
        check_tokens(all);
        CHECK(failed(all).size() == 1);
        check_slots(engine);
    }
}

TEST_CASE(
    "scheduler: memory that runs out at any allocation of the engine thread ends one request") {
    long i_failed = 0;
    for (bool has_failed = true; has_failed; ++i_failed) {
        CAPTURE(i_failed);
        const int n_before = n_allocations_failed;
        auto options = make_options();
        options.on_decode = allocation_failure(i_failed);
        test_engine engine(options);
        const auto all = run(engine);
        has_failed = n_allocations_failed > n_before;
        check_tokens(all);
        const auto hit = failed(all);
        CHECK(hit.size() <= 1);
        for (const auto i : hit) {
            const bool is_typed =
                all[i].code == errc::out_of_memory || all[i].code == errc::pool_exhausted;
            CHECK(is_typed);
        }
        // The rest of the count must not hit what follows.
        if (has_failed) check_slots(engine);
    }
    CHECK(i_failed > 50);
    MESSAGE("allocations that failed, one a run: " << i_failed - 1);
}

// Nothing else happens that would wake the engine: the request which holds the memory ends between
// two decodes.
TEST_CASE("scheduler: a request that ends for want of memory leaves its slot to one that waits") {
    test_engine engine({}, 4096);
    consumer keeper(
        engine.submit(make_prompt(1, 5), 5, [](request& r) { r.capture = make_plan(); }));
    const auto held = keeper.next();
    const auto prompt = make_prompt(2, 5);
    const auto queued = engine.submit(prompt, 3);
    ids taken;
    std::thread waiting([&] {
        try {
            taken = consumer(queued).rest();
        } catch (const std::runtime_error&) {
            taken.clear();
        }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK_FALSE(keeper.next());
    CHECK(keeper.code() == errc::pool_exhausted);
    waiting.join();
    CHECK(taken == continuation(prompt, 3));
}

TEST_CASE("scheduler: a cancellation that meets the last token tells what the request cost") {
    auto options = fake_options{};
    test_engine engine(options);
    engine.model->allow(2);
    const auto wanted = engine.submit(make_prompt(1, 5), 2);
    REQUIRE(engine.model->wait_held());  // in the decode that gives the last token
    engine.sched->cancel(wanted);
    engine.model->allow_all();
    wait_settled(*wanted->box);
    consumer taker(wanted);
    CHECK(taker.rest().empty());
    CHECK(taker.reason() == finish_reason::cancelled);
    CHECK(taker.usage().prompt_tokens == 5);
    CHECK(taker.usage().completion_tokens == 2);
    CHECK(engine.sched->tokens_of(0) == make_prompt(1, 5));
}
