// What the engine thread is doing, when it last gave a sign of life, and the request to stop it.
// Owner:   shared by the scheduler, its runner and whoever watches.
// Threads: the engine thread writes phases and signs of life; within a decode, the compute thread
//          that asks is_stopped() does. Any thread reads and stops.
// Never:   locks. A watcher must see an engine thread that hangs with a lock held.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kqview {

enum class engine_phase : std::uint8_t {
    waiting,    // for a request, a consumer or memory: as long as it likes
    ordering,   // cancellations, work on idle slots
    admitting,  // a request gets its slot: graphs, reuse
    filling,    // a step is put together; caches are copied
    decoding,   // llama.cpp computes
    sampling,
    closing,
    ended,
};

constexpr std::array phase_names{"waiting",  "ordering", "admitting", "filling",
                                 "decoding", "sampling", "closing",   "ended"};
static_assert(phase_names.size() == static_cast<std::size_t>(engine_phase::ended) + 1);

constexpr const char* name_of(engine_phase phase) {
    return phase_names[static_cast<std::size_t>(phase)];
}

class heartbeat {
public:
    using clock = std::chrono::steady_clock;

    struct reading {
        engine_phase phase;
        double quiet_s;         // since the last sign of life
        std::uint64_t n_steps;  // begun
    };

    void enter(engine_phase phase) noexcept {
        if (phase == engine_phase::decoding) n_steps_.fetch_add(1, std::memory_order_relaxed);
        state_.store(packed(phase), std::memory_order_release);
    }

    // Within a phase. Reads the clock only now and then: llama.cpp calls this for each node of a
    // graph.
    void note_progress() noexcept {
        const auto n = n_signs_.load(std::memory_order_relaxed) + 1;
        n_signs_.store(n, std::memory_order_relaxed);
        if (n % n_signs_a_look == 0) state_.store(packed(read().phase), std::memory_order_release);
    }

    // Asks the engine thread to end: a decode breaks off at its next node.
    void stop() noexcept { is_stopped_.store(true, std::memory_order_release); }
    bool is_stopped() const noexcept { return is_stopped_.load(std::memory_order_acquire); }

    reading read() const noexcept {
        const auto state = state_.load(std::memory_order_acquire);
        const auto quiet_us = now_us() - static_cast<std::int64_t>(state >> n_phase_bits);
        return {static_cast<engine_phase>(state & ((1u << n_phase_bits) - 1)),
                quiet_us > 0 ? static_cast<double>(quiet_us) * 1e-6 : 0.0,
                n_steps_.load(std::memory_order_relaxed)};
    }

private:
    static constexpr int n_phase_bits = 4;
    static constexpr std::uint64_t n_signs_a_look = 8;

    std::int64_t now_us() const noexcept {
        return std::chrono::duration_cast<std::chrono::microseconds>(clock::now() - start_).count();
    }
    std::uint64_t packed(engine_phase phase) const noexcept {
        return static_cast<std::uint64_t>(now_us()) << n_phase_bits |
               static_cast<std::uint64_t>(phase);
    }

    const clock::time_point start_ = clock::now();
    std::atomic<std::uint64_t> state_{static_cast<std::uint64_t>(engine_phase::waiting)};
    std::atomic<std::uint64_t> n_steps_{0};
    std::atomic<std::uint64_t> n_signs_{0};
    std::atomic<bool> is_stopped_{false};
};

}  // namespace kqview
