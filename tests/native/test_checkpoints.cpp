// Checkpoints: which are taken, used and dropped, and that a scheduler over caches that cannot drop
// a tail goes back to them instead of evaluating a text from its beginning.
#include <doctest/doctest.h>

#include <mutex>
#include <numeric>
#include <random>

#include "sched/checkpoints.h"
#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

using counts = std::vector<std::size_t>;

fake_options recurrent(int n_slots = 1) {
    fake_options options;
    options.n_slots = n_slots;
    options.n_chunk = 512;
    options.n_ctx = 4096;
    options.can_truncate = false;
    options.has_snapshots = true;
    return options;
}

// A store over the caches of a fake model, without a scheduler.
struct store {
    explicit store(std::size_t n_snapshots)
        : runner(model), kept(runner, readers, n_snapshots * fake_runner::snapshot_size) {}

    // Evaluates up to `n` tokens and takes a checkpoint there.
    void take_at(slot_id slot, int n) {
        evaluate(slot, n);
        kept.take(slot, static_cast<std::size_t>(n));
    }
    void evaluate(slot_id slot, int n) {
        for (auto at = static_cast<int>(model->cache(slot).size()); at < n; ++at) {
            const step_token token{slot, 100 + at, at, false};
            runner.decode({&token, 1}, {}, step_output::none);
        }
    }

    const std::shared_ptr<fake_model> model = std::make_shared<fake_model>(recurrent(3));
    fake_runner runner;
    std::mutex readers;
    checkpoints kept;
};

test_engine recurrent_engine(int n_slots = 1, std::size_t n_between = 0,
                             std::size_t budget_bytes = mib) {
    return test_engine(recurrent(n_slots), mib, 64, nullptr,
                       pace{std::chrono::milliseconds(0),
                            step_costs::seconds(-1),
                            {.budget_bytes = budget_bytes, .n_between = n_between}});
}

std::size_t n_decoded(const test_engine& engine) {
    const auto decodes = engine.model->decodes();
    return std::accumulate(
        decodes.begin(), decodes.end(), std::size_t{0},
        [](std::size_t sum, const fake_model::batch& one) { return sum + one.size(); });
}

// A request's tokens, of which as many as `n_cached` must have come from a cache.
void check_run(test_engine& engine, const ids& prompt, int n, int n_cached, slot_id slot = -1) {
    CAPTURE(prompt.size());
    const auto n_before = n_decoded(engine);
    consumer taker(engine.submit(prompt, n, [&](request& r) { r.wanted_slot = slot; }));
    CHECK(taker.rest() == continuation(prompt, n));
    CHECK(taker.usage().cached_tokens == n_cached);
    const auto n_evaluated = prompt.size() - static_cast<std::size_t>(n_cached);
    CHECK(n_decoded(engine) - n_before == n_evaluated + static_cast<std::size_t>(n - 1));
}

}  // namespace

TEST_CASE("checkpoints: a slot goes back to the last one that it has by then") {
    store s(8);
    s.take_at(0, 10);
    s.take_at(0, 25);
    s.take_at(1, 7);
    s.take_at(0, 40);
    s.kept.take(0, 40);
    CHECK(s.kept.counts_of(0) == counts{10, 25, 40});
    CHECK(s.model->n_snapshots() == 4);
    CHECK(s.kept.last_of(0, 9) == 0);
    CHECK(s.kept.last_of(0, 10) == 10);
    CHECK(s.kept.last_of(0, 39) == 25);
    CHECK(s.kept.go_back(0, 39) == 25);
    CHECK(s.model->cache(0).size() == 25);
    s.kept.drop_after(0, 25);
    CHECK(s.kept.counts_of(0) == counts{10, 25});
    CHECK(s.kept.go_back(0, 5) == 0);
    CHECK(s.kept.counts_of(1) == counts{7});
    CHECK(s.kept.n_bytes() == 3 * fake_runner::snapshot_size);
    for (const auto& what : s.model->violations()) FAIL_CHECK(what);
}

TEST_CASE("checkpoints: beyond the budget the one goes that saves least") {
    store s(3);
    s.take_at(0, 100);
    s.take_at(0, 110);  // saves 10
    s.take_at(0, 200);
    s.take_at(1, 50);
    CHECK(s.kept.counts_of(0) == counts{100, 200});
    CHECK(s.kept.counts_of(1) == counts{50});
    s.take_at(2, 60);  // that of slot 1 saves 50, the others 100 each
    CHECK(s.kept.counts_of(1).empty());
    CHECK(s.kept.counts_of(0) == counts{100, 200});
    CHECK(s.kept.n_bytes() == 3 * fake_runner::snapshot_size);
}

TEST_CASE("checkpoints: an old one goes before a new one that saves as much") {
    store s(2);
    s.take_at(0, 30);
    s.take_at(0, 60);
    s.take_at(0, 90);
    CHECK(s.kept.counts_of(0) == counts{60, 90});
    // Using one makes it new.
    CHECK(s.kept.go_back(0, 70) == 60);
    s.kept.drop_after(0, 60);
    s.take_at(1, 40);
    s.take_at(2, 45);
    CHECK(s.kept.counts_of(0) == counts{60});
    CHECK(s.kept.counts_of(1).empty());
}

TEST_CASE("checkpoints: many steps of little worth do not drive out a prompt's") {
    store s(8);
    s.take_at(0, 500);
    for (int n = 501; n < 560; ++n) s.take_at(0, n);
    const auto left = s.kept.counts_of(0);
    CHECK(left.size() == 8);
    CHECK(left.front() == 500);
    CHECK(left.back() == 559);
}

TEST_CASE("checkpoints: copies share their bytes, and each slot drops its own") {
    store s(4);
    s.take_at(0, 10);
    s.take_at(0, 20);
    s.runner.copy(0, 1);
    s.kept.copy(0, 1, 15);
    CHECK(s.kept.counts_of(1) == counts{10});
    CHECK(s.kept.n_bytes() == 2 * fake_runner::snapshot_size);
    s.kept.drop_after(0, 0);
    CHECK(s.kept.n_bytes() == fake_runner::snapshot_size);
    CHECK(s.kept.go_back(1, 20) == 10);
    s.kept.drop_after(1, 0);
    CHECK(s.kept.n_bytes() == 0);
    for (const auto& what : s.model->violations()) FAIL_CHECK(what);
}

TEST_CASE("checkpoints: none is kept without room for one, or where caches drop any tail") {
    store none(0);
    none.take_at(0, 5);
    CHECK_FALSE(none.kept.are_kept());
    CHECK(none.kept.counts_of(0).empty());
    const auto model = std::make_shared<fake_model>(fake_options{});
    fake_runner plain(model);
    std::mutex readers;
    CHECK_FALSE(checkpoints(plain, readers, mib).are_kept());
}

TEST_CASE("checkpoints: the same prompt again evaluates its last token alone") {
    auto engine = recurrent_engine();
    const auto prompt = make_prompt(1, 100);
    check_run(engine, prompt, 20, 0);
    CHECK(engine.sched->checkpoints_of(0) == counts{99});
    check_run(engine, prompt, 20, 99);
    // What goes on from there has all of it.
    const auto text = prompt + continuation(prompt, 20);
    check_run(engine, text + make_prompt(2, 5), 3, 119);
    CHECK(engine.sched->checkpoints_of(0) == counts{99, 119, 124});
}

TEST_CASE("checkpoints: a prompt that parts from a slot's is evaluated from the last one before") {
    auto engine = recurrent_engine(1, 100);
    const auto prompt = make_prompt(1, 450);
    check_run(engine, prompt, 5, 0);
    CHECK(engine.sched->checkpoints_of(0) == counts{100, 200, 300, 400, 449});
    check_run(engine, first_of(prompt, 350) + make_prompt(2, 20), 5, 300);
    CHECK(engine.sched->checkpoints_of(0) == counts{100, 200, 300, 369});
    check_run(engine, make_prompt(3, 30), 5, 0);
    CHECK(engine.sched->checkpoints_of(0) == counts{29});
}

TEST_CASE("checkpoints: the last borders of messages have one each, if they save enough") {
    auto engine = recurrent_engine();
    ids prompt;
    counts borders;
    for (token_id i = 1; i <= 5; ++i) {
        prompt = prompt + make_prompt(i, i == 4 ? 10 : 80) + ids{end_token};
        borders.push_back(prompt.size());
    }
    prompt = prompt + make_prompt(9, 3);
    check_run(engine, prompt, 4, 0);
    // Two borders are looked at; the fifth is 81 tokens after the fourth.
    CHECK(engine.sched->checkpoints_of(0) == counts{borders[3], borders[4], prompt.size() - 1});
    // The last message is edited.
    auto edited = first_of(prompt, borders[3]) + make_prompt(20, 30) + ids{end_token, 9000};
    check_run(engine, edited, 4, static_cast<int>(borders[3]));
}

TEST_CASE("checkpoints: work on an idle slot goes back to one") {
    auto engine = recurrent_engine(1, 100);
    const auto prompt = make_prompt(1, 250);
    check_run(engine, prompt, 10, 0);
    engine.sched->run_on_slot(0, [](slot_cache& cache) { cache.truncate(230); });
    CHECK(engine.sched->tokens_of(0) == first_of(prompt, 200));
    CHECK(engine.sched->checkpoints_of(0) == counts{100, 200});
    // A range at the end is a truncation; others such a cache cannot remove.
    const token_range tail{150, 50}, middle{20, 10};
    CHECK_THROWS_AS(
        engine.sched->run_on_slot(0, [&](slot_cache& cache) { cache.remove({&middle, 1}); }),
        error);
    engine.sched->run_on_slot(0, [&](slot_cache& cache) { cache.remove({&tail, 1}); });
    CHECK(engine.sched->tokens_of(0) == first_of(prompt, 100));
    engine.sched->run_on_slot(0, [](slot_cache& cache) { cache.truncate(50); });
    CHECK(engine.sched->tokens_of(0).empty());
    CHECK(engine.sched->checkpoints_of(0).empty());
}

TEST_CASE("checkpoints: a slot that was restored has none of what it held before") {
    auto engine = recurrent_engine();
    check_run(engine, make_prompt(1, 40), 3, 0);
    std::vector<std::byte> blob;
    engine.sched->run_on_slot(0, [&](slot_cache& cache) {
        blob.resize(cache.save({}));
        blob.resize(cache.save(blob));
    });
    check_run(engine, make_prompt(2, 70), 3, 0);
    engine.sched->run_on_slot(0, [&](slot_cache& cache) { cache.restore(blob, all_exact); });
    CHECK(engine.sched->checkpoints_of(0).empty());
    check_run(engine, make_prompt(1, 40) + continuation(make_prompt(1, 40), 3), 3, 42);
}

TEST_CASE("checkpoints: a cache that drops some of its newest tokens needs one beyond them alone") {
    auto options = recurrent();
    options.n_slack = 40;
    test_engine engine(options, mib, 64, nullptr,
                       pace{std::chrono::milliseconds(0),
                            step_costs::seconds(-1),
                            {.budget_bytes = mib, .n_between = 0}});
    const auto prompt = make_prompt(1, 200);
    check_run(engine, prompt, 5, 0);
    const auto text = prompt + continuation(prompt, 4);
    check_run(engine, first_of(text, 180) + make_prompt(2, 10), 5, 180);
    check_run(engine, first_of(text, 120) + make_prompt(3, 90), 5, 0);
    check_run(engine, first_of(text, 120) + make_prompt(3, 90) + make_prompt(4, 100), 5, 210);
    engine.sched->run_on_slot(0, [](slot_cache& cache) { cache.truncate(250); });
    CHECK(engine.sched->tokens_of(0).size() == 210);
}

TEST_CASE("checkpoints: prompts with one beginning share its evaluation") {
    auto engine = recurrent_engine(3);
    const auto beginning = make_prompt(1, 300);
    engine.model->allow(0);
    std::vector<ids> prompts;
    std::vector<consumer> takers;
    for (token_id i = 2; i < 5; ++i) {
        prompts.push_back(beginning + make_prompt(i, 50));
        takers.emplace_back(engine.submit(prompts.back(), 4));
        if (i == 2) REQUIRE(engine.model->wait_held());  // its first step was filled without them
    }
    engine.model->allow_all();
    for (std::size_t i = 0; i < 3; ++i) CHECK(takers[i].rest() == continuation(prompts[i], 4));
    // The first one's only step was on its way: the second one's ends where the third one parts.
    CHECK(takers[0].usage().cached_tokens == 0);
    CHECK(takers[2].usage().cached_tokens == 300);
    // Later ones find what a slot can go back to.
    check_run(engine, prompts[2], 4, 349, 0);
    CHECK(engine.model->copies().back() == std::pair<slot_id, slot_id>{2, 0});
}

TEST_CASE("checkpoints: a deterministic prompt's steps are its own") {
    auto engine = recurrent_engine(1, 16);
    const auto prompt = make_prompt(1, 200);
    consumer taker(engine.submit(prompt, 3, [](request& r) {
        r.is_alone = true;
        r.cache_prompt = false;
    }));
    CHECK(taker.rest() == continuation(prompt, 3));
    CHECK(engine.model->decodes().front().size() == 199);
    CHECK(engine.sched->checkpoints_of(0).empty());
}

TEST_CASE("checkpoints: a cancelled request's slot goes back to its prompt") {
    auto engine = recurrent_engine();
    const auto prompt = make_prompt(1, 60);
    const auto wanted = engine.submit(prompt, 50);
    consumer taker(wanted);
    taker.take(5);
    engine.settled_decodes(6);
    engine.cancel(wanted);
    const auto held = engine.sched->tokens_of(0);
    CHECK((held == prompt + continuation(prompt, 4) || held == first_of(prompt, 59)));
    check_run(engine, prompt, 3, 59);
}

TEST_CASE("checkpoints: requests that take turns in one slot keep the beginning that they share") {
    auto engine = recurrent_engine();
    const auto beginning = make_prompt(1, 200) + ids{end_token};
    std::vector<ids> prompts{beginning + make_prompt(2, 30), beginning + make_prompt(3, 30)};
    std::vector<consumer> takers;
    std::vector<ids> taken(2);
    for (const auto& prompt : prompts) takers.emplace_back(engine.submit(prompt, 8));
    for (int round = 0; round < 8; ++round) {
        for (std::size_t i = 0; i < 2; ++i) taken[i] = taken[i] + takers[i].take(1);
    }
    for (std::size_t i = 0; i < 2; ++i) CHECK(taken[i] == continuation(prompts[i], 8));
    CHECK(engine.sched->counters().n_parkings >= 2);
    // The beginning was evaluated once, and what follows it as often as the slot changed hands.
    const auto n_turns = engine.sched->counters().n_parkings + 2;
    CHECK(n_decoded(engine) <= beginning.size() + n_turns * (30 + 8));
}

TEST_CASE(
    "checkpoints: a failed snapshot costs an evaluation, or the request, never a wrong text") {
    for (const int n_good : {0, 1, 2, 3, 4, 5}) {
        CAPTURE(n_good);
        auto options = recurrent(2);
        int n_left = n_good;
        options.on_snapshot = [&] {
            if (n_left-- == 0) throw error(errc::decode, "a snapshot fails");
        };
        test_engine engine(options);
        const auto prompt = make_prompt(1, 90);
        const auto run = [&](const ids& wanted) {
            consumer taker(engine.submit(wanted, 4));
            const auto said = taker.rest();
            if (taker.reason() == finish_reason::error) {
                CHECK(taker.code() == errc::decode);
            } else {
                CHECK(said == continuation(wanted, 4));
            }
        };
        run(prompt);
        run(prompt);
        run(first_of(prompt, 80) + make_prompt(2, 10));
        run(prompt);
    }
}

TEST_CASE("checkpoints: branches go on each for itself, from where the slot was") {
    for (const bool can_truncate : {true, false}) {
        CAPTURE(can_truncate);
        auto options = recurrent(4);
        options.can_truncate = can_truncate;
        test_engine engine(options);
        const auto prompt = make_prompt(1, 100);
        check_run(engine, prompt, 5, 0, 1);
        check_run(engine, make_prompt(7, 20), 1, 0, 0);
        const auto text = engine.sched->tokens_of(1);
        std::vector<slot_id> branches;
        CHECK(engine.sched->branch(1, 2, branches));
        CHECK(branches == std::vector<slot_id>{2, 3});  // those that hold least
        for (const auto slot : branches) {
            CHECK(engine.sched->tokens_of(slot) == text);
            CHECK(engine.sched->checkpoints_of(slot) == engine.sched->checkpoints_of(1));
            check_run(engine, text + make_prompt(10 + slot, 3), 4, 104, slot);
            // And from the prompt: a cache that drops its tail has all of it.
            check_run(engine, prompt, 4, 99, slot);
        }
        CHECK(engine.sched->tokens_of(1) == text);
    }
}

TEST_CASE("checkpoints: branches need slots that are idle") {
    auto engine = recurrent_engine(3);
    std::vector<slot_id> branches;
    const auto code_of = [&](slot_id from, int n) {
        try {
            engine.sched->branch(from, n, branches);
        } catch (const error& failure) {
            return failure.code();
        }
        return errc::internal;
    };
    CHECK(code_of(3, 1) == errc::unknown_slot);
    CHECK(code_of(0, 0) == errc::request);
    CHECK(code_of(0, 3) == errc::request);
    const auto prompt = make_prompt(1, 10);
    check_run(engine, prompt, 2, 0, 0);
    consumer taker(engine.submit(make_prompt(2, 5), 50, [](request& r) { r.wanted_slot = 1; }));
    const auto said = taker.take(1);
    CHECK(code_of(1, 1) == errc::busy);
    CHECK(code_of(0, 2) == errc::busy);
    CHECK(branches.empty());
    CHECK(engine.sched->branch(0, 1, branches));
    CHECK(branches == std::vector<slot_id>{2});
    CHECK(ids{said} + taker.take(3) == continuation(make_prompt(2, 5), 4));
    taker.rest();
}

TEST_CASE("checkpoints: whatever happens to slots, texts are those of a fresh evaluation") {
    for (const unsigned seed : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u}) {
        CAPTURE(seed);
        std::mt19937 rng(seed);
        const auto below = [&](int n) {
            return static_cast<int>(rng() % static_cast<unsigned>(n));
        };
        auto engine = recurrent_engine(3, static_cast<std::size_t>(below(3)) * 20,
                                       fake_runner::snapshot_size * (1 + rng() % 12));
        std::vector<ids> texts{make_prompt(1, 120), make_prompt(2, 60) + ids{end_token}};
        for (int round = 0; round < 60; ++round) {
            auto text = texts[static_cast<std::size_t>(below(static_cast<int>(texts.size())))];
            const auto slot = static_cast<slot_id>(below(3));
            switch (below(5)) {
                case 0: {
                    engine.sched->run_on_slot(
                        slot, [&](slot_cache& cache) { cache.truncate(cache.size() / 2); });
                    break;
                }
                case 1: {
                    std::vector<slot_id> branches;
                    engine.sched->branch(slot, 1 + below(2), branches);
                    break;
                }
                default: {
                    text.resize(1 + rng() % text.size());
                    if (below(2) == 0) text = text + make_prompt(30 + round, 1 + below(90));
                    if (below(3) == 0) text.push_back(end_token);
                    const auto wanted = engine.submit(
                        text, 6, [&](request& r) { r.wanted_slot = below(2) == 0 ? slot : -1; });
                    consumer taker(wanted);
                    const auto said = below(4) == 0 ? taker.take(2) : taker.rest();
                    engine.cancel(wanted);
                    const auto expected = continuation(text, 6);
                    REQUIRE(said == first_of(expected, said.size()));
                    texts.push_back(text + said);
                }
            }
            for (slot_id id = 0; id < 3; ++id) {
                const auto held = engine.sched->tokens_of(id);
                REQUIRE(engine.model->cache(id) == held);
                for (const auto n : engine.sched->checkpoints_of(id)) REQUIRE(n <= held.size());
            }
        }
    }
}
