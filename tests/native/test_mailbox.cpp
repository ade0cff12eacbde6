// mailbox and what wakes its two sides: order, bound, the end, waits, cancellation; signals that
// are coalesced and never lost.
#include <doctest/doctest.h>
#ifndef _WIN32
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "sched/mailbox.h"
#include "sched/wakeup.h"
#include "scheduler_fixture.h"

using kqview::doorbell;
using kqview::end_event;
using kqview::finish_reason;
using kqview::mailbox;
using kqview::token_event;
using kqview::token_id;
using kqview::wait_end;
using kqview::wake_handle;
using kqview::test::wait_settled;

namespace {

token_event make_token(token_id id) { return {id, 0.0f, {}, {}}; }

end_event make_end(finish_reason reason) { return {reason, {}, {}}; }

bool is_signalled(const wake_handle& handle) { return handle.wait(0) == wait_end::is_set; }

// Was it rung since the last call? One that was not costs the whole wait.
bool has_rung(doorbell& bell) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    bell.wait(deadline);
    return std::chrono::steady_clock::now() < deadline;
}

struct two_sides {
    std::shared_ptr<doorbell> bell = std::make_shared<doorbell>();
    mailbox box{bell};
    std::shared_ptr<wake_handle> waiter = std::make_shared<wake_handle>();
};

}  // namespace

TEST_CASE("doorbell: rings before a wait are kept and coalesced") {
    doorbell bell;
    CHECK_FALSE(has_rung(bell));
    bell.ring();
    bell.ring();
    CHECK(has_rung(bell));
    CHECK_FALSE(has_rung(bell));
}

TEST_CASE("mailbox: tokens come in order, the end with the last one and ever after") {
    two_sides sides;
    auto& box = sides.box;
    CHECK_FALSE(box.try_take());
    CHECK_FALSE(box.end());
    box.put(make_token(1), {});
    box.put(make_token(2), make_end(finish_reason::length));
    CHECK(box.end()->reason == finish_reason::length);

    auto first = box.try_take();
    REQUIRE(first);
    CHECK(first->token->id == 1);
    CHECK_FALSE(first->end);
    auto last = box.try_take();
    REQUIRE(last);
    CHECK(last->token->id == 2);
    CHECK(last->end->reason == finish_reason::length);
    for (int i = 0; i < 3; ++i) {
        auto after = box.try_take();
        REQUIRE(after);
        CHECK_FALSE(after->token);
        CHECK(after->end->reason == finish_reason::length);
    }
    CHECK(box.n_taken() == 2);
}

TEST_CASE("mailbox: the first end stays") {
    two_sides sides;
    sides.box.finish(make_end(finish_reason::stop));
    sides.box.finish(make_end(finish_reason::error));
    CHECK(sides.box.end()->reason == finish_reason::stop);
}

TEST_CASE("mailbox: room is up to run_ahead tokens that were not taken") {
    for (const int run_ahead : {1, 2, 8}) {
        CAPTURE(run_ahead);
        two_sides sides;
        for (int i = 0; i < run_ahead; ++i) {
            CHECK(sides.box.has_room(run_ahead));
            sides.box.put(make_token(i), {});
        }
        CHECK_FALSE(sides.box.has_room(run_ahead));
        sides.box.try_take();
        CHECK(sides.box.has_room(run_ahead));
    }
}

TEST_CASE("mailbox: with run_ahead 0 there is room only for a consumer that waits") {
    two_sides sides;
    CHECK_FALSE(sides.box.has_room(0));
    CHECK_FALSE(sides.box.arm(sides.waiter));
    CHECK(sides.box.has_room(0));
    sides.box.put(make_token(1), {});
    CHECK_FALSE(sides.box.has_room(0));
    sides.box.try_take();
    CHECK_FALSE(sides.box.has_room(0));  // it took, but does not wait
    CHECK_FALSE(sides.box.arm(sides.waiter));
    CHECK(sides.box.has_room(0));
    sides.box.disarm();
    CHECK_FALSE(sides.box.has_room(0));
}

TEST_CASE("mailbox: starving is to wait with nothing left") {
    two_sides sides;
    CHECK_FALSE(sides.box.is_starving());
    sides.box.put(make_token(1), {});
    CHECK_FALSE(sides.box.is_starving());
    sides.box.try_take();
    CHECK_FALSE(sides.box.is_starving());
    sides.box.arm(sides.waiter);
    CHECK(sides.box.is_starving());
    sides.box.disarm();
    CHECK_FALSE(sides.box.is_starving());
}

TEST_CASE("mailbox: the engine is rung by a take or a wait only after it saw no room") {
    two_sides sides;
    sides.box.put(make_token(1), {});
    sides.box.put(make_token(2), {});
    CHECK(sides.box.has_room(8));
    sides.box.try_take();
    CHECK_FALSE(has_rung(*sides.bell));
    CHECK_FALSE(sides.box.has_room(1));
    sides.box.try_take();
    CHECK(has_rung(*sides.bell));
    CHECK_FALSE(sides.box.is_starving());
    sides.box.arm(sides.waiter);
    CHECK(has_rung(*sides.bell));
}

TEST_CASE("mailbox: arm tells of what is there and signals what comes, once") {
    two_sides sides;
    CHECK_FALSE(sides.box.arm(sides.waiter));
    CHECK_FALSE(is_signalled(*sides.waiter));
    sides.box.put(make_token(1), {});
    CHECK(is_signalled(*sides.waiter));
    sides.waiter->drain();
    CHECK(sides.box.arm(sides.waiter));
    sides.box.put(make_token(2), {});  // that arm kept no waiter: there was something to take
    CHECK_FALSE(is_signalled(*sides.waiter));
    sides.box.try_take();
    sides.box.try_take();
    CHECK_FALSE(sides.box.arm(sides.waiter));
    sides.box.finish(make_end(finish_reason::stop));
    CHECK(is_signalled(*sides.waiter));
    CHECK(sides.box.arm(sides.waiter));
}

TEST_CASE("mailbox: a disarmed consumer is not signalled, and its handle is let go") {
    two_sides sides;
    sides.box.arm(sides.waiter);
    CHECK(sides.waiter.use_count() == 2);
    sides.box.disarm();
    CHECK(sides.waiter.use_count() == 1);
    sides.box.put(make_token(1), {});
    CHECK_FALSE(is_signalled(*sides.waiter));
}

TEST_CASE("mailbox: one handle waits for many mailboxes") {
    const auto bell = std::make_shared<doorbell>();
    mailbox first(bell);
    mailbox second(bell);
    const auto waiter = std::make_shared<wake_handle>();
    first.arm(waiter);
    second.arm(waiter);
    second.put(make_token(1), {});
    CHECK(is_signalled(*waiter));
    waiter->drain();
    CHECK_FALSE(first.arm(waiter));
    CHECK(second.arm(waiter));
    first.put(make_token(2), {});
    CHECK(is_signalled(*waiter));
}

TEST_CASE("mailbox: cancel drops what was not taken and takes nothing more in") {
    two_sides sides;
    sides.box.put(make_token(1), {});
    sides.box.put(make_token(2), {});
    sides.box.try_take();
    CHECK(sides.box.cancel());
    CHECK_FALSE(sides.box.cancel());
    sides.box.put(make_token(3), {});
    CHECK_FALSE(sides.box.try_take());
    CHECK(sides.box.n_taken() == 1);
    sides.box.finish(make_end(finish_reason::cancelled));
    const auto item = sides.box.try_take();
    REQUIRE(item);
    CHECK_FALSE(item->token);
    CHECK(item->end->reason == finish_reason::cancelled);
}

TEST_CASE("mailbox: the end that comes with a token after a cancellation is a cancelled one") {
    two_sides sides;
    CHECK(sides.box.cancel());
    auto end = make_end(finish_reason::length);
    end.usage.completion_tokens = 7;
    sides.box.put(make_token(3), end);
    const auto item = sides.box.try_take();
    REQUIRE(item);
    CHECK_FALSE(item->token);
    CHECK(item->end->reason == finish_reason::cancelled);
    CHECK(item->end->usage.completion_tokens == 7);
    CHECK(sides.box.n_taken() == 0);
}

TEST_CASE(
    "mailbox: a wait for a cancellation ends once the engine settled, before or after the wait "
    "began") {
    two_sides sides;
    std::atomic<bool> is_settled{false};
    std::atomic<bool> was_early{false};
    std::thread waiting([&] {
        wait_settled(sides.box);
        was_early = !is_settled;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    is_settled = true;
    sides.box.settle();
    waiting.join();
    CHECK_FALSE(was_early);
    wait_settled(sides.box);  // settled for good
}

TEST_CASE("mailbox: a cancellation that finds the end taken is settled at once") {
    two_sides sides;
    sides.box.put(make_token(1), make_end(finish_reason::length));
    sides.box.try_take();
    CHECK_FALSE(sides.box.cancel());
    CHECK(sides.box.arm_settled(sides.waiter));
    wait_settled(sides.box);
}

TEST_CASE("mailbox: arm_settled signals the end of a cancellation next to a consumer that waits") {
    two_sides sides;
    const auto other = std::make_shared<wake_handle>();
    CHECK_FALSE(sides.box.arm(sides.waiter));
    CHECK(sides.box.cancel());
    CHECK_FALSE(sides.box.arm_settled(other));
    sides.box.disarm(sides.waiter.get());
    sides.box.finish(make_end(finish_reason::cancelled));
    CHECK_FALSE(is_signalled(*sides.waiter));
    CHECK(is_signalled(*other));
    other->drain();
    CHECK_FALSE(sides.box.arm_settled(other));  // ended, but not settled
    sides.box.settle();
    CHECK(is_signalled(*other));
    CHECK(sides.box.arm_settled(other));
}

TEST_CASE("mailbox: a stall is news once for each set of holders, and again after forget_stall") {
    two_sides sides;
    auto& box = sides.box;
    const std::vector<kqview::request_id> first{1, 2};
    const std::vector<kqview::request_id> second{1, 3};
    CHECK(box.stall(first));
    CHECK(box.take_stall().empty());  // nobody waited
    CHECK_FALSE(box.arm(sides.waiter));
    CHECK(has_rung(*sides.bell));  // so that the engine looks again
    CHECK_FALSE(box.stall(first));
    CHECK_FALSE(is_signalled(*sides.waiter));  // not before the engine has looked since
    CHECK(box.stall(first));
    CHECK(is_signalled(*sides.waiter));
    CHECK(box.arm(sides.waiter));
    CHECK(box.take_stall() == first);
    CHECK(box.take_stall().empty());

    sides.waiter->drain();
    CHECK_FALSE(box.arm(sides.waiter));
    CHECK(box.stall(first));
    CHECK_FALSE(is_signalled(*sides.waiter));
    CHECK_FALSE(box.stall(second));
    CHECK(box.stall(second));
    CHECK(is_signalled(*sides.waiter));
    CHECK(box.take_stall() == second);

    box.forget_stall();
    CHECK_FALSE(box.arm(sides.waiter));
    CHECK(has_rung(*sides.bell));
    CHECK_FALSE(box.stall(second));
    CHECK(box.stall(second));
    CHECK(box.take_stall() == second);
}

TEST_CASE("mailbox: a stall is no news to a consumer that went away and came back") {
    two_sides sides;
    auto& box = sides.box;
    const std::vector<kqview::request_id> holders{1};
    CHECK_FALSE(box.arm(sides.waiter));
    CHECK_FALSE(box.stall(holders));
    box.disarm();  // it may take from `holders` here
    CHECK_FALSE(box.arm(sides.waiter));
    CHECK_FALSE(box.stall(holders));
    CHECK_FALSE(is_signalled(*sides.waiter));
    CHECK(box.stall(holders));
    CHECK(is_signalled(*sides.waiter));
}

TEST_CASE("mailbox: a bounded stream over two threads loses, doubles and reorders nothing") {
    constexpr int n_tokens = 3000;
    for (const int run_ahead : {0, 1, 3}) {
        CAPTURE(run_ahead);
        two_sides sides;
        auto& box = sides.box;
        std::atomic<int> n_taken{0};
        std::atomic<int> n_over{0};
        std::thread producer([&] {
            for (int i = 0; i < n_tokens; ++i) {
                while (!box.has_room(run_ahead)) sides.bell->wait({});
                // The count follows the take: it may be one behind.
                if (i + 1 - n_taken > std::max(run_ahead, 1) + 1) ++n_over;
                const bool is_last = i + 1 == n_tokens;
                box.put(make_token(i),
                        is_last ? std::optional(make_end(finish_reason::length)) : std::nullopt);
            }
        });
        std::vector<token_id> taken;
        bool has_ended = false;
        while (!has_ended) {
            if (const auto item = box.try_take()) {
                if (item->token) taken.push_back(item->token->id);
                ++n_taken;
                has_ended = item->end.has_value();
                continue;
            }
            sides.waiter->drain();
            if (box.arm(sides.waiter)) continue;
            kqview::test::await(*sides.waiter);
        }
        producer.join();
        std::vector<token_id> expected;
        for (int i = 0; i < n_tokens; ++i) expected.push_back(i);
        CHECK(taken == expected);
        CHECK(n_over == 0);
        CHECK(box.n_taken() == n_tokens);
    }
}

// ---- wake_handle

TEST_CASE("wake_handle: it is set from signal to drain") {
    wake_handle handle;
    CHECK_FALSE(is_signalled(handle));
    handle.signal();
    CHECK(is_signalled(handle));
    CHECK(handle.wait() == wait_end::is_set);
    handle.drain();
    CHECK_FALSE(is_signalled(handle));
    handle.signal();
    CHECK(is_signalled(handle));
}

TEST_CASE("wake_handle: drain without a signal neither blocks nor loses the next signal") {
    wake_handle handle;
    handle.drain();
    handle.signal();
    CHECK(is_signalled(handle));
}

#ifndef _WIN32  // which has neither descriptors nor signals
TEST_CASE("wake_handle: signals before a drain are one write to a descriptor") {
    wake_handle handle;
    for (int i = 0; i < 1000; ++i) handle.signal();
    pollfd waiting{handle.fd(), POLLIN, 0};
    CHECK(::poll(&waiting, 1, 0) == 1);
    std::uint64_t count = 0;
    REQUIRE(::read(handle.fd(), &count, sizeof count) == sizeof count);
    CHECK(count == 1);  // of an eventfd: the sum; of a pipe: the first write
    CHECK_FALSE(is_signalled(handle));
}

TEST_CASE("wake_handle: a wait is interrupted when a signal handler ran") {
    struct sigaction action {};
    struct sigaction former {};
    action.sa_handler = [](int) {};
    sigaction(SIGUSR1, &action, &former);
    wake_handle handle;
    std::atomic<bool> done{false};
    std::atomic<wait_end> result{};
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
    CHECK(result == wait_end::interrupted);
}
#endif

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
    while (std::chrono::steady_clock::now() < end) {
        handle.drain();
        ++n_rounds;
        kqview::test::await(handle);  // they signal on: it must come
    }
    is_done = true;
    for (auto& thread : signalling) thread.join();
    CHECK(n_rounds > 100);
}
