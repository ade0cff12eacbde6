// scheduler: requests that want the rows of their prompt, with and without tokens after it.
#include <doctest/doctest.h>

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

}  // namespace

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
    CHECK_FALSE(engine.sched->is_busy(0));
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
