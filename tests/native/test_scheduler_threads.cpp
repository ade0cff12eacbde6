// scheduler under many threads: consumers, cancellations, submissions and close at once; then, for
// as long as KQVIEW_SOAK_S says (3 s), everything that callers may do at random, while decodes,
// admissions and samplers fail now and then. Every request ends, with right tokens and right rows,
// nothing is left over, and the sanitizer has nothing to say. KQVIEW_SOAK_SEED repeats the choices,
// not the threads' timing.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "scheduler_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

fake_options make_options(int n_slots) {
    fake_options options;
    options.n_slots = n_slots;
    return options;
}

constexpr int n_slots = 4;
constexpr int n_consumers = 8;
constexpr int n_queue = 2;
constexpr int n_owners = 3;
constexpr std::size_t budget_bytes = 24 * 4096;

using random = std::mt19937_64;

double number_from(const char* name, double otherwise) {
    const char* const text = std::getenv(name);
    return text ? std::strtod(text, nullptr) : otherwise;
}

int below(random& rng, int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); }
bool one_in(random& rng, int n) { return below(rng, n) == 0; }

struct tally {
    std::atomic<long> n_submitted{0}, n_refused{0}, n_tokens{0}, n_rows{0}, n_orders{0}, n_busy{0};
    std::atomic<long> n_length{0}, n_stopped{0}, n_cancelled{0}, n_decode{0}, n_pool{0}, n_other{0};
    std::atomic<long> n_wrong{0};
    std::mutex mutex;
    std::string what;  // the first thing that was wrong

    void wrong(const std::string& message) {
        ++n_wrong;
        const std::lock_guard lock(mutex);
        if (what.empty()) what = message;
    }
};

// Few first ids and long common beginnings, so that requests reuse, fork and cut what others left.
ids random_prompt(random& rng) {
    auto prompt = make_prompt(1 + below(rng, 3), 1 + below(rng, 60));
    if (one_in(rng, 2)) prompt.push_back(below(rng, 5));
    return prompt;
}

void randomise(request& r, random& rng) {
    r.run_ahead = below(rng, 9);
    r.priority = below(rng, 3);
    r.owner = std::string(1, static_cast<char>('a' + below(rng, n_owners)));
    r.on_full = static_cast<full_policy>(below(rng, 3));
    r.wait_limit = std::chrono::duration<double>(0.02 * below(rng, 3));
    if (one_in(rng, 4)) r.wanted_slot = below(rng, n_slots);
    if (!one_in(rng, 3)) r.capture = make_plan(1 + below(rng, 3));
    if (r.capture && one_in(rng, 4)) {
        r.n_prompt_rows = 1 + below(rng, static_cast<int>(r.prompt.size()));
        r.only_attends = one_in(rng, 2);
    }
    if (one_in(rng, 5)) r.stop_tokens = {continuation(r.prompt, 4).back()};
    r.is_steered = !r.only_attends && one_in(rng, 3);
    r.is_alone = one_in(rng, 6);
}

// Rows that were taken and are looked at again when they go.
struct held_row {
    std::shared_ptr<lease> block;
    token_id value;
    std::size_t n_bytes;

    bool is_intact() const {
        for (std::size_t at = 0; at + sizeof value <= n_bytes; at += sizeof value) {
            if (std::memcmp(block->data() + at, &value, sizeof value) != 0) return false;
        }
        return true;
    }
};

class soak {
public:
    soak(std::uint64_t seed, double limit_s)
        : seed_(seed),
          ends_(clock::now() + std::chrono::duration_cast<clock::duration>(
                                   std::chrono::duration<double>(limit_s))),
          engine_(options_with_faults(seed), budget_bytes, n_queue) {}

    void run() {
        std::vector<std::thread> threads;
        for (int i = 0; i < n_consumers; ++i) threads.emplace_back([this, i] { consume(i); });
        threads.emplace_back([this] { cancel_others(); });
        threads.emplace_back([this] { order(); });
        threads.emplace_back([this] { look(); });
        for (auto& thread : threads) thread.join();
        {
            const std::lock_guard lock(mutex_);
            running_.clear();
        }
        engine_.pass_round();
        check_end();
    }

private:
    using clock = std::chrono::steady_clock;

    static fake_options options_with_faults(std::uint64_t seed) {
        const auto rng = std::make_shared<random>(seed);  // of the engine thread alone
        fake_options options;
        options.n_slots = n_slots;
        options.n_ctx = 96;
        options.keeps_records = false;
        options.leaves_tokens = true;
        options.on_decode = [rng](auto) {
            if (one_in(*rng, 300)) throw error(errc::decode, "fake");
        };
        options.on_want = [rng] {
            if (one_in(*rng, 300)) throw error(errc::unsupported_model, "fake");
        };
        options.on_copy = [rng] {
            if (one_in(*rng, 20)) throw std::bad_alloc();
        };
        options.on_pick = [seed](token_id) {
            thread_local random mine(seed);  // consumers of steered requests pick too
            if (one_in(mine, 2000)) throw error(errc::invalid_sampling, "fake");
        };
        return options;
    }

    bool is_over() const { return clock::now() >= ends_; }

    // ---- consumers

    void consume(int number) {
        random rng(seed_ * 100 + static_cast<std::uint64_t>(number));
        std::deque<held_row> held;
        while (!is_over()) {
            const auto wanted = try_submit(rng);
            if (!wanted) continue;
            take(wanted, rng, held);
            while (!held.empty() && (held.size() > 12 || one_in(rng, 3))) drop_first(held);
        }
        while (!held.empty()) drop_first(held);
    }

    std::shared_ptr<request> try_submit(random& rng) {
        try {
            const auto wanted = engine_.submit(random_prompt(rng), 1 + below(rng, 40),
                                               [&](request& r) { randomise(r, rng); });
            ++tally_.n_submitted;
            const std::lock_guard lock(mutex_);
            running_.push_back(wanted);
            if (running_.size() > 64) running_.pop_front();
            return wanted;
        } catch (const error& failure) {
            if (failure.code() != errc::queue_full) tally_.wrong(failure.what());
            ++tally_.n_refused;
            std::this_thread::sleep_for(std::chrono::microseconds(200));
            return nullptr;
        }
    }

    void take(const std::shared_ptr<request>& wanted, random& rng, std::deque<held_row>& held) {
        // Some stop halfway: by a cancellation that is waited for, by one that is not, or by
        // closing.
        const int n_most = one_in(rng, 3) ? below(rng, 20) : 1000;
        ids taken;
        consumer taker(wanted);
        try {
            for (int i = 0; i < n_most; ++i) {
                const auto item = taker.take_item();
                if (!item.token && !item.prompt && !item.forward) break;
                if (item.token) taken.push_back(item.token->id);
                hold(*wanted, taken, item, rng, held);
                if (item.end) break;
                if (one_in(rng, 50))
                    std::this_thread::sleep_for(std::chrono::microseconds(below(rng, 2000)));
                if (item.forward) answer(wanted, *item.forward->pass, taken);
            }
        } catch (const error& failure) {
            // Of a picker, or it was cancelled.
            if (failure.code() != errc::closed && failure.code() != errc::invalid_sampling)
                tally_.wrong(failure.what());
        } catch (const std::runtime_error& nothing_came) {
            tally_.wrong(nothing_came.what());
        }
        one_in(rng, 2) ? engine_.cancel(wanted) : engine_.sched->cancel(wanted);
        wait_settled(*wanted->box);
        check_request(*wanted, taken);
    }

    // As a plain request would go on. The id that ends the text is none of it.
    void answer(const std::shared_ptr<request>& wanted, forward_pass& pass, ids& taken) {
        const auto id = pass.pick(*wanted, {}, {}).id;
        engine_.sched->answer(wanted, pass, {0, {id}, {}});
        if (id != end_token && !wanted->stops_at(id)) taken.push_back(id);
    }

    void hold(const request& wanted, const ids& taken, const mailbox::item& item, random& rng,
              std::deque<held_row>& held) {
        ++tally_.n_tokens;
        const auto& rows = item.token    ? item.token->rows
                           : item.prompt ? item.prompt->rows
                                         : item.forward->rows;
        if (!rows.block) return;
        token_id value = 0;
        if (item.token) {
            value = item.token->id;
        } else if (item.forward) {
            value = hash_of(wanted.prompt + taken);
        } else {
            const auto n_seen = static_cast<std::size_t>(item.prompt->start + item.prompt->n_rows);
            value = hash_of(std::span(wanted.prompt).first(n_seen));
        }
        ++tally_.n_rows;
        held.push_back({rows.block, value, rows.layout.size_bytes});
        if (!one_in(rng, 4)) drop_last(held);
    }

    void drop_first(std::deque<held_row>& held) {
        if (!held.front().is_intact()) tally_.wrong("a row changed while it was held");
        held.pop_front();
    }
    void drop_last(std::deque<held_row>& held) {
        if (!held.back().is_intact()) tally_.wrong("a row is not its token's");
        held.pop_back();
    }

    void check_request(const request& wanted, const ids& taken) {
        const auto end = wanted.box->end();
        if (!end) return tally_.wrong("a request did not end");
        const auto whole = continuation(wanted.prompt, static_cast<int>(taken.size()));
        if (taken != whole) {
            const auto right = std::mismatch(taken.begin(), taken.end(), whole.begin()).first;
            tally_.wrong("token " + std::to_string(right - taken.begin()) + " of " +
                         std::to_string(taken.size()) + " is wrong behind a prompt of " +
                         std::to_string(wanted.prompt.size()) + ", " +
                         std::to_string(end->usage.cached_tokens) + " cached, slot " +
                         std::to_string(wanted.slot));
        }
        switch (end->reason) {
            case finish_reason::length: ++tally_.n_length; break;
            case finish_reason::stop:
            case finish_reason::stop_token: ++tally_.n_stopped; break;
            case finish_reason::cancelled: ++tally_.n_cancelled; break;
            case finish_reason::error: count_failure(*end->failure); break;
        }
    }

    void count_failure(const error& failure) {
        switch (failure.code()) {
            case errc::decode: ++tally_.n_decode; break;
            case errc::pool_exhausted: ++tally_.n_pool; break;
            case errc::unsupported_model:
            case errc::invalid_sampling:
            case errc::out_of_memory: ++tally_.n_other; break;
            default: tally_.wrong(failure.what());
        }
    }

    // ---- the others

    void cancel_others() {
        random rng(seed_ + 1);
        std::uint64_t n_seen = 0;
        while (!is_over()) {
            // Never while the engine stands still: a cancellation would set going again what got
            // stuck.
            if (std::exchange(n_seen, engine_.sched->counters().n_decodes.load()) ==
                engine_.sched->counters().n_decodes) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                continue;
            }
            std::shared_ptr<request> victim;
            {
                const std::lock_guard lock(mutex_);
                if (!running_.empty())
                    victim = running_[static_cast<std::size_t>(
                        below(rng, static_cast<int>(running_.size())))];
            }
            if (victim && one_in(rng, 2)) engine_.sched->cancel(victim);
            std::this_thread::sleep_for(std::chrono::microseconds(below(rng, 3000)));
        }
    }

    void order() {
        random rng(seed_ + 2);
        std::vector<std::byte> blob(1 << 16);
        std::size_t n_blob = 0;
        while (!is_over()) {
            const int what = below(rng, 5);
            const int n = below(rng, 40);
            try {
                engine_.sched->run_on_slot(below(rng, n_slots), [&](slot_cache& idle) {
                    if (what == 0) n_blob = idle.save(blob);
                    if (what == 1 && n_blob > 0)
                        idle.restore(std::span(blob).first(n_blob), all_exact);
                    if (what == 2 && !idle.tokens().empty())
                        idle.truncate(static_cast<std::size_t>(n) % idle.tokens().size());
                    if (what == 3 && idle.tokens().size() > 2)
                        idle.remove(std::array{token_range{1, 1}});
                    if (what == 4) idle.clear();
                });
                ++tally_.n_orders;
            } catch (const error& failure) {
                if (failure.code() != errc::busy) tally_.wrong(failure.what());
                ++tally_.n_busy;
            }
            std::this_thread::sleep_for(std::chrono::microseconds(below(rng, 500)));
        }
    }

    void look() {
        while (!is_over()) {
            for (const auto& slot : engine_.sched->slots()) {
                if (slot.n_tokens > 96) tally_.wrong("a slot holds more than fits");
                if ((slot.active == 0) != (slot.state == slot_state::idle))
                    tally_.wrong("an idle slot works");
            }
            const auto& seen = engine_.sched->counters();
            const auto n_ended = seen.n_finished + seen.n_cancelled + seen.n_failed;
            if (engine_.sched->n_queued() > n_owners * n_queue || n_ended > 1u << 30)
                tally_.wrong("counts");
            if (engine_.pool->stats().allocated_bytes > budget_bytes) tally_.wrong("over budget");
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    }

    void check_end() {
        const auto& seen = engine_.sched->counters();
        const auto n_ended = seen.n_finished + seen.n_cancelled + seen.n_failed;
        std::printf(
            "soak: seed %llu: %ld requests (%ld length, %ld stopped, %ld cancelled, %ld failed "
            "decodes, "
            "%ld without memory, %ld other faults), %ld refused, %ld tokens, %ld rows, %ld orders, "
            "%ld busy, "
            "%llu decodes\n",
            static_cast<unsigned long long>(seed_), tally_.n_submitted.load(),
            tally_.n_length.load(), tally_.n_stopped.load(), tally_.n_cancelled.load(),
            tally_.n_decode.load(), tally_.n_pool.load(), tally_.n_other.load(),
            tally_.n_refused.load(), tally_.n_tokens.load(), tally_.n_rows.load(),
            tally_.n_orders.load(), tally_.n_busy.load(),
            static_cast<unsigned long long>(seen.n_decodes.load()));
        std::fflush(stdout);
        INFO("seed ", seed_, ": ", tally_.what);
        CHECK(tally_.n_wrong == 0);
        CHECK(n_ended == static_cast<std::uint64_t>(tally_.n_submitted));
        CHECK(engine_.sched->n_queued() == 0);
        for (slot_id slot = 0; slot < n_slots; ++slot) {
            CHECK_FALSE(is_busy(*engine_.sched, slot));
            CHECK(engine_.model->cache(slot) == engine_.sched->tokens_of(slot));
        }
        const auto pool = engine_.pool->stats();
        CHECK(pool.n_leased == 0);
        CHECK(pool.leased_bytes == 0);
        CHECK(tally_.n_length > 0);
        CHECK(tally_.n_cancelled > 0);
        CHECK(tally_.n_orders > 0);
    }

    const std::uint64_t seed_;
    const clock::time_point ends_;
    test_engine engine_;
    tally tally_;
    std::mutex mutex_;
    std::deque<std::shared_ptr<request>> running_;  // the newest, for cancel_others
};

}  // namespace

TEST_CASE("scheduler: consumers on many threads each get exactly their own tokens") {
    constexpr int n_threads = 8;
    constexpr int n_requests = 15;
    test_engine engine(make_options(4), 64 * 4096);
    std::atomic<int> n_wrong{0};
    std::atomic<int> n_right{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; ++t) {
        threads.emplace_back([&, t] {
            for (int i = 0; i < n_requests; ++i) {
                const auto prompt = make_prompt(t * 100 + i, 3 + (t * 7 + i) % 20);
                const int max_tokens = 5 + (t + i) % 20;
                consumer taker(engine.submit(prompt, max_tokens, [&](request& r) {
                    r.run_ahead = (t + i) % 4;
                    r.priority = t % 3;
                    r.on_full = i % 2 == 0 ? full_policy::wait : full_policy::drop;
                    if (i % 3 != 0) r.capture = make_plan();
                }));
                ids taken;
                while (const auto token = taker.next()) {
                    taken.push_back(token->id);
                    if (token->rows.block && !is_row_of(*token)) ++n_wrong;
                }
                ++(taken == continuation(prompt, max_tokens) ? n_right : n_wrong);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    CHECK(n_wrong == 0);
    CHECK(n_right == n_threads * n_requests);
    CHECK(engine.sched->counters().n_requests == n_threads * n_requests);
}

TEST_CASE("scheduler: cancellations from other threads leave every cache true to its tokens") {
    constexpr int n_threads = 6;
    constexpr int n_requests = 40;
    for (const bool can_truncate : {true, false}) {
        auto options = make_options(4);
        options.can_truncate = can_truncate;
        test_engine engine(options);
        std::atomic<int> n_wrong{0};
        std::vector<std::thread> threads;
        for (int t = 0; t < n_threads; ++t) {
            threads.emplace_back([&, t] {
                for (int i = 0; i < n_requests; ++i) {
                    // Few first ids, so that requests meet what others left.
                    const auto prompt = make_prompt(1 + (t + i) % 3, 4 + i % 11);
                    const auto wanted = engine.submit(prompt, 12, [&](request& r) {
                        r.run_ahead = i % 5;
                        r.capture = make_plan();
                    });
                    std::thread cancelling([&, t, i] {
                        std::this_thread::sleep_for(
                            std::chrono::microseconds((t * 131 + i * 37) % 500));
                        engine.cancel(wanted);
                    });
                    consumer taker(wanted);
                    const auto taken = taker.rest();
                    cancelling.join();
                    if (taken != first_of(continuation(prompt, 12), taken.size())) ++n_wrong;
                    const auto reason = taker.reason();
                    const bool is_whole = reason == finish_reason::length;
                    if (!is_whole && reason != finish_reason::cancelled) ++n_wrong;
                    if (!is_whole && taken.size() == 12) ++n_wrong;
                }
            });
        }
        for (auto& thread : threads) thread.join();
        CHECK(n_wrong == 0);
        for (slot_id slot = 0; slot < 4; ++slot) {
            CHECK_FALSE(is_busy(*engine.sched, slot));
            CHECK(engine.model->cache(slot) == engine.sched->tokens_of(slot));
        }
    }
}

TEST_CASE("scheduler: every request that was let in ends when close comes between submissions") {
    constexpr int n_threads = 4;
    constexpr int n_rounds = 25;
    std::atomic<int> n_let_in{0};
    std::atomic<int> n_ended{0};
    std::atomic<int> n_refused{0};
    std::atomic<int> n_wrong{0};
    for (int round = 0; round < n_rounds; ++round) {
        test_engine engine(make_options(2));
        std::vector<std::thread> threads;
        for (int t = 0; t < n_threads; ++t) {
            threads.emplace_back([&, t] {
                for (int i = 0;; ++i) {
                    std::shared_ptr<request> wanted;
                    try {
                        wanted = engine.submit(make_prompt(t + 1, 5 + i % 4), 30,
                                               [&](request& r) { r.capture = make_plan(); });
                    } catch (const error& failure) {
                        ++(failure.code() == errc::closed ? n_refused : n_wrong);
                        return;
                    }
                    ++n_let_in;
                    if (i % 3 == 1) engine.sched->cancel(wanted);
                    if (i % 3 == 2) engine.cancel(wanted);
                    consumer taker(wanted);
                    taker.rest();
                    const auto reason = taker.reason();
                    const bool is_closed = reason == finish_reason::error;
                    if (is_closed && taker.code() != errc::closed) ++n_wrong;
                    ++n_ended;
                }
            });
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
        std::vector<std::thread> closers;
        for (int t = 0; t < 2; ++t) closers.emplace_back([&] { engine.sched->close(); });
        for (auto& closer : closers) closer.join();
        for (auto& thread : threads) thread.join();
    }
    CHECK(n_wrong == 0);
    CHECK(n_refused == n_threads * n_rounds);
    CHECK(n_ended == n_let_in);
    CHECK(n_let_in > n_rounds);
}

TEST_CASE("scheduler: close wakes consumers that wait on their threads") {
    constexpr int n_threads = 5;
    test_engine engine(make_options(2));
    engine.model->allow(0);
    std::atomic<int> n_closed{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; ++t) {
        const auto wanted = engine.submit(make_prompt(t + 1, 20), 30);
        threads.emplace_back([&, wanted] {
            consumer taker(wanted);
            taker.rest();
            if (taker.code() == errc::closed) ++n_closed;
        });
    }
    REQUIRE(engine.model->wait_held());
    std::thread closing([&] { engine.sched->close(); });
    while (!engine.sched->is_closed()) std::this_thread::yield();
    engine.model->allow_all();
    closing.join();
    for (auto& thread : threads) thread.join();
    CHECK(n_closed == n_threads);
}

TEST_CASE("scheduler: state is readable from other threads while it runs") {
    test_engine engine(make_options(4));
    std::atomic<bool> is_done{false};
    std::atomic<int> n_wrong{0};
    std::thread reading([&] {
        while (!is_done) {
            for (slot_id slot = 0; slot < 4; ++slot) {
                const auto tokens = engine.sched->tokens_of(slot);
                if (!tokens.empty() && tokens[0] % 1000 != 0) ++n_wrong;
                (void)is_busy(*engine.sched, slot);
            }
            if (engine.sched->n_queued() < 0) ++n_wrong;
            (void)engine.sched->counters().n_tokens.load();
            (void)engine.pool->stats();
            std::this_thread::yield();
        }
    });
    for (int i = 0; i < 30; ++i) consumer(engine.submit(make_prompt(i, 10), 20)).rest();
    is_done = true;
    reading.join();
    CHECK(n_wrong == 0);
}

// ---- soak

TEST_CASE("soak: requests, cancellations, orders and faults at random") {
    const double limit_s = number_from("KQVIEW_SOAK_S", 3);
    const auto seed = static_cast<std::uint64_t>(
        number_from("KQVIEW_SOAK_SEED", static_cast<double>(std::random_device{}() % 100000)));
    soak(seed, limit_s).run();
}
