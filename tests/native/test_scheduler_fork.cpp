// scheduler: prompts that begin alike are evaluated once and copied.
#include <doctest/doctest.h>

#include <utility>
#include <vector>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

fake_options slots(int n) {
    fake_options options;
    options.n_slots = n;
    options.n_ctx = 512;
    return options;
}

std::size_t n_decoded(const test_engine& engine) {
    return engine.sched->counters().n_prompt_tokens;
}

}  // namespace

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
    CHECK(engine.model->copies() == std::vector<std::pair<slot_id, slot_id>>{{0, 1}});
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
