// scheduler: requests of several owners. Slots and steps are shared between owners, however many
// requests each has and whether or not its consumers keep up.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

class slow_picker final : public token_picker {
public:
    picked_token pick(float* logits) override {
        return {static_cast<token_id>(*logits), -0.5f, {}};
    }
    picked_token propose(std::span<const float>, std::optional<float>) override { return {}; }
    void revise(std::size_t, std::span<const token_id>) override {}
    bool is_slow() const override { return true; }
};

std::function<void(request&)> of(const std::string& owner, int run_ahead = 1000) {
    return [=](request& r) {
        r.owner = owner;
        r.run_ahead = run_ahead;
    };
}

// The first ids of the prompts, in the order in which they were begun.
ids order_of(const fake_model& model) {
    ids order;
    for (const auto& batch : model.decodes()) {
        if (batch.size() > 1) order.push_back(batch[0].id / 1000);
    }
    return order;
}

// Begins one request for each prompt and lets some steps pass; the next one is held.
std::vector<std::shared_ptr<request>> begin(test_engine& engine, int n_steps,
                                            const std::vector<ids>& prompts, int max_tokens,
                                            const std::function<void(request&)>& adjust) {
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> all;
    for (const auto& prompt : prompts) all.push_back(engine.submit(prompt, max_tokens, adjust));
    engine.model->allow(n_steps);
    engine.model->wait_decodes(static_cast<std::size_t>(n_steps));
    REQUIRE(engine.model->wait_held());
    return all;
}

// Lets the held engine go on; how many steps pass until a consumer that waits has `n` tokens.
std::size_t steps_until(test_engine& engine, const ids& prompt, int n, const std::string& owner) {
    const auto wanted = engine.submit(prompt, n, of(owner));
    consumer taker(wanted);
    (void)wanted->box->arm(taker.waiter());
    const auto n_before = engine.model->decodes().size();
    engine.model->allow_all();
    const auto whole = continuation(prompt, n);
    CHECK(taker.rest() == whole);
    const auto decodes = engine.model->decodes();
    const auto last = std::find_if(decodes.begin(), decodes.end(), [&](const auto& batch) {
        return std::any_of(batch.begin(), batch.end(), [&](const step_token& one) {
            return one.id == whole[whole.size() - 2];
        });
    });
    return static_cast<std::size_t>(last - decodes.begin()) - n_before;
}

}  // namespace

TEST_CASE("owners: a free slot goes to the owner that holds fewest, then to who waited for one") {
    for (const int n_slots : {1, 2}) {
        CAPTURE(n_slots);
        test_engine engine({.n_slots = n_slots});
        engine.model->allow(0);
        std::vector<std::shared_ptr<request>> all;
        const auto add = [&](token_id first, const std::string& owner) {
            all.push_back(engine.submit(make_prompt(first, 3), 1, of(owner)));
        };
        add(1, "a");
        REQUIRE(engine.model->wait_held());
        for (token_id i = 2; i <= 5; ++i) add(i, "a");
        add(11, "b");
        add(12, "b");
        add(21, "c");
        engine.model->allow_all();
        for (const auto& one : all) CHECK(consumer(one).rest().size() == 1);
        if (n_slots == 1) {
            CHECK(order_of(*engine.model) == ids{1, 11, 21, 2, 12, 3, 4, 5});
        } else {
            // The first step has a prompt of the first owner alone.
            CHECK(first_of(order_of(*engine.model), 3) == ids{1, 11, 21});
        }
        CHECK(engine.sched->counters().n_parkings == 0);
    }
}

TEST_CASE("owners: priority goes before turns") {
    test_engine engine;
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> all{engine.submit(make_prompt(1, 3), 1, of("a"))};
    REQUIRE(engine.model->wait_held());
    all.push_back(engine.submit(make_prompt(11, 3), 1, of("b")));
    all.push_back(engine.submit(make_prompt(2, 3), 1, [](request& r) {
        r.owner = "a";
        r.priority = 1;
    }));
    engine.model->allow_all();
    for (const auto& one : all) consumer(one).rest();
    CHECK(order_of(*engine.model) == ids{1, 2, 11});
}

TEST_CASE("owners: the queue is full for the owner alone that filled it") {
    test_engine engine({}, mib, 2);
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> all;
    const auto add = [&](const std::string& owner) {
        all.push_back(engine.submit(make_prompt(1, 3), 1, of(owner)));
    };
    add("a");
    REQUIRE(engine.model->wait_held());
    add("a");
    add("a");
    CHECK_THROWS_AS(add("a"), error);
    add("b");
    add("b");
    CHECK_THROWS_AS(add("b"), error);
    engine.model->allow_all();
    for (const auto& one : all) CHECK(consumer(one).rest().size() == 1);
}

TEST_CASE("owners: who holds none gets one of several at once, and the text goes on later") {
    enum class kind { text, slow_text, rows, prompt };
    for (const auto which : {kind::text, kind::slow_text, kind::rows, kind::prompt}) {
        CAPTURE(static_cast<int>(which));
        test_engine engine({.n_slots = 2, .n_ctx = 2048});
        const int n_prompt = which == kind::prompt ? 1000 : 5;
        const int n_tokens = which == kind::prompt ? 1 : 300;
        std::vector<ids> prompts;
        for (token_id i = 1; i <= 6; ++i) prompts.push_back(make_prompt(3 * i, n_prompt));
        const auto greedy = begin(engine, 40, prompts, n_tokens, [&](request& r) {
            of("a")(r);
            if (which == kind::rows) r.run_ahead = 100, r.capture = make_plan();
            if (which == kind::slow_text) r.picker = std::make_unique<slow_picker>();
        });
        // Two for the prompt and four for the tokens, one between two of them for the others, and
        // what began before the request came.
        CHECK(steps_until(engine, make_prompt(90, 9), 4, "b") <= 14);
        CHECK(engine.sched->counters().n_parkings >= 1);
        for (std::size_t i = 0; i < greedy.size(); ++i) {
            consumer taker(greedy[i]);
            CHECK(taker.rest() == continuation(prompts[i], n_tokens));
            CHECK(taker.reason() == finish_reason::length);
        }
    }
}

TEST_CASE("owners: a text whose tokens were discarded gives way to another owner's") {
    test_engine engine({.n_slots = 2, .n_ctx = 24});
    const auto greedy =
        begin(engine, 100, {make_prompt(1, 20), make_prompt(2, 20)}, 604, [](request& r) {
            of("a")(r);
            r.n_discard = 8;
        });
    CHECK(steps_until(engine, make_prompt(90, 9), 4, "b") <= 14);
    CHECK(engine.sched->counters().n_parkings == 1);
    for (const auto& one : greedy) {
        consumer taker(one);
        int n_tokens = 0, n_discarded = 0;
        while (const auto token = taker.next()) {
            ++n_tokens;
            CHECK(token->n_discarded >= n_discarded);
            n_discarded = token->n_discarded;
        }
        CHECK(n_tokens == 604);
        CHECK(n_discarded == 600);
    }
}

TEST_CASE("owners: two take turns in one slot and each gets its own tokens") {
    test_engine engine;
    std::vector<consumer> takers;
    std::vector<ids> prompts{make_prompt(1, 9), make_prompt(2, 9)};
    takers.emplace_back(engine.submit(prompts[0], 200, of("a", 2)));
    takers.emplace_back(engine.submit(prompts[1], 200, of("b", 2)));
    std::vector<ids> taken(2);
    for (int round = 0; round < 200; ++round) {
        for (std::size_t i = 0; i < 2; ++i) taken[i].push_back(takers[i].next().value().id);
    }
    for (std::size_t i = 0; i < 2; ++i) CHECK(taken[i] == continuation(prompts[i], 200));
    CHECK(engine.sched->counters().n_parkings > 2);
}

TEST_CASE("owners: with a slot each nobody gives way, however many wait") {
    test_engine engine({.n_slots = 2});
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> all;
    for (token_id i = 1; i <= 8; ++i) {
        all.push_back(engine.submit(make_prompt(i, 5), 30, of(i % 2 ? "a" : "b")));
    }
    std::vector<consumer> takers(all.begin(), all.end());
    for (std::size_t i = 0; i < all.size(); ++i) (void)all[i]->box->arm(takers[i].waiter());
    engine.model->allow_all();
    for (auto& taker : takers) CHECK(taker.rest().size() == 30);
    CHECK(engine.sched->counters().n_parkings == 0);
}

TEST_CASE("owners: rows that one does not take leave the pool to another") {
    constexpr std::size_t block_bytes = 4096;
    test_engine engine({.n_ctx = 64}, 12 * block_bytes);
    std::vector<std::shared_ptr<request>> greedy;
    const auto captures = [](const std::string& owner) {
        return [=](request& r) {
            of(owner, 2)(r);
            r.capture = make_plan();
        };
    };
    const auto add = [&] {
        const auto first = static_cast<token_id>(greedy.size()) + 1;
        greedy.push_back(engine.submit(make_prompt(first, 5), 20, captures("a")));
        return greedy.back();
    };
    for (int i = 0; i < 5; ++i) consumer(add()).take(1);
    REQUIRE(engine.sched->n_parked() == 4);  // with the rows of two tokens each
    const auto waiting = add();
    const auto waiter = std::make_shared<wake_handle>();
    (void)waiting->box->arm(waiter);
    engine.pass_round();
    CHECK(waiting->slot == -1);
    const auto prompt = make_prompt(50, 5);
    CHECK(consumer(engine.submit(prompt, 3, captures("b"))).rest() == continuation(prompt, 3));
    for (const auto& one : greedy) engine.cancel(one);
}

TEST_CASE("owners: a prompt lets another owner's go on, and its text as long as a step took") {
    fake_options options{.n_slots = 3, .n_ctx = 2048};
    options.on_decode = [](std::span<const step_token> tokens) {
        std::this_thread::sleep_for(std::chrono::milliseconds(tokens.size() > 3 ? 20 : 1));
    };
    test_engine engine(options);
    const auto text = engine.submit(make_prompt(1, 2), 1000, of("b"));
    consumer(text).take(1);
    const auto prompt = engine.submit(make_prompt(2, 500), 1, of("a"));
    const auto n_before = engine.model->decodes().size();
    engine.model->wait_decodes(n_before + 60);
    engine.cancel(text);
    engine.cancel(prompt);
    int n_chunks = 0, n_texts = 0;
    const auto decodes = engine.model->decodes();
    for (auto i = n_before; i < decodes.size(); ++i) ++(decodes[i].size() > 3 ? n_chunks : n_texts);
    CHECK(n_chunks > 1);
    CHECK(n_texts > 3 * n_chunks);
}
