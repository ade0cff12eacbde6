// How much of a prompt goes between two tokens of a text, and which prompts wait for each other.
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <thread>
#include <vector>

#include "sched/step_costs.h"
#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;
using namespace std::chrono_literals;

namespace {

step_costs learnt(step_costs costs, step_costs::seconds text_step, step_costs::seconds token) {
    for (int i = 0; i < 50; ++i) {
        costs.note(false, 4, text_step);
        costs.note(true, 64, 64 * token);
    }
    return costs;
}

// The sizes of the steps that evaluated a prompt beside a text.
std::vector<std::size_t> pieces(const pace& given, std::chrono::microseconds each) {
    fake_options options{.n_slots = 2, .n_ctx = 4096, .n_chunk = 512};
    options.on_decode = [each](std::span<const step_token> tokens) {
        std::this_thread::sleep_for(4ms + each * (tokens.size() > 1 ? tokens.size() : 0));
    };
    test_engine engine(options, mib, 64, nullptr, given);
    const auto warm = engine.submit(make_prompt(3, 64), 1);
    consumer(warm).rest();
    // It goes on whether its tokens are taken or not.
    const auto text =
        engine.submit(make_prompt(1, 2), 2000, [](request& r) { r.run_ahead = 2000; });
    consumer(text).take(2);
    const auto n_before = engine.model->decodes().size();
    consumer(engine.submit(make_prompt(2, 600), 1)).rest();
    std::vector<std::size_t> found;
    const auto decodes = engine.model->decodes();
    for (auto i = n_before; i < decodes.size(); ++i) {
        if (decodes[i].size() > 2) found.push_back(decodes[i].size());
    }
    engine.cancel(text);
    return found;
}

}  // namespace

TEST_CASE("pace: pieces of a prompt last about as long as a step of the text") {
    CHECK(step_costs().n_between(512) == 128);  // nothing was seen yet
    CHECK(learnt(step_costs(), 40ms, 1ms).n_between(512) == 40);
    CHECK(learnt(step_costs(), 40ms, 1ms).n_between(32) == 32);
    // Smaller pieces would take the model much longer, larger ones hold texts up for little.
    CHECK(learnt(step_costs(), 13ms, 3ms).n_between(512) == 16);
    CHECK(learnt(step_costs(), 40ms, 1us).n_between(512) == 128);
    CHECK(learnt(step_costs(), 40ms, 1ms).of_prompt(100) == step_costs::seconds(0.1));
}

TEST_CASE("pace: the time of a token in a step of texts is learnt, also where it is most of it") {
    for (const double token_s : {0.001, 0.004, 0.02}) {
        CAPTURE(token_s);
        step_costs costs;
        const double rest_s = 0.008;
        for (int i = 0; i < 20; ++i) {
            for (const std::size_t n : {1, 2, 5}) {
                costs.note(false, n,
                           step_costs::seconds(rest_s + token_s * static_cast<double>(n)));
            }
        }
        const double ratio = (rest_s + 4 * token_s) / (rest_s + token_s);
        CHECK(costs.of_texts(4) / costs.of_texts(1) == doctest::Approx(ratio));
    }
}

TEST_CASE("pace: a gap that was asked for decides alone") {
    const step_costs::seconds gap = 100ms;
    CHECK(learnt(step_costs(gap), 40ms, 1ms).n_between(512) == 60);
    CHECK(learnt(step_costs(gap), 40ms, 100us).n_between(512) == 512);
    CHECK(learnt(step_costs(gap), 120ms, 1ms).n_between(512) == 1);
    CHECK(learnt(step_costs(step_costs::seconds(1e12)), 40ms, 1ms).n_between(512) == 512);
}

TEST_CASE("pace: a prompt beside a text comes in pieces, alone in whole steps") {
    for (const auto n : pieces({}, 100us)) CHECK(n <= 128);
    const auto slow = pieces({.max_gap = 20ms}, 200us);
    REQUIRE(slow.size() > 8);
    std::size_t n_small = 0;
    for (const auto n : slow) n_small += n <= 100;  // (20 - 4) ms of 0.2 ms each is 80
    CHECK(n_small >= slow.size() - 1);
    const auto fast = pieces({.max_gap = 500ms}, 200us);
    CHECK(fast.front() > 400);
}

TEST_CASE("pace: prompts that come together wait for each other, and go together") {
    fake_options options{.n_slots = 4, .n_ctx = 4096, .n_chunk = 512};
    options.on_decode = [](std::span<const step_token> tokens) {
        std::this_thread::sleep_for(1ms + 4ms * (tokens.size() / 8));
    };
    test_engine engine(options, mib, 64, nullptr, pace{});
    consumer(engine.submit(make_prompt(9, 64), 1))
        .rest();  // from here on it is known what they take
    engine.pass_round();
    const auto n_before = engine.model->decodes().size();
    std::vector<std::shared_ptr<request>> asked;
    for (token_id i = 1; i <= 4; ++i) asked.push_back(engine.submit(make_prompt(i, 100), 3));
    for (const auto& one : asked) consumer(one).rest();
    CHECK(engine.model->decodes()[n_before].size() == 4 * 99);
}
