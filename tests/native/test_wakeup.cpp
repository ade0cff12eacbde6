// wake_handle: coalesced signals, none lost, waits that end on a signal of the process.
#include <doctest/doctest.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "sched/wakeup.h"

using kqview::wake_handle;

namespace {

bool is_readable(const wake_handle& handle, int limit_ms = 0) {
    pollfd waiting{handle.fd(), POLLIN, 0};
    return ::poll(&waiting, 1, limit_ms) == 1;
}

}  // namespace

TEST_CASE("wake_handle: descriptor is readable from signal to drain") {
    wake_handle handle;
    CHECK_FALSE(is_readable(handle));
    handle.signal();
    CHECK(is_readable(handle));
    CHECK(handle.wait());
    handle.drain();
    CHECK_FALSE(is_readable(handle));
    handle.signal();
    CHECK(is_readable(handle));
}

TEST_CASE("wake_handle: drain without a signal neither blocks nor loses the next signal") {
    wake_handle handle;
    handle.drain();
    handle.signal();
    CHECK(is_readable(handle));
}

TEST_CASE("wake_handle: signals before a drain are one write") {
    wake_handle handle;
    for (int i = 0; i < 1000; ++i) handle.signal();
    std::uint64_t count = 0;
    REQUIRE(::read(handle.fd(), &count, sizeof count) == sizeof count);
    CHECK(count == 1);  // of an eventfd: the sum; of a pipe: the first write
    CHECK_FALSE(is_readable(handle));
}

TEST_CASE("wake_handle: wait is false when a signal handler ran") {
    struct sigaction action {};
    struct sigaction former {};
    action.sa_handler = [](int) {};
    sigaction(SIGUSR1, &action, &former);
    wake_handle handle;
    std::atomic<bool> done{false};
    std::atomic<bool> result{true};
    std::thread waiting([&] {
        result = handle.wait();
        done = true;
    });
    while (!done) {
        // Again and again: the first one may come before the thread waits.
        pthread_kill(waiting.native_handle(), SIGUSR1);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    waiting.join();
    sigaction(SIGUSR1, &former, nullptr);
    CHECK_FALSE(result);
}

TEST_CASE("wake_handle: a signal after drain always wakes, however many threads signal") {
    wake_handle handle;
    std::atomic<bool> is_done{false};
    std::vector<std::thread> signalling;
    for (int t = 0; t < 2; ++t) {
        signalling.emplace_back([&] {
            while (!is_done) handle.signal();
        });
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
    int n_rounds = 0;
    int n_woken = 0;
    while (n_woken == n_rounds && std::chrono::steady_clock::now() < end) {
        handle.drain();
        ++n_rounds;
        n_woken += is_readable(handle, 10'000);  // they signal on: it must come
    }
    is_done = true;
    for (auto& thread : signalling) thread.join();
    CHECK(n_woken == n_rounds);
    CHECK(n_rounds > 100);
}
