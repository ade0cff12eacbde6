// slot_table and batch_builder: the states of a slot; which tokens share a step, who takes turns,
// who stops whom; what a request takes over from its slot or from another one.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <new>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sched/slot_table.h"
#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

constexpr std::array all{slot_state::idle,    slot_state::prefill, slot_state::decode,
                         slot_state::steered, slot_state::paused,  slot_state::starved};

// idle starts with a prompt; a generating slot does not go back to its prompt, unless it is
// steered, which waits for its consumer after a step.
const std::set<std::pair<slot_state, slot_state>> illegal{
    {slot_state::idle, slot_state::idle},       {slot_state::idle, slot_state::decode},
    {slot_state::idle, slot_state::paused},     {slot_state::idle, slot_state::starved},
    {slot_state::prefill, slot_state::prefill}, {slot_state::decode, slot_state::prefill},
    {slot_state::idle, slot_state::steered},    {slot_state::paused, slot_state::steered},
    {slot_state::starved, slot_state::steered}, {slot_state::steered, slot_state::steered},
    {slot_state::steered, slot_state::paused},  {slot_state::steered, slot_state::starved},
};

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

fake_options slots(int n) {
    fake_options options;
    options.n_slots = n;
    options.n_ctx = 512;
    return options;
}

std::size_t n_decoded(const test_engine& engine) {
    return engine.sched->counters().n_prompt_tokens;
}

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

TEST_CASE("slot_state: exactly the transitions of the table are legal") {
    for (const auto from : all) {
        for (const auto to : all) {
            CAPTURE(kqview::name_of(from));
            CAPTURE(kqview::name_of(to));
            CHECK(kqview::may_follow(from, to) == !illegal.contains({from, to}));
        }
    }
}

TEST_CASE("slot_state: change follows the table and names both states when it refuses") {
    for (const auto from : all) {
        for (const auto to : all) {
            CAPTURE(kqview::name_of(from));
            CAPTURE(kqview::name_of(to));
            std::atomic state{from};
            if (from == to || kqview::may_follow(from, to)) {
                CHECK_NOTHROW(kqview::change(state, to));
                CHECK(state == to);
                continue;
            }
            try {
                kqview::change(state, to);
                FAIL_CHECK("no error");
            } catch (const kqview::error& failure) {
                const std::string text = failure.what();
                CHECK(failure.code() == kqview::errc::internal);
                CHECK(text.find(kqview::name_of(from)) != std::string::npos);
                CHECK(text.find(kqview::name_of(to)) != std::string::npos);
            }
            CHECK(state == from);
        }
    }
}

TEST_CASE("slot_state: every state has its own name") {
    std::set<std::string> names;
    for (const auto state : all) names.insert(kqview::name_of(state));
    CHECK(names.size() == all.size());
    CHECK_FALSE(names.contains("?"));
}

// ---- four slots

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
    const auto prompt = make_prompt(2, 81);
    const auto late = engine.submit(prompt, 2);
    engine.model->allow_all();
    CHECK(consumer(late).rest() == continuation(prompt, 2));
    CHECK(consumer(running).rest() == continuation(make_prompt(1, 5), 40));
    const auto batches = engine.model->decodes();
    // First the short prompt, then ten full chunks of the long one, each next to one token of the
    // text.
    for (std::size_t i = 2; i <= 20; ++i) {
        CAPTURE(i);
        const bool is_chunk = batches[i].size() == 8;
        CHECK(is_chunk == (batches[i][0].slot == late->slot));
        CHECK(is_chunk != (batches[i - 1].size() == 8));
    }
}

TEST_CASE("scheduler: prompts that arrive one after the other leave no running text out") {
    constexpr int n_slots = 8;
    test_engine engine({.n_slots = n_slots});
    engine.model->allow(0);
    std::vector<consumer> takers;
    for (token_id i = 0; i < n_slots; ++i) {
        takers.emplace_back(
            engine.submit(make_prompt(i + 1, 7), 12, [](request& r) { r.run_ahead = 12; }));
    }
    engine.model->allow_all();
    for (token_id i = 0; i < n_slots; ++i) {
        CHECK(takers[static_cast<std::size_t>(i)].rest() ==
              continuation(make_prompt(i + 1, 7), 12));
    }
    // Between two steps of a running text there is at most one of a prompt.
    std::vector<int> last(n_slots, -1), n_tokens(n_slots, 0);
    const auto batches = engine.model->decodes();
    for (int i = 0; i < static_cast<int>(batches.size()); ++i) {
        for (const auto& token : batches[static_cast<std::size_t>(i)]) {
            if (!token.wants_logits) continue;
            const auto slot = static_cast<std::size_t>(token.slot);
            CAPTURE(slot);
            CAPTURE(i);
            if (n_tokens[slot]++ > 0) CHECK(i - last[slot] <= 2);
            last[slot] = i;
        }
    }
}

// Prompts of these lengths arrive together; the sizes of their chunks. The last token of each goes
// on its own, as the first of its text.
std::vector<std::size_t> steps_of_prompts(const std::vector<int>& lengths,
                                          const std::function<void(std::size_t, request&)>& change,
                                          int n_chunk = 64) {
    const auto n_slots = static_cast<int>(lengths.size());
    test_engine engine({.n_slots = n_slots, .n_ctx = 4096, .n_chunk = n_chunk});
    engine.model->allow(0);
    consumer blocker(engine.submit(make_prompt(90, 1), 1, [](request& r) { r.wanted_slot = 0; }));
    REQUIRE(engine.model->wait_held());
    std::vector<consumer> takers;
    std::vector<lora_scales> scales(lengths.size());
    std::vector<bool> has_rows(lengths.size());
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        const auto prompt = make_prompt(static_cast<token_id>(i) + 1, lengths[i]);
        takers.emplace_back(engine.submit(prompt, 3, [&](request& r) {
            r.wanted_slot = static_cast<slot_id>(i);
            change(i, r);
            scales[i] = r.lora;
            has_rows[i] = r.n_prompt_rows > 0;
        }));
    }
    engine.model->allow_all();
    CHECK(blocker.rest().size() == 1);
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        const auto prompt = make_prompt(static_cast<token_id>(i) + 1, lengths[i]);
        if (has_rows[i]) CHECK(takers[i].next_prompt());
        CHECK(takers[i].rest() == continuation(prompt, 3, scales[i]));
    }
    std::vector<std::size_t> sizes;
    for (const auto& batch : engine.model->decodes()) {
        if (batch.size() > 1 && batch[0].slot == batch[1].slot) sizes.push_back(batch.size());
    }
    return sizes;
}

TEST_CASE("scheduler: prompts that arrive together go through the model together") {
    using sizes = std::vector<std::size_t>;
    const auto plain = [](std::size_t, request&) {};
    CHECK(steps_of_prompts({33, 33, 33, 33}, plain, 128) == sizes{128});
    CHECK(steps_of_prompts({41, 41}, plain) == sizes{64, 16});
    // The rest of the longer ones is a step of theirs.
    CHECK(steps_of_prompts({6, 21, 21}, plain) == sizes{15, 30});
    // With too little of each in a step, they come one after the other.
    CHECK(steps_of_prompts({61, 61, 61}, plain, 64) == sizes{63, 63, 54});
    CHECK(steps_of_prompts({61, 61, 61}, plain, 32) == sizes{32, 32, 32, 24, 32, 28});
    // Together too long: the first one does not wait for the other.
    const auto steps = steps_of_prompts({1501, 1501}, plain, 2048);
    CHECK(steps.at(0) == 1500);
    CHECK(steps.at(1) == 128);
    const auto captured = [](int n_prompt_rows) {
        return [n_prompt_rows](std::size_t i, request& r) {
            if (i == 0) return;
            r.capture = make_plan();
            r.n_prompt_rows = n_prompt_rows;
        };
    };
    CHECK(steps_of_prompts({21, 21}, captured(0)) == sizes{40});
    // Rows of a prompt come from a step of its own.
    CHECK(steps_of_prompts({21, 21}, captured(1)) == sizes{20, 21});
    CHECK(steps_of_prompts({21, 21}, [](std::size_t i, request& r) {
              r.lora = {i == 0 ? 1.0f : 0.5f};
          }) == sizes{20, 20});
}

TEST_CASE("scheduler: prompts are evaluated in the order of their arrival, not of their slots") {
    test_engine engine({.n_slots = 2, .n_ctx = 4096, .n_chunk = 16});
    engine.model->allow(0);
    const auto in_slot = [](slot_id id) { return [id](request& r) { r.wanted_slot = id; }; };
    consumer first(engine.submit(make_prompt(1, 64), 1, in_slot(1)));
    REQUIRE(engine.model->wait_held());
    consumer second(engine.submit(make_prompt(2, 64), 1, in_slot(0)));
    engine.model->allow_all();
    CHECK(first.rest().size() == 1);
    CHECK(second.rest().size() == 1);
    std::vector<slot_id> slots;
    for (const auto& batch : engine.model->decodes()) slots.push_back(batch.front().slot);
    CHECK(std::is_sorted(slots.rbegin(), slots.rend()));
}

TEST_CASE("scheduler: a paused slot in the middle makes two steps of the others") {
    test_engine engine(four_slots());
    engine.model->allow(0);  // none is ahead of the others
    std::vector<std::shared_ptr<request>> all;
    for (token_id i = 0; i < 4; ++i) {
        all.push_back(engine.submit(make_prompt(i + 1, 5), i == 2 ? 20 : 50, [&](request& r) {
            r.wanted_slot = i;
            r.run_ahead = i == 2 ? 1 : 50;
            r.capture = make_plan();
        }));
    }
    engine.model->allow_all();
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
    auto options = four_slots();
    options.can_save = false;
    test_engine engine(options);
    // Their cells would have to be saved, so they are never parked.
    const auto all = submit_four(engine, 5, 20, [](request& r) {
        r.is_steered = r.is_alone = true;
        r.wanted_slot = r.prompt[0] / 1000 - 1;
    });
    engine.pass_round();
    const auto prompt = make_prompt(9, 5);
    const auto late = engine.submit(prompt, 3);
    engine.pass_round();
    CHECK(late->box->take_stall().empty());  // nobody waited for it yet

    const auto waiter = std::make_shared<wake_handle>();
    CHECK_FALSE(late->box->arm(waiter));
    await(*waiter);  // the holders' turns end first
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
    auto options = four_slots();
    options.can_save = false;
    test_engine engine(options);
    auto all = submit_four(engine, 5, 20, [](request& r) {
        r.run_ahead = 200;
        r.is_steered = r.is_alone = r.prompt[0] != 3000;
    });
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

// ---- prompts that begin alike are evaluated once and copied

TEST_CASE("scheduler: requests of one prompt share its evaluation") {
    test_engine engine(slots(4));
    const auto prompt = make_prompt(1, 100);
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> all;
    for (int i = 0; i < 4; ++i) all.push_back(engine.submit(prompt, 6));
    engine.model->allow_all();
    for (const auto& wanted : all) CHECK(consumer(wanted).rest() == continuation(prompt, 6));
    CHECK(n_decoded(engine) == 100 + 3);  // each decodes the last token for its own logits
    CHECK(engine.model->copies().size() == 3);
    CHECK(all[3]->slot == 3);
}

TEST_CASE("scheduler: what an idle slot holds is copied where another slot must take the request") {
    test_engine engine(slots(2));
    const auto prompt = make_prompt(1, 100);
    CHECK(consumer(engine.submit(prompt, 3)).rest() == continuation(prompt, 3));
    const auto wanted = engine.submit(prompt, 3, [](request& r) { r.wanted_slot = 1; });
    consumer taker(wanted);
    CHECK(taker.rest() == continuation(prompt, 3));
    CHECK(wanted->slot == 1);
    CHECK(taker.usage().cached_tokens == 99);
    CHECK(wanted->n_cached == 99);
    CHECK(engine.model->copies() == std::vector<std::pair<slot_id, slot_id>>{{0, 1}});
}

// The source may hold somebody else's answer after the prompt.
TEST_CASE("scheduler: a slot that is copied from another never shows more than the prompt") {
    auto options = slots(2);
    const scheduler* sched = nullptr;
    ids seen;
    options.on_truncate = [&](slot_id slot) {
        if (slot == 1 && sched) seen = sched->tokens_of(1);
    };
    test_engine engine(options);
    const auto prompt = make_prompt(1, 100);
    CHECK(consumer(engine.submit(prompt, 9)).rest().size() == 9);
    sched = engine.sched.get();  // the engine thread is idle, and is woken by what follows
    const auto wanted = engine.submit(prompt, 3, [](request& r) { r.wanted_slot = 1; });
    CHECK(consumer(wanted).rest() == continuation(prompt, 3));
    REQUIRE(engine.model->copies().size() == 1);
    CHECK(seen.size() < prompt.size());
}

TEST_CASE("scheduler: a short common beginning is evaluated again") {
    test_engine engine(slots(2));
    const auto prompt = make_prompt(1, 20);
    CHECK(consumer(engine.submit(prompt, 3)).rest() == continuation(prompt, 3));
    const auto wanted = engine.submit(prompt, 3, [](request& r) { r.wanted_slot = 1; });
    CHECK(consumer(wanted).rest() == continuation(prompt, 3));
    CHECK(engine.model->copies().empty());
}

TEST_CASE("scheduler: a request whose source is cancelled evaluates the rest itself") {
    test_engine engine(slots(2));
    const auto prompt = make_prompt(1, 100);
    engine.model->allow(0);
    const auto source = engine.submit(prompt, 6);
    REQUIRE(engine.model->wait_held());
    const auto waiting = engine.submit(prompt, 6);
    engine.model->allow(6);
    engine.model->wait_decodes(6);
    engine.sched->cancel(source);
    engine.model->allow_all();
    CHECK(consumer(waiting).rest() == continuation(prompt, 6));
}

TEST_CASE("scheduler: rows that are wanted of the prompt are not taken over") {
    test_engine engine(slots(2));
    const auto prompt = make_prompt(1, 100);
    CHECK(consumer(engine.submit(prompt, 3)).rest() == continuation(prompt, 3));
    const auto wanted = engine.submit(prompt, 1, [](request& r) {
        r.capture = make_plan();
        r.n_prompt_rows = 40;
        r.only_attends = true;
        r.wanted_slot = 1;
    });
    consumer taker(wanted);
    int n_rows = 0;
    while (const auto rows = taker.next_prompt()) n_rows += rows->n_rows;
    CHECK(n_rows == 40);
    CHECK(taker.usage().cached_tokens == 60);
}

TEST_CASE("scheduler: a request without a cache evaluates its whole prompt") {
    test_engine engine(slots(2));
    const auto prompt = make_prompt(1, 100);
    CHECK(consumer(engine.submit(prompt, 3)).rest() == continuation(prompt, 3));
    for (const slot_id slot : {-1, 0, 1}) {
        for (const int n_reuse_min : {0, 4}) {
            consumer taker(engine.submit(prompt, 3, [&](request& r) {
                r.cache_prompt = false;
                r.n_reuse_min = n_reuse_min;
                r.wanted_slot = slot;
            }));
            CHECK(taker.rest() == continuation(prompt, 3));
            CHECK(taker.usage().cached_tokens == 0);
        }
    }
    CHECK(n_decoded(engine) == 7 * 100);
    CHECK(engine.model->copies().empty());
    // What it leaves behind is as good as anything.
    consumer taker(engine.submit(prompt, 3));
    taker.rest();
    CHECK(taker.usage().cached_tokens == 99);
}

TEST_CASE("scheduler: caches that cannot be cut are not copied") {
    auto options = slots(2);
    options.can_truncate = false;
    test_engine engine(std::move(options));
    const auto prompt = make_prompt(1, 100);
    CHECK(consumer(engine.submit(prompt, 3)).rest() == continuation(prompt, 3));
    const auto wanted = engine.submit(prompt, 3, [](request& r) { r.wanted_slot = 1; });
    CHECK(consumer(wanted).rest() == continuation(prompt, 3));
    CHECK(engine.model->copies().empty());
}

TEST_CASE("scheduler: a request that waits for its slot holds up nobody behind it") {
    test_engine engine(slots(2));
    const auto holder = engine.submit(make_prompt(1, 5), 50, [](request& r) {
        r.run_ahead = 1;
        r.wanted_slot = 0;
    });
    engine.settled_decodes(1);
    const auto waits = engine.submit(make_prompt(2, 5), 2, [](request& r) { r.wanted_slot = 0; });
    const auto other = engine.submit(make_prompt(3, 5), 2);
    CHECK(consumer(other).rest() == continuation(make_prompt(3, 5), 2));
    CHECK(waits->slot == -1);
    CHECK(consumer(holder).rest() == continuation(make_prompt(1, 5), 50));
    CHECK(consumer(waits).rest() == continuation(make_prompt(2, 5), 2));
    CHECK(waits->slot == 0);
}

TEST_CASE("scheduler: a prompt is cut smaller while others generate") {
    auto options = slots(2);
    options.n_chunk = 300;
    test_engine engine(std::move(options));
    engine.model->allow(2);
    const auto running =
        engine.submit(make_prompt(1, 5), 100, [](request& r) { r.run_ahead = 100; });
    REQUIRE(engine.model->wait_held());  // it generates, and has not ended
    const auto prompt = make_prompt(2, 300);
    const auto late = engine.submit(prompt, 2);
    engine.model->allow_all();
    CHECK(consumer(late).rest() == continuation(prompt, 2));
    CHECK(consumer(running).rest() == continuation(make_prompt(1, 5), 100));
    std::size_t n_largest = 0;
    for (const auto& batch : engine.model->decodes()) n_largest = std::max(n_largest, batch.size());
    CHECK(n_largest == 128);
}

TEST_CASE("scheduler: two requests with one beginning never wait for each other's prompt") {
    fake_options options;
    options.n_slots = 2;
    test_engine engine(options);
    const auto beginning = make_prompt(1, 110);
    engine.model->allow(1);
    const auto first = engine.submit(beginning + make_prompt(2, 10), 3);
    REQUIRE(engine.model->wait_held());
    const auto prompt = beginning + make_prompt(3, 10);
    const auto second = engine.submit(prompt, 3);  // waits for the first one's prompt
    engine.model->allow(1);
    REQUIRE(engine.model->wait_decodes(3));
    REQUIRE(engine.model->wait_held());
    REQUIRE(second->slot == 1);
    // The third one comes to the first one's slot and would wait for the second one's prompt.
    const auto other = beginning + make_prompt(4, 10);
    const auto third = engine.submit(other, 3);
    engine.sched->cancel(first);
    engine.model->allow_all();
    CHECK(consumer(second).rest() == continuation(prompt, 3));
    CHECK(consumer(third).rest() == continuation(other, 3));
    CHECK(third->slot == 0);
}

TEST_CASE("scheduler: a request does not wait for a prompt whose rows nobody takes") {
    fake_options options;
    options.n_slots = 2;
    test_engine engine(options);
    const auto beginning = make_prompt(1, 110);
    const auto slow = engine.submit(beginning + make_prompt(2, 10), 3, [](request& r) {
        r.capture = make_plan();
        r.n_prompt_rows = 120;
    });
    engine.settled_decodes(1);
    const auto prompt = beginning + make_prompt(3, 10);
    CHECK(consumer(engine.submit(prompt, 3)).rest() == continuation(prompt, 3));
    CHECK_FALSE(slow->box->end());
    engine.cancel(slow);
}

// ---- prompts that take over what follows pruned tokens, and full slots that make room

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

TEST_CASE("slot_cache: a shift closes several gaps at once") {
    test_engine engine;
    const auto prompt = make_prompt(1, 30);
    consumer(engine.submit(prompt, 1)).rest();
    const std::vector<token_range> gone{{2, 3}, {10, 1}, {20, 10}};
    engine.sched->run_on_slot(0, [&](slot_cache& idle) { idle.discard(gone); });
    const auto left = cut_out(cut_out(cut_out(prompt, 20, 10), 10, 1), 2, 3);
    CHECK(engine.sched->tokens_of(0) == left);
    CHECK(engine.model->cache(0) == left);
    CHECK(engine.sched->slots()[0].n_exact == 2);
    // What a caller has shifted himself is there for who asks for that, and for nobody else.
    const auto next = left + make_prompt(2, 2);
    for (const int n_reuse_min : {1, 0}) {
        consumer taker(engine.submit(next, 3, [&](request& r) { r.n_reuse_min = n_reuse_min; }));
        CHECK(taker.rest() == continuation(next, 3));
        CHECK(taker.usage().cached_tokens == (n_reuse_min > 0 ? 16 : 2));
    }
    CHECK(engine.sched->slots()[0].n_exact == engine.sched->tokens_of(0).size());
}

// ---- LoRA scales

namespace {

std::function<void(request&)> with_lora(lora_scales scales) {
    return [scales = std::move(scales)](request& r) { r.lora = scales; };
}

}  // namespace

TEST_CASE("slots: with different LoRA scales take turns, and none is left out") {
    constexpr int n_tokens = 40;
    test_engine engine({.n_slots = 3});
    engine.model->allow(0);
    const std::vector<lora_scales> scales = {{1.0f}, {0.5f}, {1.0f}};
    std::vector<consumer> takers;
    for (std::size_t i = 0; i < scales.size(); ++i) {
        const auto prompt = make_prompt(static_cast<token_id>(i) + 1, 4);
        takers.emplace_back(engine.submit(prompt, n_tokens, [&](request& r) {
            r.lora = scales[i];
            r.run_ahead = n_tokens;
        }));
    }
    engine.model->allow_all();
    for (std::size_t i = 0; i < scales.size(); ++i) {
        const auto prompt = make_prompt(static_cast<token_id>(i) + 1, 4);
        CHECK(takers[i].rest() == continuation(prompt, n_tokens, scales[i]));
    }
    // The steps of the second slot are spread over those of the others.
    int n_between = 0, n_most = 0, n_shared = 0, n_second = 0;
    for (const auto& batch : engine.model->decodes()) {
        const auto has = [&](slot_id id) {
            return std::any_of(batch.begin(), batch.end(),
                               [&](const step_token& token) { return token.slot == id; });
        };
        n_shared += has(1) && (has(0) || has(2));
        n_second += has(1);
        n_between = has(1) ? 0 : n_between + 1;
        if (n_second < n_tokens) n_most = std::max(n_most, n_between);
    }
    CHECK(n_shared == 0);
    CHECK(n_most <= 16);
}

TEST_CASE("slots: what was computed with other LoRA scales is not reused") {
    test_engine engine({.n_slots = 1, .n_chunk = 64});
    const auto prompt = make_prompt(1, 40);
    const std::vector<std::pair<float, int>> n_cached = {
        {1.0f, 0}, {0.5f, 0}, {0.5f, 39}, {0.0f, 0}, {1.0f, 0}};
    for (const auto& [scale, n] : n_cached) {
        consumer taker(engine.submit(prompt, 4, with_lora({scale})));
        CHECK(taker.rest() == continuation(prompt, 4, {scale}));
        CHECK(taker.usage().cached_tokens == n);
    }
}

TEST_CASE("slots: a prompt is copied from another slot only with equal LoRA scales") {
    for (const float scale : {1.0f, 0.5f}) {
        CAPTURE(scale);
        test_engine engine({.n_slots = 2, .n_chunk = 8});
        const auto prompt = make_prompt(1, 64);
        engine.model->allow(0);
        consumer first(engine.submit(prompt, 3, with_lora({1.0f})));
        consumer second(engine.submit(prompt, 3, with_lora({scale})));
        engine.model->allow_all();
        CHECK(first.rest() == continuation(prompt, 3, {1.0f}));
        CHECK(second.rest() == continuation(prompt, 3, {scale}));
        CHECK(engine.model->copies().size() == (scale == 1.0f ? 1u : 0u));
    }
}

TEST_CASE("slots: a restored slot has the LoRA scales that it was saved with") {
    test_engine engine({.n_slots = 1, .n_chunk = 64});
    const auto prompt = make_prompt(1, 40);
    consumer(engine.submit(prompt, 1, with_lora({0.5f}))).rest();
    std::vector<std::byte> blob;
    lora_scales saved;
    engine.sched->run_on_slot(0, [&](slot_cache& cache) {
        blob.resize(cache.save({}));
        blob.resize(cache.save(blob));
        saved = cache.lora();
        cache.clear();
        cache.restore(blob, all_exact, saved);
    });
    CHECK(saved == lora_scales{0.5f});
    consumer taker(engine.submit(prompt, 1, with_lora(saved)));
    taker.rest();
    CHECK(taker.usage().cached_tokens == 39);
}
