// Guessed tokens: what prompt_lookup finds, and that a text of which several tokens were guessed and
// evaluated in one step has the tokens, rows and cache of one that was generated token by token.
#include <doctest/doctest.h>

#include <random>

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
    lookup.forget();
    CHECK(guess_of(lookup, {1, 8, 9, 60, 2, 8, 9, 70, 3, 8, 9}, 1) == ids{70});
}

TEST_CASE("prompt_lookup: a repetition goes on beyond its end") {
    prompt_lookup lookup;
    CHECK(guess_of(lookup, {1, 2, 3, 1, 2, 3, 1, 2}, 4) == ids{3, 1, 2, 3});
    lookup.forget();
    CHECK(guess_of(lookup, {5, 5, 5}, 4) == ids{5, 5, 5, 5});
}

TEST_CASE("prompt_lookup: guesses grow while they come true and stop when they do not") {
    prompt_lookup lookup;
    ids text;
    for (int i = 0; i < 100; ++i) text.push_back(1 + i % 10);
    CHECK(guess_of(lookup, text, 100).size() == 4);
    lookup.note(4, 4);
    text.push_back(1);
    CHECK(guess_of(lookup, text, 100).size() == 8);
    lookup.note(8, 2);
    text.push_back(2);
    CHECK(guess_of(lookup, text, 100).size() == 3);
    std::size_t n_guesses = 0;
    for (int i = 0; i < 400; ++i) {
        text.push_back(3 + i % 2);
        const auto n = guess_of(lookup, text, 100).size();
        if (n > 0) ++n_guesses, lookup.note(n, 0);
    }
    CHECK(n_guesses <= 13);
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

TEST_CASE("drafts: texts of several slots share their steps instead") {
    test_engine engine(repeating(2));
    engine.model->allow(0);
    std::vector<ids> prompts{make_prompt(1, 20), make_prompt(2, 20)};
    std::vector<consumer> takers;
    for (const auto& prompt : prompts)
        takers.emplace_back(engine.submit(prompt, 100, guessing(16)));
    REQUIRE(engine.model->wait_held());
    engine.model->allow_all();
    for (std::size_t i = 0; i < 2; ++i)
        CHECK(takers[i].rest() == expected(prompts[i], 100, phrase));
    for (const auto& step : engine.model->decodes()) {
        CHECK((step.size() <= 2 || step.front().position < 20 ||
               step.front().slot == step.back().slot));
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
