// reuse_plan: which cached tokens a prompt takes over, against an exhaustive search.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <set>
#include <vector>

#include "sched/reuse_plan.h"

using namespace kqview;

namespace {

using ids = std::vector<token_id>;

ids random_ids(std::mt19937& random, std::size_t n, int n_vocab) {
    std::uniform_int_distribution<token_id> any(0, n_vocab - 1);
    ids made(n);
    for (auto& id : made) id = any(random);
    return made;
}

ids apply(const reuse_plan& plan, const ids& cached) {
    ids kept;
    for (const auto& run : plan.runs) {
        const auto from = cached.begin() + static_cast<std::ptrdiff_t>(run.start);
        kept.insert(kept.end(), from, from + static_cast<std::ptrdiff_t>(run.n_tokens));
    }
    return kept;
}

ids without(ids tokens, const std::vector<token_range>& gaps) {
    for (auto i = gaps.size(); i-- > 0;) {
        const auto from = tokens.begin() + static_cast<std::ptrdiff_t>(gaps[i].start);
        tokens.erase(from, from + static_cast<std::ptrdiff_t>(gaps[i].n_tokens));
    }
    return tokens;
}

// The most tokens of the prompt that any runs make up: every place of the cache that each of its
// places can be reached at.
std::size_t most(const ids& cached, const ids& prompt, std::size_t n_run_min) {
    std::vector<std::set<std::size_t>> ends(prompt.size() + 1);
    for (std::size_t i = 0; i <= common_prefix(cached, prompt); ++i) ends[i].insert(i);
    std::size_t best = 0;
    for (std::size_t at = 0; at <= prompt.size(); ++at) {
        if (ends[at].empty()) continue;
        best = at;
        for (auto from = *ends[at].begin(); from < cached.size(); ++from) {
            for (std::size_t n = 1; at + n <= prompt.size() && from + n <= cached.size(); ++n) {
                if (cached[from + n - 1] != prompt[at + n - 1]) break;
                if (n >= n_run_min) ends[at + n].insert(from + n);
            }
        }
    }
    return best;
}

void check(const reuse_plan& plan, const ids& cached, const ids& prompt) {
    const auto kept = apply(plan, cached);
    REQUIRE(kept.size() == plan.n_kept());
    REQUIRE(kept.size() <= prompt.size());
    CHECK(std::equal(kept.begin(), kept.end(), prompt.begin()));
    CHECK(without(cached, gaps_of(plan, cached.size())) == kept);
    for (std::size_t i = 0; i < plan.runs.size(); ++i) {
        const auto& run = plan.runs[i];
        CHECK(run.n_tokens > 0);
        CHECK(run.start + run.n_tokens <= cached.size());
        if (i > 0) CHECK(run.start >= plan.runs[i - 1].start + plan.runs[i - 1].n_tokens);
    }
}

ids numbers(int first, int n) {
    ids made;
    for (int i = 0; i < n; ++i) made.push_back(first + i);
    return made;
}

ids operator+(ids left, const ids& right) {
    left.insert(left.end(), right.begin(), right.end());
    return left;
}

double seconds_of(const ids& cached, const ids& prompt) {
    const auto start = std::chrono::steady_clock::now();
    check(plan_shift(cached, prompt, 16), cached, prompt);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE(
    "reuse_plan: of random texts no choice of runs keeps more, and the beginning is kept whole") {
    std::mt19937 random(1);
    for (int i = 0; i < 20'000; ++i) {
        const auto n_vocab = 1 + static_cast<int>(random() % 4);
        const auto cached = random_ids(random, random() % 15, n_vocab);
        const auto prompt = random_ids(random, random() % 15, n_vocab);
        const auto n_run_min = 1 + random() % 5;
        const auto plan = plan_shift(cached, prompt, n_run_min);
        check(plan, cached, prompt);
        CHECK(plan.n_kept() == most(cached, prompt, n_run_min));
        CHECK(plan.n_prefix() >= common_prefix(cached, prompt));
    }
}

TEST_CASE("reuse_plan: whatever ranges were pruned, all that is left is kept") {
    std::mt19937 random(2);
    for (int i = 0; i < 300; ++i) {
        const auto cached = random_ids(random, 400, 1 << 15);
        ids prompt;
        std::size_t at = 0;
        while (at < cached.size()) {
            // Runs of 8 and more, gaps of 1 and more.
            const auto n_run = std::min<std::size_t>(8 + random() % 60, cached.size() - at);
            const auto from = cached.begin() + static_cast<std::ptrdiff_t>(at);
            prompt.insert(prompt.end(), from, from + static_cast<std::ptrdiff_t>(n_run));
            at += n_run + 1 + random() % 30;
        }
        const bool ends_short = cached.size() >= 8 && prompt.size() >= 8;
        REQUIRE(ends_short);
        const auto n_most = most(cached, prompt, 8);
        auto plan = plan_shift(cached, prompt, 8);
        check(plan, cached, prompt);
        CHECK(plan.n_kept() == n_most);
        CHECK(plan.n_kept() + 8 > prompt.size());  // a last run may be shorter
        const auto longer = prompt + numbers(1 << 20, 50);
        CHECK(plan_shift(cached, longer, 8).n_kept() == plan.n_kept());
    }
}

TEST_CASE("reuse_plan: several ranges at once, and new tokens behind them") {
    const auto cached = numbers(0, 100);
    const auto prompt = numbers(0, 10) + numbers(20, 30) + numbers(60, 40) + numbers(500, 7);
    const auto plan = plan_shift(cached, prompt, 16);
    CHECK(apply(plan, cached) == numbers(0, 10) + numbers(20, 30) + numbers(60, 40));
    REQUIRE(gaps_of(plan, 100).size() == 2);
    CHECK(gaps_of(plan, 100)[0].start == 10);
    CHECK(gaps_of(plan, 100)[0].n_tokens == 10);
    CHECK(gaps_of(plan, 100)[1].start == 50);
}

TEST_CASE("reuse_plan: short runs and what follows an insertion are not kept") {
    const auto cached = numbers(0, 100);
    CHECK(plan_shift(cached, numbers(0, 10) + numbers(20, 15), 16).n_kept() == 10);
    CHECK(plan_shift(cached, numbers(0, 10) + numbers(20, 16), 16).n_kept() == 26);
    CHECK(plan_shift(cached, numbers(0, 10) + numbers(500, 1) + numbers(10, 90), 16).n_kept() ==
          10);
    CHECK(plan_shift(cached, numbers(5, 10), 16).n_kept() == 0);
    CHECK(plan_shift(cached, numbers(50, 50) + numbers(0, 50), 16).n_kept() == 50);
}

TEST_CASE("reuse_plan: a run that repeats the end of the beginning counts from there") {
    // A template's head stands before both messages; the first one is gone.
    const auto head = numbers(900, 6);
    const auto cached = numbers(0, 20) + head + numbers(100, 40) + head + numbers(200, 12);
    const auto prompt = numbers(0, 20) + head + numbers(200, 12) + numbers(300, 3);
    const auto plan = plan_shift(cached, prompt, 16);
    check(plan, cached, prompt);
    CHECK(plan.n_kept() == 38);
    CHECK(plan.n_prefix() == 26);  // the beginning is exact: none of it is given up
}

TEST_CASE("reuse_plan: an accidental run does not keep the true one from being found") {
    // 16 tokens of the message that stays also begin the one that is gone.
    const auto same = numbers(700, 16);
    const auto cached = numbers(0, 20) + same + numbers(100, 30) + same + numbers(200, 4) +
                        numbers(300, 50) + numbers(400, 40);
    const auto prompt = numbers(0, 20) + same + numbers(200, 4) + numbers(400, 40);
    const auto plan = plan_shift(cached, prompt, 20);
    check(plan, cached, prompt);
    CHECK(plan.n_kept() == prompt.size());
}

TEST_CASE("reuse_plan: cutting keeps the first tokens") {
    const auto cached = numbers(0, 100);
    const auto prompt = numbers(0, 10) + numbers(20, 30) + numbers(60, 40);
    for (std::size_t n = 0; n <= 90; ++n) {
        auto plan = plan_shift(cached, prompt, 16);
        cut(plan, n);
        check(plan, cached, prompt);
        CHECK(plan.n_kept() == std::min<std::size_t>(n, 80));
    }
}

TEST_CASE("reuse_plan: long texts take little time, also where they repeat themselves") {
    std::mt19937 random(3);
    const std::size_t n = 32'768;
    const auto text = random_ids(random, n, 1 << 15);
    auto pruned = text;
    for (std::size_t at = 30'000; at > 100; at -= 1'000) {
        const auto from = pruned.begin() + static_cast<std::ptrdiff_t>(at);
        pruned.erase(from, from + 100);
    }
    CHECK(plan_shift(text, pruned, 16).n_kept() == pruned.size());
    CHECK(seconds_of(text, pruned) < 5);
    CHECK(seconds_of(ids{1} + ids(n, 7), ids(n, 7)) < 5);
    CHECK(seconds_of(random_ids(random, n, 2), random_ids(random, n, 2)) < 5);
}
