// block_pool over threads: leases that die elsewhere, and the release listener.
// The threaded cases count outside doctest's macros and state their result once the threads joined;
// the races themselves are the sanitizer's to find.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "memory/block_pool.h"

using kqview::block_pool;
using kqview::block_pool_options;
using kqview::lease;

namespace {

constexpr std::size_t kib = 1024;
constexpr std::size_t mib = 1024 * kib;

std::shared_ptr<block_pool> make_pool(std::size_t budget_bytes) {
    block_pool_options options;
    options.budget_bytes = budget_bytes;
    return block_pool::create(options);
}

}  // namespace

TEST_CASE("block_pool: lease returns its block on any thread") {
    const auto pool = make_pool(1 * mib);
    auto held = pool->try_take(8192);
    std::thread([moved = std::move(held)]() mutable { moved.reset(); }).join();
    CHECK(pool->stats().n_leased == 0);
    CHECK(pool->stats().n_blocks == 1);
}

TEST_CASE("block_pool: many threads release while one takes, and the sums stay exact") {
    constexpr int n_threads = 4;
    constexpr int n_takes = 4000;
    const auto pool = make_pool(256 * kib);
    std::mutex mutex;
    std::vector<std::shared_ptr<lease>> queue;
    std::atomic<bool> done{false};
    std::atomic<int> n_torn{0};

    std::vector<std::thread> readers;
    for (int t = 0; t < n_threads; ++t) {
        readers.emplace_back([&] {
            for (;;) {
                const bool last = done;
                std::shared_ptr<lease> held;
                {
                    const std::lock_guard lock(mutex);
                    if (!queue.empty()) {
                        held = std::move(queue.back());
                        queue.pop_back();
                    }
                }
                if (held) {
                    const std::byte mark = held->data()[0];
                    if (held->data()[held->size_bytes() - 1] != mark) ++n_torn;
                } else if (last) {
                    return;
                } else {
                    std::this_thread::yield();
                }
            }
        });
    }
    std::uint64_t n_taken = 0;
    for (int i = 0; i < n_takes; ++i) {
        const auto n_bytes = static_cast<std::size_t>(4096 + i * 7);
        auto held = pool->try_take(n_bytes);
        if (!held) {
            std::this_thread::yield();
            continue;
        }
        ++n_taken;
        held->data()[0] = held->data()[n_bytes - 1] = static_cast<std::byte>(i & 0xFF);
        const std::lock_guard lock(mutex);
        queue.push_back(std::move(held));
    }
    done = true;
    for (auto& reader : readers) reader.join();

    const auto stats = pool->stats();
    CHECK(n_torn == 0);
    CHECK(n_taken > 0);
    CHECK(stats.n_allocations + stats.n_reused == n_taken);
    CHECK(stats.n_leased == 0);
    CHECK(stats.leased_bytes == 0);
    CHECK(stats.peak_leased_bytes <= stats.budget_bytes);
    CHECK(pool->trim() == stats.allocated_bytes);
    CHECK(pool->stats().n_blocks == 0);
}

TEST_CASE("block_pool: listener runs once after each release, with the block back in the pool") {
    const auto pool = make_pool(8192);
    int n_calls = 0;
    bool has_room = false;
    auto held = pool->try_take(8192);
    pool->set_release_listener([&] {
        ++n_calls;
        has_room = pool->stats().leased_bytes == 0;
    });
    CHECK_FALSE(pool->try_take(8192));
    CHECK(n_calls == 0);
    held.reset();
    CHECK(n_calls == 1);
    CHECK(has_room);
    held = pool->try_take(8192);
    pool->clear_release_listener();
    held.reset();
    CHECK(n_calls == 1);
}

TEST_CASE("block_pool: listener may drop another lease") {
    const auto pool = make_pool(1 * mib);
    auto first = pool->try_take(4096);
    auto second = pool->try_take(4096);
    pool->set_release_listener([&] { std::exchange(second, nullptr).reset(); });
    first.reset();
    CHECK(pool->stats().n_leased == 0);
    pool->clear_release_listener();
}

TEST_CASE("block_pool: clear waits for a listener call that runs") {
    const auto pool = make_pool(1 * mib);
    auto held = pool->try_take(4096);
    std::atomic<bool> entered{false};
    std::atomic<bool> cleared{false};
    bool cleared_during_call = false;
    pool->set_release_listener([&] {
        entered = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        cleared_during_call = cleared;
    });
    std::thread dropper([&] { held.reset(); });
    while (!entered) std::this_thread::yield();
    pool->clear_release_listener();
    cleared = true;
    dropper.join();
    CHECK_FALSE(cleared_during_call);
}

TEST_CASE("block_pool: no listener call runs or comes after clear returned") {
    constexpr int n_threads = 3;
    constexpr int n_rounds = 300;
    const auto pool = make_pool(1 * mib);
    std::atomic<bool> stop{false};
    std::vector<std::thread> droppers;
    for (int t = 0; t < n_threads; ++t) {
        droppers.emplace_back([&] {
            while (!stop) {
                pool->try_take(4096);
                std::this_thread::yield();
            }
        });
    }
    std::uint64_t n_calls = 0;
    int n_late = 0;
    for (int i = 0; i < n_rounds; ++i) {
        // The listener's target dies right after clear: a late call is a use after free.
        auto calls = std::make_unique<std::atomic<std::uint64_t>>(0);
        pool->set_release_listener([target = calls.get()] { ++*target; });
        while (*calls == 0) std::this_thread::yield();
        pool->clear_release_listener();
        const std::uint64_t after_clear = *calls;
        std::this_thread::yield();
        if (*calls != after_clear) ++n_late;
        n_calls += after_clear;
    }
    stop = true;
    for (auto& dropper : droppers) dropper.join();
    CHECK(n_late == 0);
    CHECK(n_calls >= n_rounds);
}
