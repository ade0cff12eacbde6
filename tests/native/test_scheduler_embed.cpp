// scheduler: requests whose result is the embedding of their prompt.
#include <doctest/doctest.h>

#include <thread>
#include <utility>
#include <vector>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

void embeds(request& r) {
    r.only_attends = true;
    r.embeds = true;
}

// What the fake model gives of a text whose last step has `n_tokens`.
std::vector<float> embedding_of(const ids& text, int n_tokens) {
    return {static_cast<float>(hash_of(text)), static_cast<float>(n_tokens)};
}

// Takes the embedding and the end behind it.
prompt_event embedding_from(consumer& taker) {
    auto found = taker.next_prompt();
    REQUIRE(found);
    CHECK_FALSE(taker.next_prompt());
    return std::move(*found);
}

}  // namespace

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
