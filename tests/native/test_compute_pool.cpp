#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/compute_pool.h"

using kqview::compute_pool;

namespace {

template <typename Call>
void run(compute_pool& pool, unsigned n_threads, Call call) {
    pool.run([](void* self) { (*static_cast<Call*>(self))(); }, &call, n_threads);
}

// Compute threads of this process, by their names.
std::size_t n_compute_threads() {
    std::size_t n_found = 0;
    std::error_code gone;  // a thread may end meanwhile
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", gone)) {
        std::ifstream file(task.path() / "comm");
        std::string name;
        n_found += std::getline(file, name) && name == "kqview-compute";
    }
    return n_found;
}

}  // namespace

TEST_CASE("compute_pool: every thread of a team has its own index") {
    compute_pool pool;
    for (const unsigned n_threads : {1U, 2U, 5U}) {
        std::vector<int> n_calls(n_threads, 0);
        std::vector<std::thread::id> threads(n_threads);
        run(pool, n_threads, [&] {
            const auto index = compute_pool::thread_index();
            CHECK(compute_pool::n_threads() == n_threads);
            ++n_calls.at(index);
            threads.at(index) = std::this_thread::get_id();
        });
        CHECK(n_calls == std::vector<int>(n_threads, 1));
        CHECK(std::set(threads.begin(), threads.end()).size() == n_threads);
        CHECK(threads[0] == std::this_thread::get_id());
    }
    CHECK(compute_pool::n_threads() == 1);
    CHECK(compute_pool::thread_index() == 0);
}

TEST_CASE("compute_pool: behind a barrier a thread reads what all wrote before it") {
    constexpr unsigned n_threads = 4;  // sleeping and spinning, by how many CPUs there are
    constexpr int n_rounds = 500;
    compute_pool pool;
    std::vector<int> written(n_threads, 0);  // no atomics: ThreadSanitizer sees what orders them
    std::atomic<int> n_wrong{0};
    run(pool, n_threads, [&] {
        for (int round = 1; round <= n_rounds; ++round) {
            written[compute_pool::thread_index()] = round;
            compute_pool::barrier();
            for (const int one : written) n_wrong += one != round;
            compute_pool::barrier();
        }
    });
    CHECK(n_wrong == 0);
    CHECK(written == std::vector<int>(n_threads, n_rounds));
}

TEST_CASE("compute_pool: one thread is chosen at each place") {
    constexpr int n_places = 50;
    compute_pool pool;
    for (int i = 0; i < 2; ++i) {  // places are counted from the beginning of a task
        std::vector<std::atomic<int>> n_chosen(n_places);
        run(pool, 3, [&] {
            for (auto& here : n_chosen) here += compute_pool::is_chosen();
        });
        for (const auto& here : n_chosen) CHECK(here == 1);
    }
    CHECK(compute_pool::is_chosen());  // outside of tasks, the only thread there is
}

TEST_CASE("compute_pool: callers that take turns share the workers") {
    compute_pool pool;
    for (int i = 0; i < 5; ++i) {
        std::thread([&] { run(pool, 4, [] { compute_pool::barrier(); }); }).join();
    }
    CHECK(pool.n_workers() == 3);
}

TEST_CASE("compute_pool: teams of several callers compute at the same time") {
    constexpr int n_callers = 3;
    constexpr unsigned n_threads = 3;
    compute_pool pool;
    std::atomic<int> n_inside{0};
    std::vector<int> sums(n_callers, 0);
    std::vector<std::thread> callers;
    for (int i = 0; i < n_callers; ++i) {
        callers.emplace_back([&, i] {
            std::vector<int> parts(n_threads, 0);
            run(pool, n_threads, [&] {
                // Ends only if no team waits for another one's end.
                ++n_inside;
                while (n_inside < n_callers * static_cast<int>(n_threads))
                    std::this_thread::yield();
                for (int k = 0; k < 100; ++k) {
                    parts[compute_pool::thread_index()] += i;
                    compute_pool::barrier();
                }
            });
            for (const int part : parts) sums[static_cast<std::size_t>(i)] += part;
        });
    }
    for (auto& one : callers) one.join();
    CHECK(sums == std::vector<int>{0, 300, 600});
    CHECK(pool.n_workers() == n_callers * (n_threads - 1));
}

TEST_CASE("compute_pool: a task within a task runs on its thread alone") {
    compute_pool pool;
    std::atomic<int> n_inner{0};
    run(pool, 2, [&] {
        const auto index = compute_pool::thread_index();
        run(pool, 2, [&] {
            CHECK(compute_pool::n_threads() == 1);
            CHECK(compute_pool::thread_index() == 0);
            CHECK(compute_pool::is_chosen());
            compute_pool::barrier();
            ++n_inner;
        });
        CHECK(compute_pool::thread_index() == index);
        compute_pool::barrier();
    });
    CHECK(n_inner == 2);
    CHECK(pool.n_workers() == 1);
}

TEST_CASE("compute_pool: the process's pool ends with its last holder, and its threads with it") {
    for (int i = 0; i < 100; ++i) {
        const auto first = compute_pool::shared();
        CHECK(first->n_workers() == 0);
        const auto second = compute_pool::shared();
        CHECK(first == second);
        run(*first, 3, [] {});
        CHECK(first->n_workers() == 2);
    }
    // The kernel lists a thread for a moment after it was joined.
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (n_compute_threads() > 0 && std::chrono::steady_clock::now() < end) {
        std::this_thread::yield();
    }
    CHECK(n_compute_threads() == 0);
}
