// Steered requests: the consumer gets forward passes and answers each. What it takes back and
// forces leaves the slot as if it had held nothing else, and other slots never wait for it.
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <thread>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

void steer(request& r) { r.is_steered = true; }

// Answers the forward passes of one request.
class driver {
public:
    driver(test_engine& engine, std::shared_ptr<request> wanted)
        : engine_(engine), wanted_(std::move(wanted)), consumer_(wanted_) {}

    // The next pass; false at the end.
    bool next() {
        event_ = consumer_.take_item().forward;
        return event_.has_value();
    }
    forward_pass& pass() const { return *event_->pass; }
    const forward_event& event() const { return *event_; }
    const forward_pass::limits& known() const { return pass().known(); }
    token_id pick() const { return pass().pick(*wanted_, {}, {}).id; }
    void answer(int n_removed, ids added, std::optional<finish_reason> end = {}) const {
        engine_.sched->answer(wanted_, pass(), {n_removed, std::move(added), end});
    }
    errc refused(int n_removed, ids added) const {
        try {
            answer(n_removed, std::move(added));
        } catch (const error& failure) {
            return failure.code();
        }
        FAIL("answered");
        return errc::internal;
    }
    // As many tokens as a plain request would get.
    ids rest() {
        ids taken;
        while (next()) {
            taken.push_back(pick());
            answer(0, {taken.back()});
        }
        return taken;
    }
    const consumer& from() const { return consumer_; }
    const std::shared_ptr<request>& wanted() const { return wanted_; }

private:
    test_engine& engine_;
    const std::shared_ptr<request> wanted_;
    consumer consumer_;
    std::optional<forward_event> event_;
};

driver drive(test_engine& engine, ids prompt, int max_tokens,
             const std::function<void(request&)>& adjust = {}) {
    return {engine, engine.submit(std::move(prompt), max_tokens, [&](request& r) {
                steer(r);
                if (adjust) adjust(r);
            })};
}

fake_options with(bool can_truncate, int n_slots = 1, int n_ctx = 256) {
    fake_options options;
    options.can_truncate = can_truncate;
    options.n_slots = n_slots;
    options.n_ctx = n_ctx;
    return options;
}

}  // namespace

TEST_CASE("steered: picking what a plain request picks gives what it gives") {
    test_engine engine;
    const auto prompt = make_prompt(1, 20);
    auto steered = drive(engine, prompt, 12);
    CHECK(steered.rest() == continuation(prompt, 12));
    CHECK(steered.from().reason() == finish_reason::length);
    CHECK(steered.from().usage().completion_tokens == 12);
    CHECK(engine.model->cache(0) == prompt + continuation(prompt, 11));
    CHECK(engine.sched->counters().n_tokens == 12);
}

TEST_CASE("steered: removed and forced ids leave nothing but the text in the slot") {
    for (const bool can_truncate : {true, false}) {
        CAPTURE(can_truncate);
        test_engine engine(with(can_truncate));
        const auto prompt = make_prompt(1, 20);
        auto steered = drive(engine, prompt, 60);
        std::mt19937 random(7);
        ids text = prompt;
        for (int i = 0; i < 40; ++i) {
            REQUIRE(steered.next());
            REQUIRE(steered.pick() == hash_of(text));
            REQUIRE(steered.known().n_tokens == static_cast<int>(text.size()));
            const int n_generated = static_cast<int>(text.size() - prompt.size());
            REQUIRE(steered.known().n_removable == n_generated);
            REQUIRE(steered.known().n_left == 60 - n_generated);
            const int n_removed = static_cast<int>(random() % 3) * n_generated / 3;
            ids added = make_prompt(static_cast<token_id>(50 + i), static_cast<int>(random() % 12));
            const auto n_most = static_cast<std::size_t>(59 - n_generated + n_removed);
            added.resize(std::min(added.size(), n_most));
            steered.answer(n_removed, added);
            text.resize(text.size() - static_cast<std::size_t>(n_removed));
            text = text + added;
        }
        REQUIRE(steered.next());
        CHECK(steered.pick() == hash_of(text));
        CHECK(engine.model->cache(0) == text);
        steered.answer(0, {}, finish_reason::stop);
        CHECK_FALSE(steered.next());
        CHECK(steered.from().reason() == finish_reason::stop);
        CHECK(engine.model->cache(0) == text);
        // What the slot holds is reused, and right.
        consumer after(engine.submit(text + ids{5}, 5));
        CHECK(after.rest() == continuation(text + ids{5}, 5));
        CHECK(after.usage().cached_tokens == static_cast<int>(text.size()));
    }
}

TEST_CASE("steered: forced ids are one chunk") {
    fake_options options;
    options.n_chunk = 16;
    test_engine engine(options);
    auto steered = drive(engine, make_prompt(1, 5), 60, [](request& r) { r.run_ahead = 0; });
    REQUIRE(steered.next());
    steered.answer(0, make_prompt(2, 16));
    REQUIRE(steered.next());
    const auto decodes = engine.model->decodes();
    REQUIRE(decodes.size() == 2 + 1);  // two of the prompt, whose last token goes on its own
    CHECK(decodes[2].size() == 16);
    steered.answer(0, make_prompt(3, 17));  // one more than a step holds
    REQUIRE(steered.next());
    CHECK(engine.model->decodes().size() == 2 + 1 + 2);
}

TEST_CASE("steered: a row of a forced chunk sees all its columns") {
    test_engine engine;
    const auto prompt = make_prompt(1, 5);
    auto steered = drive(engine, prompt, 60, [](request& r) { r.capture = make_plan(); });
    REQUIRE(steered.next());
    CHECK(steered.event().rows.layout.n_values == 5);
    steered.answer(0, {7, 8, 9});
    REQUIRE(steered.next());
    CHECK(steered.event().rows.layout.n_values == 8);
    CHECK(is_row_of({hash_of(prompt + ids{7, 8, 9}), 0, {}, steered.event().rows}));
    steered.answer(2, {6});
    REQUIRE(steered.next());
    CHECK(steered.event().rows.layout.n_values == 7);
    CHECK(is_row_of({hash_of(prompt + ids{7, 6}), 0, {}, steered.event().rows}));
}

TEST_CASE("steered: the text ends before the first id that ends it") {
    test_engine engine;
    const auto prompt = make_prompt(1, 5);
    auto first = drive(engine, prompt, 60);
    REQUIRE(first.next());
    first.answer(0, {7, end_token, 8});
    CHECK_FALSE(first.next());
    CHECK(first.from().reason() == finish_reason::stop);
    CHECK(first.from().usage().completion_tokens == 1);
    auto second = drive(engine, prompt, 60, [](request& r) { r.stop_tokens = {8}; });
    REQUIRE(second.next());
    second.answer(0, {8, 7});
    CHECK_FALSE(second.next());
    CHECK(second.from().reason() == finish_reason::stop_token);
    CHECK(engine.model->cache(0) == prompt);
}

TEST_CASE("steered: a request gets max_tokens and what fits into its slot") {
    test_engine engine(with(true, 1, 32));
    auto few = drive(engine, make_prompt(1, 5), 4);
    REQUIRE(few.next());
    CHECK(few.known().n_left == 4);
    CHECK(few.refused(0, {1, 3, 4, 5, 6}) == errc::request);
    few.answer(0, {1, 3, 4, 5});
    CHECK_FALSE(few.next());
    CHECK(few.from().reason() == finish_reason::length);

    auto full = drive(engine, make_prompt(2, 30), 100);
    REQUIRE(full.next());
    CHECK(full.known().n_left == 3);  // the last one need not fit
    full.answer(0, {1, 3});
    REQUIRE(full.next());
    CHECK(full.known().n_left == 1);
    CHECK(full.refused(0, {1, 3}) == errc::request);
    CHECK(full.refused(3, {}) == errc::request);
    full.answer(2, {4, 5, 6});
    CHECK_FALSE(full.next());
    CHECK(full.from().reason() == finish_reason::length);
    CHECK(engine.model->cache(0) == make_prompt(2, 30));
}

TEST_CASE("steered: a full slot discards, also in the middle of a chunk") {
    test_engine engine(with(true, 1, 32));
    const auto prompt = make_prompt(1, 20);
    const auto shift = [](request& r) {
        r.n_keep = 4;
        r.n_discard = 8;
    };
    auto steered = drive(engine, prompt, 200, shift);
    ids text = prompt;
    const auto discard = [&] { text.erase(text.begin() + 4, text.begin() + 12); };
    std::mt19937 random(3);
    int n_generated = 0;
    for (int i = 0; i < 30; ++i) {
        REQUIRE(steered.next());
        REQUIRE(steered.pick() == hash_of(text));
        REQUIRE(first_of(engine.model->cache(0), text.size()) == text);
        const int n_removable = steered.known().n_removable;
        CHECK(n_removable <= n_generated);
        const int n_removed = std::min(n_removable, static_cast<int>(random() % 4));
        const auto added =
            make_prompt(static_cast<token_id>(50 + i), static_cast<int>(random() % 14));
        if (n_generated - n_removed + static_cast<int>(added.size()) >= 200) break;
        steered.answer(n_removed, added);
        n_generated += static_cast<int>(added.size()) - n_removed;
        text.resize(text.size() - static_cast<std::size_t>(n_removed));
        for (const auto id : added) {
            if (text.size() == 32) discard();
            text.push_back(id);
        }
    }
    CHECK(engine.model->n_discards() > 3);
}

TEST_CASE("steered: no answer twice, no choice twice, nothing after the end") {
    test_engine engine;
    auto steered = drive(engine, make_prompt(1, 5), 60);
    REQUIRE(steered.next());
    const auto first = steered.event().pass;
    const auto id = steered.pick();
    CHECK_THROWS_AS(steered.pick(), error);
    CHECK(steered.refused(1, {}) == errc::request);
    CHECK(steered.refused(-1, {}) == errc::request);
    steered.answer(0, {id});
    CHECK(steered.refused(0, {id}) == errc::request);
    REQUIRE(steered.next());
    engine.cancel(steered.wanted());
    CHECK(steered.refused(0, {id}) == errc::closed);
    CHECK_THROWS_AS(steered.pick(), error);
    CHECK_FALSE(is_busy(*engine.sched, 0));
}

TEST_CASE("steered: cancelling rolls the slot back to the text without its last id") {
    for (const bool is_evaluated : {true, false}) {
        test_engine engine;
        const auto prompt = make_prompt(1, 5);
        auto steered = drive(engine, prompt, 60);
        REQUIRE(steered.next());
        steered.answer(0, {7, 8});
        if (is_evaluated) REQUIRE(steered.next());
        engine.cancel(steered.wanted());
        CHECK(engine.model->cache(0).size() <= 6);
        if (is_evaluated) CHECK(engine.model->cache(0) == prompt + ids{7});
        CHECK(engine.sched->tokens_of(0) == engine.model->cache(0));
    }
}

TEST_CASE("steered: others go on while it waits, and share their steps") {
    test_engine engine(with(true, 4));
    auto steered = drive(engine, make_prompt(9, 5), 60);
    REQUIRE(steered.next());
    CHECK(steered.wanted()->slot.load() == 3);
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> plain;
    for (token_id i = 1; i <= 3; ++i)
        plain.push_back(engine.submit(make_prompt(i, 5), 30, [](request& r) { r.run_ahead = 30; }));
    REQUIRE(engine.model->wait_held());
    engine.model->allow_all();
    for (token_id i = 1; i <= 3; ++i) {
        consumer one(plain[static_cast<std::size_t>(i - 1)]);
        CHECK(one.rest() == continuation(make_prompt(i, 5), 30));
    }
    std::size_t n_shared = 0;
    for (const auto& batch : engine.model->decodes()) n_shared += batch.size() == 3 ? 1 : 0;
    CHECK(n_shared >= 20);
    const auto first = steered.pick();
    steered.answer(0, {first});
    CHECK(ids{first} + steered.rest() == continuation(make_prompt(9, 5), 60));
}

TEST_CASE("steered: a slot that has waited longest takes the others along in its step") {
    test_engine engine(with(true, 4));
    auto steered = drive(engine, make_prompt(9, 5), 60);
    REQUIRE(steered.next());
    engine.model->allow(0);
    std::vector<std::shared_ptr<request>> plain;
    for (token_id i = 1; i <= 3; ++i)
        plain.push_back(engine.submit(make_prompt(i, 5), 40, [](request& r) { r.run_ahead = 40; }));
    REQUIRE(engine.model->wait_held());
    const auto n_held = engine.model->decodes().size();
    engine.model->allow(12);  // three prompts, and then steps of one token of each
    REQUIRE(engine.model->wait_decodes(n_held + 12));
    REQUIRE(engine.model->wait_held());
    CHECK(engine.model->decodes().back().size() == 3);
    const auto n_before = engine.model->decodes().size();
    steered.answer(0, {steered.pick()});
    engine.model->allow(3);
    REQUIRE(engine.model->wait_decodes(n_before + 1));
    CHECK(engine.model->decodes()[n_before].size() == 4);
}

// ---- a step ahead of the answer

TEST_CASE("steered: what a consumer likely answers is evaluated before it has answered") {
    test_engine engine;
    const auto prompt = make_prompt(1, 5);
    auto steered = drive(engine, prompt, 60, [](request& r) { r.capture = make_plan(); });
    REQUIRE(steered.next());
    REQUIRE(engine.settled_decodes(3) == 3);  // the prompt, its last token, and what follows it
    CHECK(engine.model->decodes().back()[0].id == hash_of(prompt));
    CHECK(engine.sched->tokens_of(0) == prompt);
    ids text = prompt;
    for (std::size_t i = 1; i <= 20; ++i) {
        REQUIRE(steered.pick() == hash_of(text));
        text.push_back(hash_of(text));
        steered.answer(0, {text.back()});
        REQUIRE(steered.next());
        CHECK(is_row_of({hash_of(text), 0, {}, steered.event().rows}));
        CHECK(steered.event().rows.layout.n_columns == static_cast<int>(text.size()));
        CHECK(engine.settled_decodes(3 + i) == 3 + i);  // none is evaluated twice
        CHECK(engine.sched->tokens_of(0) == text);
    }
    CHECK(engine.sched->counters().n_decoded_tokens == 21);
    CHECK(engine.sched->counters().n_accepted_tokens == 0);
    engine.cancel(steered.wanted());
    CHECK_FALSE(steered.next());
    CHECK(steered.from().usage().completion_tokens == 20);
    CHECK(engine.model->cache(0) == first_of(text, text.size() - 1));
}

TEST_CASE("steered: an answer that was not foreseen costs a step, and the next one is awaited") {
    test_engine engine;
    auto text = make_prompt(1, 5);
    auto steered = drive(engine, text, 60, [](request& r) { r.capture = make_plan(); });
    const auto answer = [&](int n_removed, const ids& added) {
        steered.answer(n_removed, added);
        text.resize(text.size() - static_cast<std::size_t>(n_removed));
        text = text + added;
        REQUIRE(steered.next());
        REQUIRE(is_row_of({hash_of(text), 0, {}, steered.event().rows}));
        REQUIRE(steered.pick() == hash_of(text));
    };
    REQUIRE(steered.next());
    REQUIRE(engine.settled_decodes(3) == 3);
    for (const bool is_back : {false, true}) {
        const auto n = engine.model->decodes().size();
        is_back ? answer(1, {}) : answer(0, {7});
        CHECK(engine.settled_decodes(n + 1) == n + 1);
        CHECK(engine.model->cache(0) == text);
        answer(0, {hash_of(text)});  // its own choice, from here on again foreseen
        CHECK(engine.settled_decodes(n + 3) == n + 3);
        CHECK(engine.model->cache(0) == text + ids{hash_of(text)});
    }
    steered.answer(0, {hash_of(text)}, finish_reason::stop);
    CHECK_FALSE(steered.next());
    CHECK(engine.model->cache(0) == text);
    CHECK(engine.sched->tokens_of(0) == text);
}

TEST_CASE("steered: no step ahead where nothing follows, or what it leaves could not be dropped") {
    const auto n_steps = [](fake_options options, const std::function<void(request&)>& adjust) {
        test_engine engine(std::move(options));
        const auto prompt = make_prompt(1, 5);
        auto steered = drive(engine, prompt, 60, adjust);
        REQUIRE(steered.next());
        return engine.settled_decodes(2);
    };
    const auto like = [](request&) {};
    CHECK(n_steps({}, like) == 3);
    CHECK(n_steps({}, [](request& r) { r.run_ahead = 0; }) == 2);
    CHECK(n_steps({}, [](request& r) { r.max_tokens = 1; }) == 2);
    CHECK(n_steps({}, [](request& r) { r.stop_tokens = {hash_of(r.prompt)}; }) == 2);
    CHECK(n_steps({}, [](request& r) { r.n_draft_max = 4; }) == 2);
    CHECK(n_steps(with(true, 1, 5), like) == 2);
    CHECK(n_steps(with(false), like) == 2);
    fake_options ends;
    ends.next = [](auto) { return end_token; };
    CHECK(n_steps(ends, like) == 2);
}

TEST_CASE("steered: steps ahead take no block that another slot needs") {
    test_engine engine(with(true, 2), 3 * 4096);  // blocks
    const auto captures = [](request& r) { r.capture = make_plan(); };
    auto steered = drive(engine, make_prompt(1, 5), 30, captures);
    REQUIRE(steered.next());
    CHECK(engine.settled_decodes(2) == 2);
    consumer other(engine.submit(make_prompt(2, 5), 30, captures));
    CHECK(other.rest() == continuation(make_prompt(2, 5), 30));
    const auto first = steered.pick();
    steered.answer(0, {first});
    CHECK(ids{first} + steered.rest() == continuation(make_prompt(1, 5), 30));
}

TEST_CASE("steered: an answer that comes during a step ahead is in time") {
    test_engine engine(with(true), mib, 64, nullptr,
                       {std::chrono::milliseconds(200), step_costs::seconds(-1), {}});
    const auto prompt = make_prompt(1, 5);
    engine.model->allow(2);  // now: after drive() the engine may be past it
    auto steered = drive(engine, prompt, 60);
    REQUIRE(steered.next());
    REQUIRE(engine.model->wait_held());
    const auto other = engine.submit(make_prompt(7, 5), 3);
    steered.answer(0, {steered.pick()});
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    engine.model->allow(1);
    REQUIRE(steered.next());
    CHECK(engine.sched->n_parked() == 0);
    engine.model->allow_all();
    CHECK(consumer(other).rest() == continuation(make_prompt(7, 5), 3));  // its turn comes
    CHECK(engine.sched->n_parked() == 1);
}

TEST_CASE("steered: a step ahead that fails ends its request") {
    fake_options options = with(true, 2);
    options.on_decode = [](std::span<const step_token> tokens) {
        if (tokens[0].id == hash_of(make_prompt(1, 5))) throw error(errc::decode, "lost");
    };
    options.leaves_tokens = true;
    test_engine engine(options);
    auto steered = drive(engine, make_prompt(1, 5), 60);
    REQUIRE(steered.next());
    (void)engine.settled_decodes(3);
    CHECK_FALSE(steered.next());
    CHECK(steered.from().code() == errc::decode);
    CHECK(engine.model->cache(steered.from().reason() == finish_reason::error ? 1 : 0) ==
          make_prompt(1, 5));
    CHECK(consumer(engine.submit(make_prompt(2, 5), 3)).rest() ==
          continuation(make_prompt(2, 5), 3));
}

// ---- parked: the consumer's pass is answered while the request has no slot

namespace {

// A steered request whose consumer has a pass and which has given its slot to another request.
driver park(test_engine& engine, const ids& prompt,
            const std::function<void(request&)>& adjust = {}) {
    auto steered = drive(engine, prompt, 60, adjust);
    REQUIRE(steered.next());
    steered.answer(0, {steered.pick()});
    REQUIRE(steered.next());
    const auto other = make_prompt(77, 9);
    CHECK(consumer(engine.submit(other, 3)).rest() == continuation(other, 3));
    REQUIRE(engine.sched->n_parked() == 1);
    REQUIRE(steered.wanted()->slot == -1);
    return steered;
}

// Answers at random, and knows what the text must be.
class random_author {
public:
    random_author(driver one, unsigned seed) : driver_(std::move(one)), random_(seed) {}

    // False: it has ended.
    bool write() {
        if (!driver_.next()) return false;
        const auto& prompt = driver_.wanted()->prompt;
        const auto n_generated = static_cast<int>(text_.size() - prompt.size());
        REQUIRE(driver_.pick() == hash_of(text_));
        REQUIRE(driver_.known().n_tokens == static_cast<int>(text_.size()));
        REQUIRE(driver_.known().n_removable == n_generated);
        if (const auto& rows = driver_.event().rows; rows.block) {
            REQUIRE(is_row_of({hash_of(text_), 0, {}, rows}));
            REQUIRE(rows.layout.n_columns == static_cast<int>(text_.size()));
        }
        const int n_removed = static_cast<int>(random_() % 3) * n_generated / 3;
        ids added = make_prompt(static_cast<token_id>(50 + random_() % 50),
                                static_cast<int>(random_() % 6));
        if (random_() % 2 == 0) added = {hash_of(text_)};
        added.resize(std::min(added.size(),
                              static_cast<std::size_t>(driver_.known().n_left + n_removed - 1)));
        driver_.answer(n_removed, added);
        text_.resize(text_.size() - static_cast<std::size_t>(n_removed));
        text_ = text_ + added;
        return true;
    }
    const std::shared_ptr<request>& wanted() const { return driver_.wanted(); }

private:
    driver driver_;
    std::mt19937 random_;
    ids text_ = driver_.wanted()->prompt;
};

}  // namespace

TEST_CASE("steered: a pass is answered as before after its request has left its slot") {
    for (const bool can_truncate : {true, false}) {
        CAPTURE(can_truncate);
        test_engine engine(with(can_truncate));
        const auto prompt = make_prompt(1, 20);
        auto steered = park(engine, prompt, [](request& r) { r.capture = make_plan(); });
        const auto first = continuation(prompt, 1);
        CHECK(is_row_of({hash_of(prompt + first), 0, {}, steered.event().rows}));
        CHECK(steered.refused(2, {}) == errc::request);
        const auto second = steered.pick();
        CHECK(second == hash_of(prompt + first));
        engine.pass_round();
        CHECK(engine.sched->n_parked() == 1);  // it waits for its answer, not for a slot
        steered.answer(1, {7, 8});
        REQUIRE(steered.next());
        CHECK(steered.wanted()->slot == 0);
        CHECK(steered.pick() == hash_of(prompt + ids{7, 8}));
        CHECK(steered.event().rows.layout.n_columns == 22);
        CHECK(engine.model->cache(0) == prompt + ids{7, 8});
        steered.answer(0, {}, finish_reason::stop);
        CHECK_FALSE(steered.next());
        CHECK(steered.from().usage().completion_tokens == 2);
        CHECK(engine.sched->counters().n_requests == 2);
    }
}

TEST_CASE("steered: the answer that ends a parked request ends it at once") {
    test_engine engine;
    const auto ends_with = [&](const ids& added, std::optional<finish_reason> end, int n_tokens,
                               finish_reason reason) {
        auto steered = park(engine, make_prompt(1, 20), [](request& r) { r.stop_tokens = {8}; });
        steered.answer(0, added, end);
        CHECK_FALSE(steered.next());
        CHECK(engine.sched->n_parked() == 0);
        CHECK(steered.from().reason() == reason);
        CHECK(steered.from().usage().completion_tokens == n_tokens);
    };
    ends_with({7}, finish_reason::stop, 2, finish_reason::stop);
    ends_with({7, end_token, 9}, {}, 2, finish_reason::stop);
    ends_with({7, 8, 9}, {}, 2, finish_reason::stop_token);
    ends_with(make_prompt(3, 59), {}, 60, finish_reason::length);
    CHECK(engine.sched->counters().n_finished == 8);
}

TEST_CASE("steered: a parked request is cancelled, and ends with its engine") {
    for (const bool is_closed : {false, true}) {
        test_engine engine;
        auto steered = park(engine, make_prompt(1, 20));
        if (is_closed) {
            engine.sched->close();
        } else {
            engine.cancel(steered.wanted());
        }
        CHECK(engine.sched->n_parked() == 0);
        CHECK(steered.refused(0, {7}) == errc::closed);
        CHECK_THROWS_AS(steered.pick(), error);
        CHECK_FALSE(steered.next());
        if (is_closed) CHECK(steered.from().code() == errc::closed);
        CHECK((steered.from().reason() == finish_reason::cancelled) != is_closed);
    }
}

TEST_CASE("steered: a deterministic request gets back the very cells that it had") {
    test_engine engine;
    auto steered = park(engine, make_prompt(1, 20), [](request& r) {
        r.is_alone = true;
        r.cache_prompt = false;
    });
    const auto n_before = engine.sched->counters().n_prompt_tokens.load();
    const auto id = steered.pick();
    steered.answer(0, {id});
    REQUIRE(steered.next());
    CHECK(engine.sched->counters().n_prompt_tokens == n_before);
    CHECK(steered.pick() == continuation(make_prompt(1, 20), 3).back());
}

TEST_CASE("steered: a consumer that answers in time keeps its slot") {
    test_engine engine({}, mib, 64, nullptr, pace{std::chrono::hours(1)});
    const auto prompt = make_prompt(1, 5);
    auto steered = drive(engine, prompt, 50);
    REQUIRE(steered.next());
    const auto late = engine.submit(make_prompt(2, 5), 3);
    const auto waiter = std::make_shared<wake_handle>();
    REQUIRE_FALSE(late->box->arm(waiter));
    steered.answer(0, {steered.pick()});
    CHECK(steered.rest().size() == 49);
    CHECK(engine.sched->counters().n_parkings == 0);
    CHECK(consumer(late).rest().size() == 3);
}

TEST_CASE("steered: passes answered at random in few slots follow from their texts alone") {
    for (const unsigned seed : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u}) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        const auto below = [&](int n) {
            return static_cast<int>(random() % static_cast<unsigned>(n));
        };
        const int n_slots = 1 + below(2);
        test_engine engine(
            {.n_slots = n_slots, .n_chunk = 1 + below(16), .can_truncate = below(4) > 0});
        std::vector<std::unique_ptr<random_author>> authors;
        for (unsigned i = 0; i < 5; ++i) {
            const auto prompt = make_prompt(1 + below(3), 1 + below(40));
            auto one = drive(engine, prompt, 60, [&](request& r) {
                r.run_ahead = below(3);
                r.is_alone = below(3) == 0;
                r.cache_prompt = below(3) > 0;
                r.priority = below(2);
                if (below(2) == 0) r.capture = make_plan();
                if (below(4) == 0) r.wanted_slot = below(n_slots);
            });
            authors.push_back(std::make_unique<random_author>(std::move(one), seed * 10 + i));
        }
        for (int n_left = 300; n_left > 0 && !authors.empty(); --n_left) {
            const auto i = static_cast<std::size_t>(below(static_cast<int>(authors.size())));
            if (below(60) > 0 && authors[i]->write()) continue;
            engine.cancel(authors[i]->wanted());  // wherever it is
            authors.erase(authors.begin() + static_cast<std::ptrdiff_t>(i));
        }
        CHECK(engine.sched->counters().n_parkings > 0);
        for (const auto& author : authors) engine.cancel(author->wanted());
        CHECK(engine.sched->n_parked() == 0);
    }
}

TEST_CASE("steered: memory that runs out around a parked request ends requests, and none waits") {
    for (const bool is_alone : {false, true}) {
        long i_failed = 0;
        for (bool has_failed = true; has_failed; ++i_failed) {
            CAPTURE(i_failed);
            const int n_before = n_allocations_failed;
            fake_options options;
            options.on_decode = allocation_failure(i_failed);
            test_engine engine(options);
            std::vector<driver> drivers;
            std::vector<ids> texts;
            for (token_id i = 0; i < 2; ++i) {
                texts.push_back(make_prompt(i + 1, 9));
                drivers.push_back(
                    drive(engine, texts.back(), 4, [=](request& r) { r.is_alone = is_alone; }));
            }
            for (int round = 0; round < 5; ++round) {
                for (std::size_t i = 0; i < 2; ++i) {
                    if (!drivers[i].next()) continue;
                    try {
                        const auto picked = drivers[i].pick();
                        CHECK(picked == hash_of(texts[i]));
                        drivers[i].answer(0, {picked});
                        texts[i].push_back(picked);
                    } catch (const error& failure) {  // it has ended since
                        CHECK(failure.code() == errc::closed);
                    }
                }
            }
            has_failed = n_allocations_failed > n_before;
            for (std::size_t i = 0; i < 2; ++i) {
                const bool is_whole = drivers[i].from().reason() == finish_reason::length;
                CHECK((texts[i].size() == 13 || !is_whole));
                if (!is_whole) CHECK(drivers[i].from().code() == errc::out_of_memory);
            }
        }
        CHECK(i_failed > 20);
    }
}

TEST_CASE("steered: closing the engine ends a request that waits for its answer") {
    test_engine engine;
    auto steered = drive(engine, make_prompt(1, 5), 60);
    REQUIRE(steered.next());
    engine.sched->close();
    CHECK(steered.refused(0, {7}) == errc::closed);
    CHECK_FALSE(steered.next());
    CHECK(steered.from().code() == errc::closed);
}

TEST_CASE("steered: a pass outlives its request") {
    std::shared_ptr<forward_pass> kept;
    {
        test_engine engine;
        auto steered = drive(engine, make_prompt(1, 5), 60);
        REQUIRE(steered.next());
        kept = steered.event().pass;
        engine.cancel(steered.wanted());
    }
    CHECK(kept->logits()->front() == static_cast<float>(hash_of(make_prompt(1, 5))));
}

TEST_CASE("steered: many at once beside plain requests, cancelled at random") {
    for (const int n_slots : {4, 1}) {
        test_engine engine(with(true, n_slots, 4096));
        std::atomic<int> n_wrong{0};
        std::vector<std::thread> threads;
        for (unsigned seed = 1; seed <= 6; ++seed) {
            threads.emplace_back([&, seed] {
                std::mt19937 random(seed);
                for (int round = 0; round < 20; ++round) {
                    const auto prompt = make_prompt(static_cast<token_id>(seed * 100) + round, 12);
                    if (seed % 3 == 0) {
                        consumer plain(engine.submit(prompt, 15));
                        if (plain.rest() != continuation(prompt, 15)) ++n_wrong;
                        continue;
                    }
                    auto steered =
                        drive(engine, prompt, 30, [](request& r) { r.capture = make_plan(); });
                    ids text = prompt;
                    const auto n_passes = random() % 12;
                    for (unsigned n = 0; n < n_passes && steered.next(); ++n) {
                        const auto picked = steered.pick();
                        if (picked != hash_of(text)) ++n_wrong;
                        const auto n_removable = static_cast<unsigned>(steered.known().n_removable);
                        if (random() % 4 == 0) {
                            const auto n_removed = random() % (1 + n_removable);
                            steered.answer(static_cast<int>(n_removed), {});
                            text.resize(text.size() - n_removed);
                        } else {
                            steered.answer(0, {picked, 7});
                            text = text + ids{picked, 7};
                        }
                    }
                    if (random() % 2 == 0 && steered.next()) {
                        // From another thread, while this one answers.
                        std::thread other([&] { engine.sched->cancel(steered.wanted()); });
                        try {
                            steered.pick();
                            steered.answer(0, {7});
                        } catch (const error&) {
                        }
                        other.join();
                    }
                    engine.cancel(steered.wanted());
                }
            });
        }
        for (auto& thread : threads) thread.join();
        CHECK(n_wrong == 0);
        if (n_slots == 1) CHECK(engine.sched->counters().n_parkings > 0);
    }
}
