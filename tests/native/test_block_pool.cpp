// block_pool: classes, budget, page-locked part, counters, lifetime; then leases that die on other
// threads, and the release listener. The threaded cases count outside doctest's macros and state
// their result once the threads joined; the races themselves are the sanitizer's to find.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/block_pool.h"

using kqview::block_pool;
using kqview::block_pool_options;
using kqview::host_allocator;
using kqview::lease;

namespace {

constexpr std::size_t kib = 1024;
constexpr std::size_t mib = 1024 * kib;

std::shared_ptr<block_pool> make_pool(std::size_t budget_bytes) {
    block_pool_options options;
    options.budget_bytes = budget_bytes;
    return block_pool::create(options);
}

// Plays the machine: may claim that its memory is page-locked, may run out, counts live bytes.
class fake_allocator final : public host_allocator {
public:
    explicit fake_allocator(bool pins) : pins_(pins) {}

    void* allocate(std::size_t n_bytes, bool& is_pinned) noexcept override {
        if (out_of_memory) return nullptr;
        live_bytes += n_bytes;
        peak_bytes = std::max(peak_bytes, live_bytes);
        void* data = plain_->allocate(n_bytes, is_pinned);
        is_pinned = pins_;
        return data;
    }

    void release(void* data, std::size_t n_bytes, bool is_pinned) noexcept override {
        if (is_pinned != pins_) ++n_mismatched;
        live_bytes -= n_bytes;
        plain_->release(data, n_bytes, false);
    }

    bool offers_pinned() const noexcept override { return pins_; }

    bool out_of_memory = false;
    std::size_t live_bytes = 0;
    std::size_t peak_bytes = 0;
    std::size_t n_mismatched = 0;

private:
    const bool pins_;
    const std::shared_ptr<host_allocator> plain_ = kqview::plain_allocator();
};

// Promises memory of any size, none of which may be touched, at an address of its own each time.
class boundless_allocator final : public host_allocator {
public:
    void* allocate(std::size_t n_bytes, bool& is_pinned) noexcept override {
        is_pinned = false;
        next_ += n_bytes;
        return reinterpret_cast<void*>(next_ - n_bytes);
    }
    void release(void*, std::size_t, bool) noexcept override {}
    bool offers_pinned() const noexcept override { return false; }

private:
    std::uintptr_t next_ = 4096;
};

// The size of the block that serves `n_bytes`; 0: there is none so large.
std::size_t capacity_for(std::size_t n_bytes) {
    block_pool_options options;
    options.budget_bytes = SIZE_MAX;
    options.allocator = std::make_shared<boundless_allocator>();
    const auto pool = block_pool::create(options);
    pool->try_take(n_bytes);
    return pool->stats().allocated_bytes;
}

}  // namespace

TEST_CASE("block_pool: a released block serves the next lease of its class") {
    const auto pool = make_pool(1 * mib);
    auto first = pool->try_take(20'000);
    REQUIRE(first);
    const std::byte* address = first->data();
    first.reset();
    const auto second = pool->try_take(20'100);
    REQUIRE(second);
    CHECK(second->data() == address);
    CHECK(second->size_bytes() == 20'100);
    CHECK(pool->stats().n_allocations == 1);
    CHECK(pool->stats().n_reused == 1);
}

TEST_CASE("block_pool: two live leases never share a byte") {
    const auto pool = make_pool(1 * mib);
    const auto a = pool->try_take(5000);
    const auto b = pool->try_take(5000);
    REQUIRE(a);
    REQUIRE(b);
    std::memset(a->data(), 1, capacity_for(a->size_bytes()));
    std::memset(b->data(), 2, capacity_for(b->size_bytes()));
    const auto all_are = [](const lease& held, int value) {
        return std::all_of(held.data(), held.data() + capacity_for(held.size_bytes()),
                           [value](std::byte x) { return std::to_integer<int>(x) == value; });
    };
    CHECK(all_are(*a, 1));
    CHECK(all_are(*b, 2));
}

TEST_CASE("block_pool: a block exceeds the request by at most a fifth") {
    double worst = 0;
    for (std::size_t n = 4096; n < 64 * mib; n += 1 + n / 997) {
        const std::size_t capacity = capacity_for(n);
        REQUIRE(capacity >= n);
        worst = std::max(worst, static_cast<double>(capacity - n) / static_cast<double>(n));
    }
    CHECK(worst > 0.15);
    CHECK(worst < 0.2);
    CHECK(capacity_for(1) == 4096);
    for (std::size_t n : {4097u, 4864u, 4865u, 8192u, 8193u}) {
        const auto pool = make_pool(1 * mib);
        CHECK(pool->try_take(n));
        CHECK(pool->stats().allocated_bytes == capacity_for(n));
    }
}

TEST_CASE("block_pool: capacities are fixed points of their class and start aligned") {
    const auto pool = make_pool(64 * mib);
    for (std::size_t n = 1; n < 8 * mib; n = capacity_for(n) + 1) {
        const std::size_t capacity = capacity_for(n);
        CHECK(capacity_for(capacity) == capacity);
        const auto held = pool->try_take(n);
        REQUIRE(held);
        const auto address = reinterpret_cast<std::uintptr_t>(held->data());
        CHECK(address % (capacity > 64 * kib ? 4096 : kqview::host_alignment_bytes) == 0);
    }
}

TEST_CASE("block_pool: a take over budget is null until a lease dies") {
    const auto pool = make_pool(3 * 8192);
    std::vector<std::shared_ptr<lease>> held;
    for (int i = 0; i < 3; ++i) held.push_back(pool->try_take(8192));
    CHECK(held.back());
    CHECK_FALSE(pool->try_take(8192));
    CHECK_FALSE(pool->try_take(1));
    held.pop_back();
    CHECK(pool->try_take(8192));
    CHECK(pool->stats().allocated_bytes == 3 * 8192);
}

TEST_CASE("block_pool: a request that no budget can hold is null") {
    const auto pool = make_pool(8 * mib);
    CHECK_FALSE(pool->try_take(8 * mib + 1));
    CHECK_FALSE(pool->try_take(SIZE_MAX));
    CHECK(capacity_for(SIZE_MAX) == 0);
    CHECK(capacity_for(std::size_t{1} << 48) == std::size_t{1} << 48);
    CHECK(capacity_for((std::size_t{1} << 48) + 1) == 0);
    CHECK_FALSE(make_pool(0)->try_take(1));
}

TEST_CASE("block_pool: a request of zero bytes is a request error") {
    const auto pool = make_pool(1 * mib);
    try {
        pool->try_take(0);
        FAIL("no error");
    } catch (const kqview::error& e) {
        CHECK(e.code() == kqview::errc::request);
    }
}

TEST_CASE("block_pool: idle blocks of other classes are freed when the budget is short") {
    const auto allocator = std::make_shared<fake_allocator>(false);
    block_pool_options options;
    options.budget_bytes = 4 * 16 * kib;
    options.allocator = allocator;
    const auto pool = block_pool::create(options);
    {
        std::vector<std::shared_ptr<lease>> small;
        for (int i = 0; i < 4; ++i) small.push_back(pool->try_take(16 * kib));
        CHECK(small.back());
    }
    CHECK(pool->stats().n_blocks == 4);
    const auto large = pool->try_take(32 * kib);
    REQUIRE(large);
    CHECK(pool->stats().n_blocks == 3);  // two idle ones made room, two stay
    CHECK(pool->stats().allocated_bytes == options.budget_bytes);
    CHECK(allocator->peak_bytes == options.budget_bytes);
    CHECK(allocator->live_bytes == pool->stats().allocated_bytes);
}

TEST_CASE("block_pool: a take that cannot succeed frees no idle block") {
    const auto pool = make_pool(4 * 16 * kib);
    const auto held = pool->try_take(16 * kib);
    pool->try_take(8 * kib);
    CHECK(pool->stats().n_blocks == 2);
    CHECK_FALSE(pool->try_take(64 * kib));
    CHECK(pool->stats().n_blocks == 2);
}

TEST_CASE("block_pool: a lease outlives the pool's owner") {
    const auto allocator = std::make_shared<fake_allocator>(false);
    block_pool_options options;
    options.budget_bytes = 1 * mib;
    options.allocator = allocator;
    auto pool = block_pool::create(options);
    const std::weak_ptr<block_pool> alive = pool;
    auto held = pool->try_take(10'000);
    pool->try_take(100'000);
    pool.reset();
    CHECK_FALSE(alive.expired());
    std::memset(held->data(), 7, held->size_bytes());
    held.reset();
    CHECK(alive.expired());
    CHECK(allocator->live_bytes == 0);
}

TEST_CASE("block_pool: contains knows leased and idle blocks to the byte") {
    const auto pool = make_pool(1 * mib);
    const auto held = pool->try_take(5000);
    const std::byte* first = held->data();
    CHECK(pool->contains(first));
    CHECK(pool->contains(first + capacity_for(held->size_bytes()) - 1));
    CHECK_FALSE(make_pool(1 * mib)->contains(first));
    const int local = 0;
    CHECK_FALSE(pool->contains(&local));
    CHECK_FALSE(pool->contains(nullptr));

    block_pool_options options;
    options.budget_bytes = 1 * mib;
    options.allocator = std::make_shared<boundless_allocator>();
    const auto other = block_pool::create(options);
    const std::byte* idle = other->try_take(300'000)->data();
    CHECK(other->contains(idle));
    other->try_take(1 * mib);  // makes room by freeing it
    CHECK_FALSE(other->contains(idle));
    // No block lies below the lowest address, nor does one block's end belong to it.
    CHECK_FALSE(pool->contains(first - 1));
    CHECK_FALSE(pool->contains(first + capacity_for(held->size_bytes())));
}

TEST_CASE("block_pool: counters follow takes, releases and copies") {
    const auto pool = make_pool(1 * mib);
    auto a = pool->try_take(4096);
    auto b = pool->try_take(8000);
    pool->count_copied(100);
    pool->count_copied(23);
    auto stats = pool->stats();
    CHECK(stats.budget_bytes == 1 * mib);
    CHECK(stats.n_leased == 2);
    CHECK(stats.n_blocks == 2);
    CHECK(stats.leased_bytes == 4096 + 8192);
    CHECK(stats.allocated_bytes == 4096 + 8192);
    CHECK(stats.n_allocations == 2);
    CHECK(stats.n_reused == 0);
    CHECK(stats.copied_bytes == 123);
    CHECK(stats.pinned_bytes == 0);
    CHECK(stats.plain_fallbacks == 0);
    a.reset();
    b.reset();
    stats = pool->stats();
    CHECK(stats.n_leased == 0);
    CHECK(stats.leased_bytes == 0);
    CHECK(stats.n_blocks == 2);
    CHECK(stats.peak_leased_bytes == 4096 + 8192);
}

TEST_CASE("block_pool: an allocator without memory gives null and costs no budget") {
    const auto allocator = std::make_shared<fake_allocator>(false);
    block_pool_options options;
    options.budget_bytes = 1 * mib;
    options.allocator = allocator;
    const auto pool = block_pool::create(options);
    allocator->out_of_memory = true;
    CHECK_FALSE(pool->try_take(8192));
    CHECK(pool->stats().allocated_bytes == 0);
    CHECK(pool->stats().leased_bytes == 0);
    CHECK(pool->stats().n_leased == 0);
    CHECK(pool->stats().peak_leased_bytes == 0);
    allocator->out_of_memory = false;
    CHECK(pool->try_take(1 * mib));
}

TEST_CASE("block_pool: beyond the page-locked limit blocks are plain and counted") {
    const auto allocator = std::make_shared<fake_allocator>(true);
    block_pool_options options;
    options.budget_bytes = 1 * mib;
    options.pinned_limit_bytes = 2 * 16 * kib;
    options.allocator = allocator;
    auto pool = block_pool::create(options);
    std::vector<std::shared_ptr<lease>> held;
    for (int i = 0; i < 4; ++i) held.push_back(pool->try_take(16 * kib));
    CHECK(held[0]->is_pinned());
    CHECK(held[1]->is_pinned());
    CHECK_FALSE(held[2]->is_pinned());
    CHECK_FALSE(held[3]->is_pinned());
    CHECK(pool->stats().pinned_bytes == 2 * 16 * kib);
    CHECK(pool->stats().plain_fallbacks == 2);
    held.clear();
    CHECK(pool->try_take(16 * kib)->is_pinned());  // page-locked idle blocks go first
    pool.reset();
    CHECK(allocator->live_bytes == 0);
    CHECK(allocator->n_mismatched == 0);
}

TEST_CASE("block_pool: idle page-locked blocks give their room to another class") {
    block_pool_options options;
    options.budget_bytes = 1 * mib;
    options.pinned_limit_bytes = 64 * kib;
    options.allocator = std::make_shared<fake_allocator>(true);
    const auto pool = block_pool::create(options);
    pool->try_take(64 * kib);
    const auto held = pool->try_take(32 * kib);
    CHECK(held->is_pinned());
    CHECK(pool->stats().pinned_bytes == 32 * kib);
    CHECK(pool->stats().plain_fallbacks == 0);
}

TEST_CASE("block_pool: refused page-locking falls back to plain memory") {
    const auto allocator = std::make_shared<fake_allocator>(true);
    block_pool_options options;
    options.budget_bytes = 1 * mib;
    options.allocator = allocator;
    const auto pool = block_pool::create(options);
    allocator->out_of_memory = true;
    const auto held = pool->try_take(16 * kib);
    REQUIRE(held);
    CHECK_FALSE(held->is_pinned());
    CHECK(pool->stats().plain_fallbacks == 1);
    CHECK(pool->stats().pinned_bytes == 0);
}

namespace {

// Page-locks only while it is let: allocate() waits before that.
class gated_allocator final : public host_allocator {
public:
    void* allocate(std::size_t n_bytes, bool& is_pinned) noexcept override {
        {
            std::unique_lock lock(mutex_);
            ++n_begun_;
            changed_.notify_all();
            changed_.wait(lock, [this] { return is_open_; });
        }
        void* const data = plain_->allocate(n_bytes, is_pinned);
        is_pinned = true;
        return data;
    }
    void release(void* data, std::size_t n_bytes, bool) noexcept override {
        plain_->release(data, n_bytes, false);
    }
    bool offers_pinned() const noexcept override { return true; }

    void open() {
        const std::lock_guard lock(mutex_);
        is_open_ = true;
        changed_.notify_all();
    }
    void await_begun(int n) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return n_begun_ >= n; });
    }

private:
    const std::shared_ptr<host_allocator> plain_ = kqview::plain_allocator();
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_open_ = false;
    int n_begun_ = 0;
};

block_pool_options ahead_with(std::shared_ptr<host_allocator> allocator) {
    block_pool_options options;
    options.budget_bytes = 1 * mib;
    options.allocator = std::move(allocator);
    options.pins_ahead = true;
    return options;
}

// Takes what is coming once it is there.
std::shared_ptr<lease> take_when_there(block_pool& pool, std::size_t n_bytes) {
    std::mutex mutex;
    std::condition_variable there;
    int n_calls = 0;
    pool.set_release_listener([&] {
        const std::lock_guard lock(mutex);
        ++n_calls;
        there.notify_all();
    });
    for (;;) {
        std::unique_lock lock(mutex);
        const int n_seen = n_calls;
        lock.unlock();
        bool is_coming = false;
        auto taken = pool.try_take(n_bytes, &is_coming);
        if (taken) {
            pool.clear_release_listener();
            return taken;
        }
        REQUIRE(is_coming);
        lock.lock();
        there.wait(lock, [&] { return n_calls > n_seen; });
    }
}

}  // namespace

TEST_CASE("block_pool: nobody waits while a block is page-locked ahead") {
    const auto allocator = std::make_shared<gated_allocator>();
    const auto pool = block_pool::create(ahead_with(allocator));
    bool is_coming = false;
    CHECK_FALSE(pool->try_take(16 * kib, &is_coming));
    CHECK(is_coming);
    allocator->await_begun(1);
    CHECK_FALSE(pool->try_take(16 * kib, &is_coming));  // the same one is still on its way
    CHECK(is_coming);
    CHECK(pool->stats().pinned_bytes == 16 * kib);
    CHECK(pool->stats().leased_bytes == 0);
    allocator->open();
    const auto held = take_when_there(*pool, 16 * kib);
    CHECK(held->is_pinned());
    CHECK(pool->stats().plain_fallbacks == 0);
    CHECK(pool->stats().n_reused == 0);
}

TEST_CASE("block_pool: blocks are ordered within the budget and the page-locked limit") {
    const auto allocator = std::make_shared<gated_allocator>();
    allocator->open();
    auto options = ahead_with(allocator);
    options.budget_bytes = 3 * 16 * kib;
    options.pinned_limit_bytes = 2 * 16 * kib;
    const auto pool = block_pool::create(options);
    std::vector<std::shared_ptr<lease>> held;
    for (int i = 0; i < 3; ++i) held.push_back(take_when_there(*pool, 16 * kib));
    CHECK(held[0]->is_pinned());
    CHECK(held[1]->is_pinned());
    CHECK_FALSE(held[2]->is_pinned());
    bool is_coming = true;
    CHECK_FALSE(pool->try_take(16 * kib, &is_coming));
    CHECK_FALSE(is_coming);
    CHECK(pool->stats().allocated_bytes == 3 * 16 * kib);
    CHECK(pool->stats().pinned_bytes == 2 * 16 * kib);
}

TEST_CASE("block_pool: a pool may go while a block is made for it") {
    const auto allocator = std::make_shared<gated_allocator>();
    auto pool = block_pool::create(ahead_with(allocator));
    pool->prepare(16 * kib);
    allocator->await_begun(1);
    const std::weak_ptr<block_pool> gone = pool;
    pool.reset();
    allocator->open();
    while (!gone.expired()) std::this_thread::yield();
}

TEST_CASE("block_pool: poison fills a returned block and only then") {
    block_pool_options options;
    options.budget_bytes = 1 * mib;
    options.poison = true;
    const auto pool = block_pool::create(options);
    auto held = pool->try_take(6000);
    std::memset(held->data(), 1, capacity_for(held->size_bytes()));
    CHECK(held->data()[0] == std::byte{1});
    held.reset();
    held = pool->try_take(6000);
    CHECK(std::all_of(held->data(), held->data() + capacity_for(held->size_bytes()),
                      [](std::byte x) { return x == block_pool::poison_byte; }));
}

// ---- over threads

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
