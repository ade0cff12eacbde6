// scheduler, one slot: how a request runs and ends, what is reused, who is next; rows and
// embeddings of a prompt. Cancellation, close and errors: test_scheduler_ends.cpp. Memory:
// test_scheduler_memory.cpp. Several slots: test_slot_table.cpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

constexpr std::size_t row_bytes(int n_prompt) { return static_cast<std::size_t>(n_prompt) * 4; }

std::function<void(request&)> attends(int n_rows) {
    return [n_rows](request& r) {
        r.capture = make_plan();
        r.n_prompt_rows = n_rows;
        r.only_attends = true;
    };
}

// (start, n_rows) of every block; drops each one as it comes.
std::vector<std::pair<int, int>> blocks_of(consumer& taker) {
    std::vector<std::pair<int, int>> found;
    while (const auto rows = taker.next_prompt()) found.emplace_back(rows->start, rows->n_rows);
    return found;
}

using blocks = std::vector<std::pair<int, int>>;

void embeds(request& r) {
    r.only_attends = true;
    r.embeds = true;
}

// What the fake model gives of a text whose last step has `n_tokens`.
std::vector<float> embedding_of(const ids& text, int n_tokens) {
    return {static_cast<float>(hash_of(text)), static_cast<float>(n_tokens)};
}

// Scores of the last n tokens.
std::function<void(request&)> scores(std::size_t n) {
    return [n](request& r) {
        r.only_attends = true;
        r.n_scores = n;
    };
}

// (position, rank) of every score.
std::vector<std::pair<int, int>> scores_of(consumer& taker) {
    std::vector<std::pair<int, int>> found;
    while (const auto some = taker.next_prompt()) {
        CHECK(some->n_rows == static_cast<int>(some->scores.size()));
        for (int i = 0; i < some->n_rows; ++i) {
            found.emplace_back(some->start + i, some->scores[static_cast<std::size_t>(i)].rank);
        }
    }
    return found;
}

// What the fake model gives for the last n tokens.
std::vector<std::pair<int, int>> expected_scores(const ids& text, std::size_t n) {
    std::vector<std::pair<int, int>> expected;
    for (auto i = text.size() - n; i < text.size(); ++i) {
        expected.emplace_back(i, hash_of(std::span(text).first(i)) - text[i]);
    }
    return expected;
}

// Takes the embedding and the end behind it.
prompt_event embedding_from(consumer& taker) {
    auto found = taker.next_prompt();
    REQUIRE(found);
    CHECK_FALSE(taker.next_prompt());
    return std::move(*found);
}

}  // namespace

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
    CHECK_FALSE(is_busy(*engine.sched, 0));

    const auto& counters = engine.sched->counters();
    CHECK(counters.n_requests == 1);
    CHECK(counters.n_prompt_tokens == 20);
    CHECK(counters.n_tokens == 6);
    CHECK(counters.n_decodes == 3 + 6);  // 19 tokens in chunks of 8, then one each
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
        // Two chunks of the prompt give no token; the last of its tokens gives the first one.
        const auto n = static_cast<std::size_t>(2 + run_ahead);
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
    CHECK(engine.settled_decodes(1) == 1);  // the prompt but for its last token
    CHECK(engine.model->cache(0) == first_of(prompt, 3));
    consumer taker(wanted);
    CHECK(taker.take(3) == continuation(prompt, 3));
    CHECK(engine.settled_decodes(4) == 4);
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

// ---- rows of the prompt, with and without tokens after it

TEST_CASE("scheduler: a request that only attends samples nothing and ends with its prompt") {
    test_engine engine;
    const auto prompt = make_prompt(1, 20);
    consumer taker(engine.submit(prompt, 1, attends(20)));
    CHECK(blocks_of(taker) == blocks{{0, 8}, {8, 8}, {16, 4}});
    CHECK(taker.reason() == finish_reason::stop);
    CHECK(taker.usage().completion_tokens == 0);
    for (const auto& batch : engine.model->decodes()) {
        for (const auto& token : batch) CHECK_FALSE(token.wants_logits);
    }
    CHECK(engine.sched->tokens_of(0) == prompt);
    CHECK(engine.sched->counters().n_prompt_tokens == 20);
    CHECK(engine.sched->counters().n_tokens == 0);
    CHECK(engine.sched->counters().n_attention_bytes == 20 * row_bytes(20));
}

TEST_CASE("scheduler: rows of the last tokens alone; what is before them may be cached") {
    test_engine engine;
    const auto prompt = make_prompt(1, 20);
    consumer first(engine.submit(prompt, 1, attends(6)));
    CHECK(blocks_of(first) == blocks{{14, 2}, {16, 4}});
    consumer second(engine.submit(prompt, 1, attends(6)));
    CHECK(blocks_of(second) == blocks{{14, 6}});
    CHECK(second.usage().cached_tokens == 14);
    consumer all(engine.submit(prompt, 1, attends(20)));
    CHECK(blocks_of(all) == blocks{{0, 8}, {8, 8}, {16, 4}});
    CHECK(all.usage().cached_tokens == 0);
}

TEST_CASE("scheduler: rows of the prompt come before the tokens, which are the same") {
    test_engine engine;
    const auto prompt = make_prompt(1, 20);
    consumer taker(engine.submit(prompt, 4, [](request& r) {
        r.capture = make_plan();
        r.n_prompt_rows = 20;
    }));
    int n_blocks = 0;
    for (int i = 0; i < 3; ++i) n_blocks += taker.next_prompt().has_value();
    CHECK(n_blocks == 3);
    CHECK(taker.rest() == continuation(prompt, 4));
    CHECK(taker.reason() == finish_reason::length);
}

TEST_CASE("scheduler: the last layer's states of a prompt come as many at a time as its logits") {
    test_engine engine({.n_outputs = 3});
    const auto with_states = [](request& r) {
        capture_options options;
        options.hidden = {2};
        r.capture = std::make_shared<const capture_plan>(
            options, capture_source{{{0, 1, 1, 0.125f}}, {0, 2}, 4, {}});
        r.n_prompt_rows = 7;
    };
    const auto prompt = make_prompt(1, 20);
    consumer taker(engine.submit(prompt, 4, with_states));
    blocks found;
    for (int i = 0; i < 3; ++i) {
        const auto rows = taker.next_prompt();
        REQUIRE(rows);
        found.emplace_back(rows->start, rows->n_rows);
    }
    CHECK(found == blocks{{13, 3}, {16, 3}, {19, 1}});
    CHECK(taker.rest() == continuation(prompt, 4));
}

TEST_CASE("scheduler: one run of prompt rows is computed ahead, not more") {
    test_engine engine;
    consumer taker(engine.submit(make_prompt(1, 40), 1, attends(40)));
    CHECK(engine.settled_decodes(1) == 1);
    REQUIRE(taker.next_prompt());
    CHECK(engine.settled_decodes(2) == 2);
    CHECK(blocks_of(taker).size() == 4);
}

TEST_CASE("scheduler: a run of prompt rows takes at most a quarter of the pool") {
    // Four blocks of 4 KiB, the least a block has: 25 rows of 40 columns each.
    test_engine engine({}, 4 * 4096 / 8);
    consumer taker(engine.submit(make_prompt(1, 40), 1, attends(40)));
    CHECK_FALSE(taker.next_prompt());
    CHECK(taker.code() == errc::pool_exhausted);

    fake_options options;
    options.n_chunk = 40;
    test_engine wide(std::move(options), 4 * 4096);
    consumer second(wide.submit(make_prompt(1, 40), 1, attends(40)));
    CHECK(blocks_of(second) == blocks{{0, 25}, {25, 15}});
}

TEST_CASE("scheduler: cancelling in the prompt frees the slot and gives the blocks back") {
    test_engine engine;
    const auto wanted = engine.submit(make_prompt(1, 40), 1, attends(40));
    consumer taker(wanted);
    REQUIRE(taker.next_prompt());
    engine.cancel(wanted);
    CHECK_FALSE(is_busy(*engine.sched, 0));
    CHECK(engine.pool->stats().n_leased == 0);
}

TEST_CASE("scheduler: dropped prompt rows are announced without a block and counted") {
    test_engine engine({}, 2 * 4096);
    std::vector<prompt_event> held;
    consumer taker(engine.submit(make_prompt(1, 40), 1, [](request& r) {
        attends(40)(r);
        r.on_full = full_policy::drop;
    }));
    while (auto rows = taker.next_prompt()) held.push_back(std::move(*rows));
    int n_rows = 0;
    std::uint64_t n_dropped = 0;
    for (const auto& rows : held) {
        n_rows += rows.n_rows;
        if (!rows.rows.block) n_dropped += static_cast<std::uint64_t>(rows.n_rows);
    }
    CHECK(n_rows == 40);
    CHECK(n_dropped > 0);
    CHECK(engine.sched->counters().n_dropped_rows == n_dropped);
}

// ---- scores of a prompt

TEST_CASE("scheduler: every token is scored after those before it, whatever a step holds") {
    for (const int n_outputs : {1, 3, 8, 100}) {
        for (const std::size_t n : {1u, 7u, 8u, 19u}) {
            test_engine engine({.n_chunk = 8, .n_outputs = n_outputs});
            const auto text = make_prompt(1, 20);
            consumer taker(engine.submit(text, 1, scores(n)));
            CHECK(scores_of(taker) == expected_scores(text, n));
            CHECK(taker.reason() == finish_reason::stop);
            CHECK(taker.usage().completion_tokens == 0);
            CHECK(engine.model->cache(0) == text);
        }
    }
}

TEST_CASE("scheduler: cached tokens are evaluated again if what follows them is scored") {
    test_engine engine({.n_chunk = 8});
    const auto text = make_prompt(1, 20);
    const std::pair<std::size_t, int> cases[] = {{19, 0}, {5, 14}, {1, 18}, {19, 0}};
    for (const auto& [n, n_cached] : cases) {
        consumer taker(engine.submit(text, 1, scores(n)));
        CHECK(scores_of(taker) == expected_scores(text, n));
        CHECK(taker.usage().cached_tokens ==
              (engine.sched->counters().n_requests == 1 ? 0 : n_cached));
    }
}

TEST_CASE("scheduler: a generation beside scores goes on as it would alone") {
    test_engine engine({.n_slots = 2, .n_chunk = 8, .n_outputs = 3});
    const auto prompt = make_prompt(2, 10);
    const auto text = make_prompt(1, 60);
    consumer generated(engine.submit(prompt, 12));
    consumer scored(engine.submit(text, 1, scores(40)));
    CHECK(scores_of(scored) == expected_scores(text, 40));
    ids taken;
    while (const auto token = generated.next()) taken.push_back(token->id);
    CHECK(taken == continuation(prompt, 12));
}

// ---- the embedding of a prompt

TEST_CASE("scheduler: an embedding is one step of the whole text and ends the request") {
    test_engine engine({.n_chunk = 20});
    const auto text = make_prompt(1, 20);
    consumer taker(engine.submit(text, 1, embeds));
    const auto found = embedding_from(taker);
    CHECK(found.embedding == embedding_of(text, 20));
    CHECK(found.n_rows == 1);
    CHECK_FALSE(found.rows.block);
    CHECK(taker.reason() == finish_reason::stop);
    CHECK(taker.usage().prompt_tokens == 20);
    CHECK(taker.usage().completion_tokens == 0);
    CHECK(engine.model->decodes().size() == 1);
    CHECK(engine.sched->counters().n_prompt_tokens == 20);
    CHECK(engine.sched->counters().n_tokens == 0);
}

TEST_CASE("scheduler: nothing that a slot holds of a text is reused for its embedding") {
    test_engine engine({.n_slots = 2, .n_chunk = 64});
    const auto text = make_prompt(1, 40);
    for (int i = 0; i < 3; ++i) {
        consumer taker(engine.submit(text, 1, embeds));
        CHECK(embedding_from(taker).embedding == embedding_of(text, 40));
        CHECK(taker.usage().cached_tokens == 0);
    }
    CHECK(engine.model->copies().empty());
}

TEST_CASE("scheduler: a text comes in pieces where the last of them is what pools") {
    test_engine engine({.n_chunk = 8, .can_split_embedding = true});
    const auto text = make_prompt(1, 20);
    consumer taker(engine.submit(text, 1, embeds));
    CHECK(embedding_from(taker).embedding == embedding_of(text, 4));
    CHECK(engine.model->decodes().size() == 3);
}

TEST_CASE("scheduler: a generation beside embeddings goes on as it would alone") {
    test_engine engine({.n_slots = 2, .n_ctx = 512, .n_chunk = 200});
    const auto prompt = make_prompt(1, 10);
    consumer generating(engine.submit(prompt, 30));
    auto tokens = generating.take(3);
    for (token_id i = 2; i < 6; ++i) {
        // More than the piece of a prompt that a generating slot waits for.
        const auto text = make_prompt(i, 150);
        consumer taker(engine.submit(text, 1, embeds));
        CHECK(embedding_from(taker).embedding == embedding_of(text, 150));
        tokens = tokens + generating.take(3);
    }
    CHECK(tokens + generating.rest() == continuation(prompt, 30));
}

TEST_CASE("scheduler: a text that was embedded is a prefix for the generation that follows") {
    test_engine engine({.n_chunk = 20});
    const auto text = make_prompt(1, 20);
    consumer taker(engine.submit(text, 1, embeds));
    embedding_from(taker);
    consumer generating(engine.submit(text + ids{7}, 4));
    CHECK(generating.rest() == continuation(text + ids{7}, 4));
    CHECK(generating.usage().cached_tokens == 20);
}

TEST_CASE("scheduler: a step that fails ends its embedding alone") {
    int n_failures = 1;
    fake_options options;
    options.n_chunk = 20;
    options.on_decode = [&](auto) {
        if (n_failures-- > 0) throw error(errc::decode, "injected");
    };
    test_engine engine(std::move(options));
    const auto text = make_prompt(1, 20);
    consumer failing(engine.submit(text, 1, embeds));
    CHECK_FALSE(failing.next_prompt());
    CHECK(failing.code() == errc::decode);
    consumer next(engine.submit(text, 1, embeds));
    CHECK(embedding_from(next).embedding == embedding_of(text, 20));
}

TEST_CASE("scheduler: closing ends embeddings that wait and that run") {
    test_engine engine({.n_chunk = 20});
    engine.model->allow(0);
    consumer running(engine.submit(make_prompt(1, 20), 1, embeds));
    consumer queued(engine.submit(make_prompt(2, 20), 1, embeds));
    REQUIRE(engine.model->wait_held());
    std::thread closer([&] { engine.sched->close(); });
    while (!engine.sched->is_closed()) std::this_thread::yield();
    engine.model->allow_all();
    closer.join();
    CHECK_FALSE(queued.next_prompt());
    CHECK(queued.code() == errc::closed);
    running.next_prompt();  // its embedding, if the step was done before
}

TEST_CASE("scheduler: prompts of adjacent slots are embedded in one step as far as it holds them") {
    for (const bool mixes : {false, true}) {
        CAPTURE(mixes);
        test_engine engine({.n_slots = 4, .n_chunk = 8, .can_mix_embeddings = mixes});
        // A step that is held lets the others arrive together.
        engine.model->allow(0);
        consumer blocker(engine.submit(make_prompt(9, 8), 1, embeds));
        REQUIRE(engine.model->wait_held());
        std::vector<ids> texts;
        std::vector<consumer> takers;
        for (const int n : {3, 3, 2, 3, 8, 1}) {
            texts.push_back(make_prompt(static_cast<token_id>(texts.size()) + 1, n));
            takers.emplace_back(engine.submit(texts.back(), 1, embeds));
        }
        engine.model->allow_all();
        embedding_from(blocker);
        for (std::size_t i = 0; i < texts.size(); ++i) {
            const auto n = static_cast<int>(texts[i].size());
            CHECK(embedding_from(takers[i]).embedding == embedding_of(texts[i], n));
        }
        std::vector<std::size_t> sizes;
        for (const auto& batch : engine.model->decodes()) sizes.push_back(batch.size());
        CHECK(sizes.front() == 8);
        CHECK(sizes[1] == (mixes ? 8u : 6u));  // 3 + 3 + 2, or 3 + 3
        CHECK(sizes.size() < 1 + texts.size());
    }
}
