// scheduler with four slots: which tokens share a step, who takes turns, who stops whom.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

fake_options four_slots() {
    fake_options options;
    options.n_slots = 4;
    return options;
}

std::vector<slot_id> slots_of(const fake_model::batch& batch) {
    std::vector<slot_id> slots;
    for (const auto& token : batch) slots.push_back(token.slot);
    return slots;
}

// Submits one request a slot while the engine is held, so that all are there when it goes on.
std::vector<std::shared_ptr<request>> submit_four(
    test_engine& engine, int n_prompt, int max_tokens,
    const std::function<void(request&)>& adjust = {}) {
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> all;
    for (token_id i = 0; i < 4; ++i) {
        all.push_back(engine.submit(make_prompt(i + 1, n_prompt), max_tokens, adjust));
        if (i == 0) REQUIRE(engine.model->wait_held());
    }
    engine.model->allow_all();
    return all;
}

}  // namespace

TEST_CASE("scheduler: four requests run at once, a token of each in a step") {
    test_engine engine(four_slots());
    const auto all = submit_four(engine, 5, 8, [](request& r) { r.capture = make_plan(); });
    const auto n_decodes = engine.settled_decodes(4 + 7);
    std::set<slot_id> slots;
    for (std::size_t i = 0; i < all.size(); ++i) {
        consumer taker(all[i]);
        ids taken;
        while (const auto token = taker.next()) {
            taken.push_back(token->id);
            CHECK(is_row_of(*token));
        }
        CHECK(taken == continuation(make_prompt(static_cast<token_id>(i + 1), 5), 8));
        slots.insert(all[i]->slot);
    }
    CHECK(slots == std::set<slot_id>{0, 1, 2, 3});
    const auto batches = engine.model->decodes();
    CHECK(std::count_if(batches.begin(), batches.end(), [](const auto& batch) {
              return slots_of(batch) == std::vector{0, 1, 2, 3};
          }) >= 4);
    CHECK(n_decodes < 4 * 8);
    CHECK(engine.sched->counters().n_prompt_tokens == 4 * 5);
    CHECK(engine.sched->counters().n_tokens == 4 * 8);
}

TEST_CASE("scheduler: a running text and a long prompt take turns") {
    test_engine engine(four_slots());
    engine.model->allow(0);
    const auto running = engine.submit(make_prompt(1, 5), 40, [](request& r) { r.run_ahead = 40; });
    REQUIRE(engine.model->wait_held());
    const auto prompt = make_prompt(2, 80);
    const auto late = engine.submit(prompt, 2);
    engine.model->allow_all();
    CHECK(consumer(late).rest() == continuation(prompt, 2));
    CHECK(consumer(running).rest() == continuation(make_prompt(1, 5), 40));
    const auto batches = engine.model->decodes();
    // First the short prompt, then ten chunks of the long one, each next to one token of the text.
    for (std::size_t i = 2; i <= 20; ++i) {
        CAPTURE(i);
        const bool is_chunk = batches[i].size() == 8;
        CHECK(is_chunk == (batches[i][0].slot == late->slot));
        CHECK(is_chunk != (batches[i - 1].size() == 8));
    }
}

TEST_CASE("scheduler: a paused slot in the middle makes two steps of the others") {
    test_engine engine(four_slots());
    std::vector<std::shared_ptr<request>> all;
    for (token_id i = 0; i < 4; ++i) {
        all.push_back(engine.submit(make_prompt(i + 1, 5), i == 2 ? 20 : 50, [&](request& r) {
            r.wanted_slot = i;
            r.run_ahead = i == 2 ? 1 : 50;
            r.capture = make_plan();
        }));
    }
    for (const int i : {0, 1, 3}) {
        const auto index = static_cast<std::size_t>(i);
        CHECK(consumer(all[index]).rest() == continuation(make_prompt(i + 1, 5), 50));
    }
    CHECK(all[2]->slot == 2);
    CHECK(engine.sched->tokens_of(2).size() == 5);  // one token ahead, then nothing
    std::size_t n_left = 0;
    std::size_t n_right = 0;
    for (const auto& batch : engine.model->decodes()) {
        n_left += slots_of(batch) == std::vector{0, 1};
        n_right += slots_of(batch) == std::vector{3};
    }
    CHECK(n_left >= 40);
    CHECK(n_right >= 40);
    CHECK(consumer(all[2]).rest() == continuation(make_prompt(3, 5), 20));
}

TEST_CASE(
    "scheduler: a request behind slots that all wait for their consumers is told whom, once") {
    test_engine engine(four_slots());
    const auto all = submit_four(engine, 5, 20, [](request& r) { r.run_ahead = 1; });
    engine.settled_decodes(4);
    const auto prompt = make_prompt(9, 5);
    const auto late = engine.submit(prompt, 3);
    engine.pass_round();
    CHECK(late->box->take_stall().empty());  // nobody waited for it yet

    const auto waiter = std::make_shared<wake_handle>();
    CHECK_FALSE(late->box->arm(waiter));
    engine.pass_round();
    CHECK(late->box->arm(waiter));
    CHECK(late->box->take_stall() == std::vector<request_id>{1, 2, 3, 4});
    CHECK_FALSE(late->box->arm(waiter));
    engine.pass_round();
    CHECK(late->box->take_stall().empty());
    late->box->forget_stall();
    (void)late->box->arm(waiter);  // true where the engine was just about to tell it once more
    engine.pass_round();
    CHECK(late->box->take_stall() == std::vector<request_id>{1, 2, 3, 4});

    engine.cancel(all[2]);
    consumer taker(late);
    CHECK(taker.rest() == continuation(prompt, 3));
    CHECK(taker.stalls().empty());
    CHECK(late->slot == 2);
}

TEST_CASE("scheduler: nobody is told of a stall while a slot can go on") {
    test_engine engine(four_slots());
    auto all =
        submit_four(engine, 5, 20, [](request& r) { r.run_ahead = r.prompt[0] == 3000 ? 200 : 1; });
    const auto late = engine.submit(make_prompt(9, 5), 3);
    consumer taker(late);
    CHECK(taker.rest().size() == 3);
    CHECK(taker.stalls().empty());
    CHECK(late->slot == all[2]->slot);
}

TEST_CASE("scheduler: a failed step ends the requests in it and no other") {
    auto options = four_slots();
    options.leaves_tokens = true;
    options.on_decode = [has_failed = false](std::span<const step_token> tokens) mutable {
        if (tokens.size() != 2 || tokens[1].slot != 1 || tokens[0].position < 20) return;
        if (!std::exchange(has_failed, true)) throw error(errc::decode, "fake");
    };
    test_engine engine(options);
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> all;
    for (token_id i = 0; i < 4; ++i) {
        all.push_back(engine.submit(make_prompt(i + 1, 5), 30,
                                    [&](request& r) { r.run_ahead = i == 2 ? 1 : 30; }));
        if (i == 0) REQUIRE(engine.model->wait_held());
    }
    engine.model->allow_all();
    std::vector<consumer> takers(all.begin(), all.end());
    for (const std::size_t i : {0u, 1u}) {
        CAPTURE(i);
        const auto taken = takers[i].rest();
        CHECK(taken == continuation(all[i]->prompt, static_cast<int>(taken.size())));
        CHECK(taken.size() < 30);
        CHECK(takers[i].reason() == finish_reason::error);
        CHECK(takers[i].code() == errc::decode);
    }
    for (const std::size_t i : {2u, 3u}) {
        CHECK(takers[i].rest() == continuation(all[i]->prompt, 30));
        CHECK(takers[i].reason() == finish_reason::length);
    }
    engine.pass_round();
    for (slot_id i = 0; i < 4; ++i) {
        CHECK(engine.model->cache(i) == engine.sched->tokens_of(i));
    }
    const auto prompt = make_prompt(1, 5);
    CHECK(consumer(engine.submit(prompt, 5)).rest() == continuation(prompt, 5));
}

TEST_CASE("scheduler: a request goes to the free slot with the longest common prefix") {
    test_engine engine(four_slots());
    const auto all = submit_four(engine, 10, 3);
    for (const auto& wanted : all) consumer(wanted).rest();
    engine.pass_round();
    for (const token_id i : {3, 1, 2, 0}) {
        const auto prompt = first_of(make_prompt(i + 1, 10), 7) + make_prompt(50, 3);
        const auto wanted = engine.submit(prompt, 2);
        consumer taker(wanted);
        CHECK(taker.rest() == continuation(prompt, 2));
        CHECK(wanted->slot == all[static_cast<std::size_t>(i)]->slot);
        CHECK(taker.usage().cached_tokens == 7);
        engine.pass_round();
    }
}

TEST_CASE("scheduler: a request without a free slot waits for the first one that ends") {
    test_engine engine(four_slots());
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> all;
    for (token_id i = 0; i < 5; ++i) {
        all.push_back(engine.submit(make_prompt(i + 1, 5), i == 2 ? 2 : 8));
        if (i == 0) REQUIRE(engine.model->wait_held());
    }
    CHECK(all[4]->slot == -1);
    engine.model->allow_all();
    CHECK(consumer(all[4]).rest() == continuation(make_prompt(5, 5), 8));
    CHECK(all[4]->slot == all[2]->slot);
    for (std::size_t i = 0; i < 4; ++i) CHECK(consumer(all[i]).rest().size() == (i == 2 ? 2 : 8));
}
