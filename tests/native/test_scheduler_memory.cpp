// scheduler and block pool: what happens when the budget has no room for the next row.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

constexpr std::size_t block_bytes = 4096;  // of each row of these tests
using clock_type = std::chrono::steady_clock;

// A machine whose memory lasts for one block, and what happens while a second one is asked for.
class one_block_allocator final : public host_allocator {
public:
    void* allocate(std::size_t n_bytes, bool& is_pinned) noexcept override {
        if (++n_calls > 1) {
            on_refusal();
            return nullptr;
        }
        return plain_->allocate(n_bytes, is_pinned);
    }
    void release(void* data, std::size_t n_bytes, bool is_pinned) noexcept override {
        plain_->release(data, n_bytes, is_pinned);
    }
    bool offers_pinned() const noexcept override { return false; }

    std::atomic<int> n_calls{0};
    std::function<void()> on_refusal = [] {};

private:
    const std::shared_ptr<host_allocator> plain_ = plain_allocator();
};

std::function<void(request&)> with(full_policy policy, double wait_limit_s = 20,
                                   int run_ahead = 8) {
    return [=](request& r) {
        r.capture = make_plan();
        r.on_full = policy;
        r.wait_limit = std::chrono::duration<double>(wait_limit_s);
        r.run_ahead = run_ahead;
    };
}

}  // namespace

TEST_CASE("scheduler: a full pool is an error only when the consumer waits with nothing left") {
    test_engine engine({}, 3 * block_bytes);
    const auto prompt = make_prompt(1, 5);
    const auto wanted = engine.submit(prompt, 20, with(full_policy::raise));
    CHECK(engine.settled_decodes(4) == 4);  // a chunk of the prompt, then three tokens
    CHECK_FALSE(wanted->box->end());

    consumer taker(wanted);
    std::vector<token_event> held;
    for (int i = 0; i < 3; ++i) held.push_back(taker.next().value());
    engine.pass_round();
    CHECK_FALSE(wanted->box->end());  // it may still drop them before it waits

    CHECK_FALSE(taker.next());
    CHECK(taker.reason() == finish_reason::error);
    CHECK(taker.code() == errc::pool_exhausted);
    CHECK(taker.usage().completion_tokens == 3);
    for (const auto& token : held) CHECK(is_row_of(token));
    held.clear();

    // The slot goes on from what was handed out.
    const auto all = continuation(prompt, 6);
    consumer again(engine.submit(prompt + first_of(all, 3), 2, with(full_policy::raise)));
    CHECK(again.next()->id == all[3]);
    CHECK(again.next()->id == all[4]);
    CHECK(again.usage().cached_tokens == 7);
}

TEST_CASE("scheduler: the row of a prompt that no budget holds is an error") {
    test_engine engine({}, block_bytes);
    for (const auto policy : {full_policy::raise, full_policy::wait}) {
        consumer taker(engine.submit(make_prompt(1, 5), 20, [&](request& r) {
            with(policy, 0.01)(r);
            r.capture = make_plan(1000);
        }));
        CHECK(taker.rest().empty());
        CHECK(taker.code() == errc::pool_exhausted);
    }
}

TEST_CASE("scheduler: a consumer that drops each token never exhausts a budget of two blocks") {
    for (const std::size_t n_blocks : {std::size_t{1}, std::size_t{2}, std::size_t{3}}) {
        for (const int run_ahead : {0, 1, 8}) {
            CAPTURE(n_blocks);
            CAPTURE(run_ahead);
            fake_options options;
            options.n_ctx = 1024;
            test_engine engine(options, n_blocks * block_bytes);
            const auto wanted =
                engine.submit(make_prompt(1, 5), 1000, with(full_policy::raise, 20, run_ahead));
            consumer taker(wanted);
            int n_taken = 0;
            int n_wrong = 0;
            while (const auto token = taker.next()) {
                ++n_taken;
                if (!token->rows.block || !is_row_of(*token)) ++n_wrong;
            }
            CHECK(n_taken == 1000);
            CHECK(n_wrong == 0);
            CHECK(engine.pool->stats().peak_leased_bytes <= n_blocks * block_bytes);
        }
    }
}

TEST_CASE("scheduler: a view that dies while the pool refuses is not missed") {
    const auto allocator = std::make_shared<one_block_allocator>();
    std::optional<token_event> held;
    // The consumer drops its view after the engine asked in vain and before it looks who waits.
    allocator->on_refusal = [&held] { held.reset(); };
    test_engine engine({}, mib, 64, allocator);
    const auto prompt = make_prompt(1, 5);
    consumer taker(engine.submit(prompt, 3, with(full_policy::raise, 20, 0)));
    held = taker.next();
    CHECK(taker.rest() == ids{continuation(prompt, 3)[1], continuation(prompt, 3)[2]});
    CHECK(taker.reason() == finish_reason::length);
    CHECK(allocator->n_calls == 2);
}

TEST_CASE("scheduler: a consumer that keeps the token before needs a budget of two blocks") {
    fake_options options;
    options.n_ctx = 1024;
    test_engine engine(options, 2 * block_bytes);
    consumer taker(engine.submit(make_prompt(1, 5), 1000, with(full_policy::raise)));
    int n_taken = 0;
    std::optional<token_event> last;  // as the variable of a Python loop
    while (auto token = taker.next()) {
        last = std::move(token);
        ++n_taken;
    }
    CHECK(n_taken == 1000);
    CHECK(taker.reason() == finish_reason::length);
}

TEST_CASE("scheduler: a request that may wait goes on when a view dies in time") {
    test_engine engine({}, 2 * block_bytes);
    const auto prompt = make_prompt(1, 5);
    consumer taker(engine.submit(prompt, 5, with(full_policy::wait)));
    ids taken;
    std::vector<token_event> held;
    for (int i = 0; i < 2; ++i) {
        held.push_back(taker.next().value());
        taken.push_back(held.back().id);
    }
    std::thread dropping([&held] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        held.clear();
    });
    while (const auto token = taker.next()) {
        CHECK(is_row_of(*token));
        taken.push_back(token->id);
    }
    dropping.join();
    CHECK(taken == continuation(prompt, 5));
    CHECK(taker.reason() == finish_reason::length);
}

TEST_CASE("scheduler: a request that may wait is told of it when nothing comes back in time") {
    test_engine engine({}, 2 * block_bytes);
    consumer taker(engine.submit(make_prompt(1, 5), 5, with(full_policy::wait, 0.15)));
    std::vector<token_event> held;
    for (int i = 0; i < 2; ++i) held.push_back(taker.next().value());
    const auto started = clock_type::now();
    CHECK_FALSE(taker.next());
    const auto waited = clock_type::now() - started;
    CHECK(taker.code() == errc::pool_exhausted);
    CHECK(waited > std::chrono::milliseconds(140));
    CHECK(waited < std::chrono::seconds(5));
    CHECK(engine.model->n_looks() < 100);  // it slept
}

TEST_CASE("scheduler: a wait limit beyond the clock's range is a long wait") {
    test_engine engine({}, 2 * block_bytes);
    const auto wanted = engine.submit(make_prompt(1, 5), 3, with(full_policy::wait, 1e300));
    consumer taker(wanted);
    std::vector<token_event> held;
    for (int i = 0; i < 2; ++i) held.push_back(taker.next().value());
    CHECK_FALSE(wanted->box->arm(taker.waiter()));
    engine.pass_round();
    CHECK_FALSE(wanted->box->end());
    held.clear();
    CHECK(taker.rest().size() == 1);
}

TEST_CASE("scheduler: the engine sleeps when a consumer stops waiting before its time is over") {
    for (const int run_ahead : {0, 8}) {
        CAPTURE(run_ahead);
        test_engine engine({}, 2 * block_bytes);
        const auto wanted =
            engine.submit(make_prompt(1, 5), 5, with(full_policy::wait, 0.05, run_ahead));
        consumer taker(wanted);
        std::vector<token_event> held;
        for (int i = 0; i < 2; ++i) held.push_back(taker.next().value());
        CHECK_FALSE(wanted->box->arm(taker.waiter()));
        engine.pass_round();
        wanted->box->disarm();
        std::this_thread::sleep_for(std::chrono::milliseconds(80));
        const auto n_looks = engine.model->n_looks();
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        CHECK(engine.model->n_looks() - n_looks < 20);
        CHECK_FALSE(wanted->box->end());
        held.clear();
        CHECK(taker.rest().size() == 3);
    }
}

TEST_CASE(
    "scheduler: a request that drops rows goes on without them for a consumer that keeps all") {
    test_engine engine({}, 2 * block_bytes);
    const auto prompt = make_prompt(1, 5);
    consumer taker(engine.submit(prompt, 9, with(full_policy::drop)));
    std::vector<token_event> held;
    while (auto token = taker.next()) held.push_back(std::move(*token));
    ids taken;
    for (const auto& token : held) {
        const bool has_row = taken.size() < 2;
        taken.push_back(token.id);
        CHECK((token.rows.block != nullptr) == has_row);
        if (has_row) CHECK(is_row_of(token));
    }
    CHECK(taken == continuation(prompt, 9));
    CHECK(taker.reason() == finish_reason::length);
    CHECK(engine.sched->counters().n_dropped_rows == 7);
}

TEST_CASE("scheduler: a request that drops rows drops none that its consumer makes room for") {
    fake_options options;
    options.n_ctx = 1024;
    test_engine engine(options, 2 * block_bytes);
    consumer taker(engine.submit(make_prompt(1, 5), 1000, with(full_policy::drop)));
    int n_rows = 0;
    while (const auto token = taker.next()) n_rows += token->rows.block && is_row_of(*token);
    CHECK(n_rows == 1000);
    CHECK(engine.sched->counters().n_dropped_rows == 0);
}

TEST_CASE("scheduler: rows come back after some were dropped") {
    test_engine engine({}, 2 * block_bytes);
    consumer taker(engine.submit(make_prompt(1, 5), 20, with(full_policy::drop, 20, 0)));
    std::vector<token_event> held;
    for (int i = 0; i < 4; ++i) held.push_back(taker.next().value());
    CHECK(held[1].rows.block);
    CHECK_FALSE(held[2].rows.block);
    CHECK_FALSE(held[3].rows.block);
    held.clear();
    const auto next = taker.next();
    CHECK(next->rows.block);
}

TEST_CASE(
    "scheduler: a starved slot leaves the others running, and memory goes where it is waited for") {
    fake_options options;
    options.n_slots = 2;
    test_engine engine(options, 2 * block_bytes);
    const auto starved_prompt = make_prompt(1, 5);
    const auto starved = engine.submit(starved_prompt, 4, with(full_policy::wait));
    consumer keeper(starved);
    std::vector<token_event> held;
    for (int i = 0; i < 2; ++i) held.push_back(keeper.next().value());
    const auto prompt = make_prompt(2, 5);
    CHECK(consumer(engine.submit(prompt, 30)).rest() == continuation(prompt, 30));
    CHECK_FALSE(starved->box->end());
    held.clear();
    CHECK(keeper.rest().size() == 2);
    CHECK(keeper.reason() == finish_reason::length);
}
