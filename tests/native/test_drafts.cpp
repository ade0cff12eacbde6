// Guessed tokens: what prompt_lookup finds, and that a text of which several tokens were guessed
// and evaluated in one step has the tokens, rows and cache of one generated token by token.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <new>
#include <random>

#include "llama/token_states.h"
#include "sched/prompt_lookup.h"
#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

// A text that repeats a phrase of 9 tokens, and parts from it once in a while.
token_id phrase(std::span<const token_id> tokens) {
    const auto n = tokens.size();
    return n % 31 == 30 ? hash_of(tokens) : static_cast<token_id>(100 + n % 9);
}

fake_options repeating(int n_slots = 1) {
    fake_options options;
    options.n_slots = n_slots;
    options.n_chunk = 64;
    options.n_ctx = 1024;
    options.next = phrase;
    return options;
}

ids expected(ids text, int n, const std::function<token_id(std::span<const token_id>)>& next) {
    const auto n_prompt = text.size();
    for (int i = 0; i < n; ++i) text.push_back(next(text));
    return {text.begin() + static_cast<std::ptrdiff_t>(n_prompt), text.end()};
}

std::function<void(request&)> guessing(int n_draft_max, bool captures = false) {
    return [=](request& r) {
        r.n_draft_max = n_draft_max;
        r.run_ahead = 64;
        if (captures) r.capture = make_plan();
    };
}

ids guess_of(prompt_lookup& lookup, const ids& text, std::size_t n_most) {
    const ids before(text.begin(), text.end() - 1);
    const auto guess = lookup.guess(before, text.back(), n_most);
    return {guess.begin(), guess.end()};
}

}  // namespace

TEST_CASE("prompt_lookup: what followed the same tokens before is guessed") {
    prompt_lookup lookup;
    CHECK(guess_of(lookup, {1, 2, 3, 4, 5, 6, 7, 2, 3}, 4) == ids{4, 5, 6, 7});
    // The text goes on as it was guessed: the next guess goes on too.
    CHECK(guess_of(lookup, {1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5}, 2) == ids{6, 7});
    CHECK(guess_of(lookup, {1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 9}, 4).empty());
}

TEST_CASE("prompt_lookup: the longest match wins, of equals the last") {
    prompt_lookup lookup;
    CHECK(guess_of(lookup, {7, 8, 9, 50, 1, 8, 9, 60, 2, 8, 9, 70, 7, 8, 9}, 1) == ids{50});
    lookup.restart({}, {});
    CHECK(guess_of(lookup, {1, 8, 9, 60, 2, 8, 9, 70, 3, 8, 9}, 1) == ids{70});
}

TEST_CASE("prompt_lookup: a repetition goes on beyond its end") {
    prompt_lookup lookup;
    CHECK(guess_of(lookup, {1, 2, 3, 1, 2, 3, 1, 2}, 4) == ids{3, 1, 2, 3});
    lookup.restart({}, {});
    CHECK(guess_of(lookup, {5, 5, 5}, 4) == ids{5, 5, 5, 5});
}

TEST_CASE(
    "prompt_lookup: what is expected of a guess is what came true of those after as long a match") {
    prompt_lookup lookup;
    ids text;
    for (int i = 0; i < 100; ++i) text.push_back(1 + i % 10);
    CHECK(guess_of(lookup, text, 100).size() == 100);  // after more than 32 tokens
    const double before = lookup.n_expected(8);
    CHECK(before > 2);
    lookup.note(8, 8);
    CHECK(lookup.n_expected(8) > before);
    for (int i = 0; i < 40; ++i) lookup.note(8, 0);
    CHECK(lookup.n_expected(8) < 0.3);
    text = text + ids{77, 3, 4};  // after two tokens: nothing is known of those
    CHECK(guess_of(lookup, text, 8).size() == 8);
    CHECK(lookup.n_expected(8) > 2);
}

TEST_CASE("prompt_lookup: a guess that was not evaluated is judged by the next token") {
    prompt_lookup lookup;
    ids text{1, 2, 3, 1, 2};
    CHECK(guess_of(lookup, text, 1) == ids{3});
    const double before = lookup.n_expected(1);
    text.push_back(9);  // not 3
    CHECK(guess_of(lookup, text, 1).empty());
    CHECK(guess_of(lookup, text = text + ids{1, 2}, 1) == ids{9});
    CHECK(lookup.n_expected(1) < before);
}

TEST_CASE("prompt_lookup: a prediction follows the prompt, and is no part of the text") {
    prompt_lookup lookup;
    const ids prompt{1, 2, 3}, prediction{7, 8, 9, 10};
    lookup.restart(prompt, prediction);
    CHECK(guess_of(lookup, prompt, 8) == prediction);
    CHECK(guess_of(lookup, prompt + ids{7, 8}, 8) == ids{9, 10});
    CHECK(guess_of(lookup, prompt + ids{7, 8, 50, 8, 9}, 8) == ids{10});
    CHECK(guess_of(lookup, prompt + ids{7, 8, 50, 8, 9, 10}, 8).empty());
    CHECK(guess_of(lookup, {5, 7, 8}, 8) == ids{9, 10});  // the text was changed
}

TEST_CASE("prompt_lookup: a text that was changed is read again") {
    prompt_lookup lookup;
    CHECK(guess_of(lookup, {1, 2, 3, 4, 1, 2}, 1) == ids{3});
    CHECK(guess_of(lookup, {9, 8, 7, 9, 8}, 1) == ids{7});
    CHECK(guess_of(lookup, {1, 2}, 1).empty());
}

TEST_CASE("drafts: a text that repeats has the same tokens in fewer steps") {
    for (const bool captures : {false, true}) {
        CAPTURE(captures);
        test_engine engine(repeating());
        const auto prompt = make_prompt(1, 20);
        consumer taker(engine.submit(prompt, 200, guessing(16, captures)));
        ids said;
        while (auto token = taker.next()) {
            said.push_back(token->id);
            if (captures) {
                CHECK(is_row_of(*token));
                CHECK(token->rows.layout.n_columns ==
                      static_cast<int>(prompt.size() + said.size()) - 1);
            }
        }
        CHECK(said == expected(prompt, 200, phrase));
        CHECK(taker.reason() == finish_reason::length);
        const auto usage = taker.usage();
        CHECK(usage.completion_tokens == 200);
        CHECK(usage.accepted_tokens > 100);
        CHECK(usage.draft_tokens > usage.accepted_tokens);
        CHECK(engine.model->decodes().size() < 100);  // half of the steps
        auto held = prompt + said;
        held.pop_back();
        CHECK(engine.sched->tokens_of(0) == held);
        engine.pass_round();  // guesses behind the last token are dropped after its end is told
        CHECK(engine.model->cache(0) == held);
    }
}

TEST_CASE("drafts: a text that never repeats costs as good as nothing") {
    auto options = repeating();
    options.next = hash_of;
    test_engine engine(options);
    // The prompt repeats two tokens with something else behind them each time.
    ids prompt;
    for (token_id i = 0; i < 40; ++i) prompt = prompt + ids{5, 6, 1000 + i};
    consumer taker(engine.submit(prompt, 300, guessing(16)));
    CHECK(taker.rest() == expected(prompt, 300, hash_of));
    CHECK(taker.usage().accepted_tokens == 0);
    CHECK(taker.usage().draft_tokens < 20);
}

TEST_CASE("drafts: an end within what came true ends the text there") {
    auto options = repeating();
    const auto next = [](std::span<const token_id> tokens) {
        return tokens.size() == 133 ? end_token : static_cast<token_id>(100 + tokens.size() % 9);
    };
    options.next = next;
    test_engine engine(options);
    const auto prompt = make_prompt(1, 20);
    consumer taker(engine.submit(prompt, 200, guessing(16)));
    const auto said = taker.rest();
    CHECK(said == first_of(expected(prompt, 113, next), 113));
    CHECK(taker.reason() == finish_reason::stop);
    CHECK(engine.sched->tokens_of(0) == prompt + said);
    engine.pass_round();
    CHECK(engine.model->cache(0) == prompt + said);
    // A stop token does too.
    consumer other(engine.submit(prompt, 200, [](request& r) {
        guessing(16)(r);
        r.stop_tokens = {104};
    }));
    const auto stopped = other.rest();
    CHECK(std::ranges::count(stopped, 104) == 0);
    CHECK(other.reason() == finish_reason::stop_token);
}

TEST_CASE("drafts: neither max_tokens nor the slot's end is passed") {
    for (const int max_tokens : {1, 2, 3, 17, 64, 1000}) {
        CAPTURE(max_tokens);
        auto options = repeating();
        options.n_ctx = 160;
        test_engine engine(options);
        const auto prompt = make_prompt(1, 20);
        consumer taker(engine.submit(prompt, max_tokens, guessing(62)));
        const int n = std::min(max_tokens, 160 + 1 - 20);
        CHECK(taker.rest() == expected(prompt, n, phrase));
        CHECK(taker.reason() == finish_reason::length);
    }
}

TEST_CASE("drafts: a consumer that is behind has no more tokens computed than it allows") {
    for (const int run_ahead : {0, 1, 4}) {
        CAPTURE(run_ahead);
        test_engine engine(repeating());
        const auto prompt = make_prompt(1, 20);
        const auto wanted = engine.submit(prompt, 200, [=](request& r) {
            r.n_draft_max = 16;
            r.run_ahead = run_ahead;
        });
        consumer taker(wanted);
        const auto said = taker.take(60);
        engine.pass_round();
        CHECK(engine.sched->tokens_of(0).size() <=
              prompt.size() + 60 + 2 * static_cast<std::size_t>(run_ahead) + 1);
        engine.cancel(wanted);
        auto held = prompt + said;
        held.pop_back();
        CHECK(engine.sched->tokens_of(0) == held);
        CHECK(engine.model->cache(0) == held);
        CHECK(said == expected(prompt, 60, phrase));
    }
}

TEST_CASE("drafts: a pool without room for their rows leaves the token alone") {
    test_engine engine(repeating(), 4096);
    const auto prompt = make_prompt(1, 20);
    consumer taker(engine.submit(prompt, 120, guessing(16, true)));
    ids said;
    while (auto token = taker.next()) {
        CHECK(is_row_of(*token));
        said.push_back(token->id);
    }
    CHECK(said == expected(prompt, 120, phrase));
}

TEST_CASE("drafts: texts of several slots guess in the same steps") {
    for (const bool captures : {false, true}) {
        CAPTURE(captures);
        test_engine engine(repeating(3));
        engine.model->allow(0);
        std::vector<ids> prompts{make_prompt(1, 20), make_prompt(2, 20), make_prompt(3, 20)};
        std::vector<consumer> takers;
        for (const auto& prompt : prompts)
            takers.emplace_back(engine.submit(prompt, 100, guessing(16, captures)));
        REQUIRE(engine.model->wait_held());
        engine.model->allow_all();
        for (std::size_t i = 0; i < 3; ++i) {
            ids said;
            while (auto token = takers[i].next()) {
                if (captures) CHECK(is_row_of(*token));
                said.push_back(token->id);
            }
            CHECK(said == expected(prompts[i], 100, phrase));
            CHECK(takers[i].usage().accepted_tokens > 50);
        }
        std::size_t n_widest = 0;
        for (const auto& step : engine.model->decodes()) {
            const bool is_prompt = step.front().position < 20;
            if (!is_prompt && step.front().slot != step.back().slot)
                n_widest = std::max(n_widest, step.size());
        }
        CHECK(n_widest >= 12);
        CHECK(engine.model->decodes().size() < 120);
    }
}

TEST_CASE("drafts: a text of which nothing is guessed is not held up for long") {
    test_engine engine(repeating(2));
    engine.model->allow(0);
    const auto prompt = make_prompt(1, 20), other = make_prompt(2, 20);
    consumer quick(engine.submit(prompt, 100, guessing(16)));
    consumer plain(engine.submit(other, 100, guessing(0)));
    REQUIRE(engine.model->wait_held());
    engine.model->allow_all();
    CHECK(plain.rest() == expected(other, 100, phrase));
    CHECK(quick.rest() == expected(prompt, 100, phrase));
    CHECK(plain.usage().draft_tokens == 0);
    for (const auto& step : engine.model->decodes()) {
        // 1.5 times the time of a step of 2 tokens, of which each takes an eighth of a step.
        if (step.front().position >= 20 && step.front().slot != step.back().slot)
            CHECK(step.size() <= 6);
    }
}

TEST_CASE(
    "drafts: pickers that take long, and consumers that decide, get one token after the other") {
    class slow_picker final : public fake_picker {
    public:
        using fake_picker::fake_picker;
        bool is_slow() const override { return true; }
    };
    for (const bool is_steered : {false, true}) {
        CAPTURE(is_steered);
        test_engine engine(repeating());
        const auto prompt = make_prompt(1, 20);
        const auto wanted = engine.submit(prompt, 200, [&](request& r) {
            guessing(16, true)(r);
            r.is_steered = is_steered;
            if (!is_steered) r.picker = std::make_unique<slow_picker>(engine.model);
        });
        consumer taker(wanted);
        ids said;
        for (;;) {
            const auto item = taker.take_item();
            if (!item.token && !item.forward) break;
            if (item.token) {
                CHECK(is_row_of(*item.token));
                said.push_back(item.token->id);
                continue;
            }
            CHECK(item.forward->pass->known().n_tokens ==
                  static_cast<int>(prompt.size() + said.size()));
            said.push_back(item.forward->pass->pick(*wanted, {}, {}).id);
            CHECK(item.forward->rows.layout.n_columns ==
                  static_cast<int>(prompt.size() + said.size()) - 1);
            engine.sched->answer(wanted, *item.forward->pass, {0, {said.back()}, {}});
        }
        CHECK(said == expected(prompt, 200, phrase));
        CHECK(taker.usage().accepted_tokens > 100);
        CHECK(engine.model->decodes().size() < 100);
        engine.pass_round();
        CHECK(engine.model->cache(0) == engine.sched->tokens_of(0));
    }
}

TEST_CASE("drafts: what a consumer forces or takes back leaves no guess in the slot") {
    test_engine engine(repeating());
    const auto prompt = make_prompt(1, 20);
    const auto wanted = engine.submit(prompt, 200, [](request& r) {
        guessing(16)(r);
        r.is_steered = true;
    });
    consumer taker(wanted);
    std::mt19937 random(3);
    ids text = prompt;
    for (int i = 0; i < 180; ++i) {
        const auto item = taker.take_item();
        REQUIRE(item.forward);
        CHECK(item.forward->pass->pick(*wanted, {}, {}).id == phrase(text));
        const auto n_generated = text.size() - prompt.size();
        const auto n_removed = random() % 25 == 0 ? random() % (1 + n_generated / 4) : 0;
        ids added{phrase(text)};
        if (n_removed > 0) added = {};
        if (random() % 29 == 0) added = added + ids{static_cast<token_id>(900 + i)};
        engine.sched->answer(wanted, *item.forward->pass, {static_cast<int>(n_removed), added, {}});
        text.resize(text.size() - n_removed);
        text = text + added;
    }
    engine.cancel(wanted);
    const auto held = engine.sched->tokens_of(0);
    CHECK(engine.model->cache(0) == held);
    CHECK(held == first_of(text, held.size()));
    CHECK(engine.sched->counters().n_accepted_tokens > 20);
}

TEST_CASE("drafts: what rounding decides is evaluated alone, and counted") {
    for (const int which : {0, 1, 2}) {
        CAPTURE(which);
        auto options = repeating(2);
        options.is_tied = [](token_id id) { return id == 104; };
        test_engine engine(options);
        engine.model->allow(0);
        const std::vector<ids> prompts{make_prompt(1, 20), make_prompt(2, 20)};
        const auto adjust = [&](request& r) {
            guessing(16, true)(r);
            r.is_steered = which == 2;
        };
        const auto wanted = engine.submit(prompts[0], 90, adjust);
        consumer taker(wanted);
        consumer other(engine.submit(prompts[1], 90, guessing(which == 1 ? 0 : 16)));
        REQUIRE(engine.model->wait_held());
        engine.model->allow_all();
        ids said;
        for (;;) {
            const auto item = taker.take_item();
            if (item.token) {
                CHECK(is_row_of(*item.token));
                said.push_back(item.token->id);
            } else if (item.forward) {
                said.push_back(item.forward->pass->pick(*wanted, {}, {}).id);
                engine.sched->answer(wanted, *item.forward->pass, {0, {said.back()}, {}});
            } else {
                break;
            }
        }
        CHECK(said == expected(prompts[0], 90, phrase));
        CHECK(other.rest() == expected(prompts[1], 90, phrase));
        CHECK(engine.sched->counters().n_ties > 3);
        CHECK(taker.usage().accepted_tokens > 30);
        // The token before each 104 came last in a step of single tokens.
        std::vector<bool> is_single(120);
        for (const auto& step : engine.model->decodes()) {
            for (const auto& token : step) {
                const auto n_of_slot = std::ranges::count(step, token.slot, &step_token::slot);
                if (token.slot == 0 && token.position < 110)
                    is_single[static_cast<std::size_t>(token.position)] = n_of_slot == 1;
            }
        }
        for (std::size_t i = 1; i < said.size(); ++i) {
            if (said[i] == 104) CHECK(is_single[20 + i - 1]);
        }
    }
}

TEST_CASE("drafts: a failure among them ends the request alone, and leaves no unknown tokens") {
    for (int n_good = 1; n_good < 60; n_good += 7) {
        CAPTURE(n_good);
        auto options = repeating();
        int n_left = n_good;
        options.on_pick = [&](token_id) {
            if (n_left-- == 0) throw error(errc::decode, "a pick fails");
        };
        test_engine engine(options);
        const auto prompt = make_prompt(1, 20);
        consumer taker(engine.submit(prompt, 100, guessing(16)));
        CHECK(taker.rest() == expected(prompt, n_good, phrase));
        CHECK(taker.reason() == finish_reason::error);
        const auto held = engine.sched->tokens_of(0);
        CHECK(engine.model->cache(0) == held);
        CHECK(held == first_of(prompt + expected(prompt, n_good, phrase), held.size()));
        consumer again(engine.submit(prompt, 30, guessing(16)));
        CHECK(again.rest() == expected(prompt, 30, phrase));
    }
}

TEST_CASE("drafts: requests at random have the tokens of each alone") {
    for (const unsigned seed : {1u, 2u, 3u, 4u, 5u, 6u}) {
        CAPTURE(seed);
        std::mt19937 rng(seed);
        const auto below = [&](int n) {
            return static_cast<int>(rng() % static_cast<unsigned>(n));
        };
        test_engine engine(repeating(1 + below(3)));
        struct reader {
            ids prompt;
            consumer taker;
            ids taken{};
        };
        std::vector<std::unique_ptr<reader>> readers;
        for (token_id i = 0; i < 6; ++i) {
            const auto prompt = make_prompt(1 + below(3), 1 + below(40));
            const auto wanted = engine.submit(prompt, 80, [&](request& r) {
                r.n_draft_max = below(20);
                r.run_ahead = below(12);
                if (below(2) == 0) r.capture = make_plan();
            });
            readers.push_back(std::make_unique<reader>(reader{prompt, consumer(wanted)}));
        }
        while (!readers.empty()) {
            const auto i = static_cast<std::size_t>(below(static_cast<int>(readers.size())));
            auto& one = *readers[i];
            if (auto token = one.taker.next()) {
                one.taken.push_back(token->id);
                if (token->rows.block) CHECK(is_row_of(*token));
                continue;
            }
            CHECK(one.taken == expected(one.prompt, 80, phrase));
            readers.erase(readers.begin() + static_cast<std::ptrdiff_t>(i));
        }
    }
}

namespace {

// An engine of which another model guesses: it agrees with this one but for each 13th token.
fake_options agreeing(int n_slots) {
    auto options = repeating(n_slots);
    options.next = [](std::span<const token_id> tokens) {
        return tokens.size() % 13 == 12 ? token_id{5} : hash_of(tokens);
    };
    return options;
}

fake_options hashing(int n_slots) {
    auto options = repeating(n_slots);
    options.next = hash_of;
    return options;
}

struct guessed_engine : test_engine {
    explicit guessed_engine(int n_slots, fake_options smaller)
        : test_engine(hashing(n_slots), mib, 64, nullptr,
                      {std::chrono::milliseconds(0),
                       step_costs::seconds(-1),
                       {.budget_bytes = mib, .n_between = 0}},
                      std::make_shared<fake_model>(std::move(smaller))) {}
};

}  // namespace

TEST_CASE("drafts: a model that guesses leaves the text as it is") {
    for (const int n_slots : {1, 3}) {
        CAPTURE(n_slots);
        guessed_engine engine(n_slots, agreeing(n_slots));
        engine.model->allow(0);
        std::vector<ids> prompts;
        std::vector<consumer> takers;
        for (token_id i = 0; i < n_slots; ++i) {
            prompts.push_back(make_prompt(1 + i, 20));
            takers.emplace_back(engine.submit(prompts.back(), 150, guessing(16, true)));
        }
        REQUIRE(engine.model->wait_held());
        engine.model->allow_all();
        for (std::size_t i = 0; i < takers.size(); ++i) {
            ids said;
            while (auto token = takers[i].next()) {
                CHECK(is_row_of(*token));
                said.push_back(token->id);
            }
            CHECK(said == continuation(prompts[i], 150));
            CHECK(takers[i].usage().accepted_tokens > 75);
        }
        CHECK(engine.model->decodes().size() < 100);
    }
}

TEST_CASE("drafts: the cache of a model that guesses follows its slots") {
    guessed_engine engine(2, agreeing(2));
    std::mt19937 random(11);
    ids text = make_prompt(1, 100);
    for (int i = 0; i < 25; ++i) {
        // Goes on, parts from what the slot has, or is another one; in either slot.
        const auto n_kept = random() % 3 == 0 ? random() % text.size() : text.size();
        text.resize(1 + n_kept % 700);
        text =
            text + make_prompt(static_cast<token_id>(50 + i), 1 + static_cast<int>(random() % 9));
        consumer taker(engine.submit(text, 40, [&](request& r) {
            guessing(16)(r);
            r.wanted_slot = static_cast<slot_id>(random() % 2);
        }));
        const auto said = random() % 4 == 0 ? taker.take(9) : taker.rest();
        CHECK(said == continuation(text, static_cast<int>(said.size())));
        text = text + said;
    }
    CHECK(engine.sched->counters().n_accepted_tokens > 300);
    CHECK_FALSE(engine.draft->copies().empty());
}

TEST_CASE("drafts: a model that guesses and fails guesses nothing from then on") {
    auto smaller = agreeing(1);
    int n_left = 20;
    smaller.on_decode = [&](auto) {
        if (n_left-- == 0) throw error(errc::decode, "the draft model fails");
    };
    guessed_engine engine(1, smaller);
    const auto prompt = make_prompt(1, 20);
    consumer taker(engine.submit(prompt, 150, guessing(16)));
    CHECK(taker.rest() == continuation(prompt, 150));
    const auto n = engine.draft->decodes().size();
    CHECK(n == 21);
    consumer again(engine.submit(prompt, 150, guessing(16)));
    CHECK(again.rest() == continuation(prompt, 150));
    CHECK(engine.draft->decodes().size() == n);
}

TEST_CASE("drafts: a model whose guesses are wrong is hardly asked any more") {
    auto smaller = hashing(1);
    smaller.next = [](auto) { return token_id{5}; };
    guessed_engine engine(1, smaller);
    const auto prompt = make_prompt(1, 20);
    consumer taker(engine.submit(prompt, 400, guessing(16)));
    CHECK(taker.rest() == continuation(prompt, 400));
    CHECK(taker.usage().accepted_tokens == 0);
    CHECK(taker.usage().draft_tokens < 40);
}

TEST_CASE("token_states: those of a slot's last tokens are known, without a gap") {
    token_states states(2, 2, 4);
    const auto put = [&](slot_id slot, std::size_t position) {
        const std::array values{static_cast<float>(position), static_cast<float>(slot)};
        states.put(slot, position, values.data());
    };
    const auto knows = [&](slot_id slot, std::size_t position) {
        const float* const found = states.before(slot, position);
        const bool is_own = found[1] == static_cast<float>(slot);
        return is_own && found[0] == static_cast<float>(position) - 1;
    };
    CHECK(states.n_before(1, 9) == 9);
    for (std::size_t i = 2; i < 5; ++i) put(1, i);
    CHECK(states.n_before(1, 9) == 2);
    CHECK(states.n_before(0, 9) == 9);
    CHECK_FALSE(knows(1, 2));
    CHECK((knows(1, 3) && knows(1, 4) && knows(1, 5)));
    CHECK_FALSE(knows(1, 6));
    put(1, 5);
    put(1, 6);  // the first one gives way
    CHECK(states.n_before(1, 9) == 3);
    CHECK((knows(1, 4) && knows(1, 7)));
    put(1, 4);  // another token there: those behind it are of another text
    CHECK(states.n_before(1, 9) == 3);
    CHECK((knows(1, 4) && knows(1, 5)));
    CHECK_FALSE(knows(1, 6));
    put(1, 8);  // nothing is known of the token before
    CHECK(states.n_before(1, 9) == 8);
    states.keep(1, 8);
    CHECK(states.n_before(1, 8) == 8);
    CHECK_FALSE(knows(1, 9));
}

TEST_CASE(
    "drafts: a model that guesses from states sees a prompt as it comes, and no guess twice") {
    auto smaller = agreeing(1);
    smaller.needs_states = true;
    guessed_engine engine(1, smaller);
    const auto prompt = make_prompt(1, 200);
    consumer taker(engine.submit(prompt, 150, guessing(16)));
    CHECK(taker.rest() == continuation(prompt, 150));
    CHECK(taker.usage().accepted_tokens > 75);
    const auto steps = engine.draft->decodes();
    CHECK(steps.at(0).size() == 64);
    CHECK(steps.at(2).size() == 64);
    // What it made of a guess gave way before the next step.
    std::size_t n_more = 0;
    for (std::size_t i = 4; i < steps.size(); ++i) n_more += steps[i].size();
    CHECK(n_more > 150 + 60);
    consumer silent(engine.submit(make_prompt(9, 200), 5, [](request&) {}));
    const auto n = engine.draft->decodes().size();
    silent.rest();
    CHECK(engine.draft->decodes().size() == n);
}

TEST_CASE("drafts: of several layers that predict, each makes one guess and has seen the text") {
    for (const int n_slots : {1, 3}) {
        CAPTURE(n_slots);
        auto smaller = agreeing(n_slots);
        smaller.needs_states = true;
        smaller.n_predicting = 3;
        guessed_engine engine(n_slots, smaller);
        engine.model->allow(0);
        std::vector<ids> prompts;
        std::vector<consumer> takers;
        for (token_id i = 0; i < n_slots; ++i) {
            prompts.push_back(make_prompt(1 + i, 150));
            takers.emplace_back(engine.submit(prompts.back(), 150, guessing(16)));
        }
        REQUIRE(engine.model->wait_held());
        engine.model->allow_all();
        for (std::size_t i = 0; i < takers.size(); ++i) {
            CHECK(takers[i].rest() == continuation(prompts[i], 150));
            CHECK(takers[i].usage().accepted_tokens > 75);
            CHECK(takers[i].usage().draft_tokens < 150);
        }
        std::size_t n_longest = 0;  // the third layer takes a last token and two guesses
        for (const auto& step : engine.draft->decodes()) {
            if (step.front().wants_logits) n_longest = std::max(n_longest, step.size());
        }
        CHECK(n_longest == 3 * static_cast<std::size_t>(n_slots));
    }
}

TEST_CASE("drafts: without memory to see a prompt, a model that guesses holds up nothing") {
    auto smaller = agreeing(1);
    smaller.needs_states = true;
    int n_failures = 2;
    smaller.on_decode = [&](auto) {
        if (n_failures-- > 0) throw std::bad_alloc();
    };
    guessed_engine engine(1, smaller);
    const auto prompt = make_prompt(1, 200);
    consumer taker(engine.submit(prompt, 150, guessing(16)));
    CHECK(taker.rest() == continuation(prompt, 150));
    CHECK(n_failures < 0);
    CHECK(taker.usage().accepted_tokens > 75);
}

TEST_CASE("drafts: guesses that have long come true go on") {
    hit_rate rate;
    for (int i = 0; i < 400; ++i) rate.note(16, 16);
    CHECK(rate.n_expected(8) > 7);
    CHECK(rate.n_expected(8) < 8);
}

TEST_CASE("drafts: a model that nothing is known of is tried, and again after a while") {
    hit_rate rate;
    CHECK(rate.is_untried());
    for (int i = 0; i < 3; ++i) rate.note(1, 0);
    CHECK_FALSE(rate.is_untried());
    for (int i = 0; i < 127; ++i) rate.fade();
    CHECK_FALSE(rate.is_untried());
    rate.fade();
    CHECK(rate.is_untried());
    rate.note(1, 1);
    CHECK_FALSE(rate.is_untried());
}
