// What the copies of attention from devices to the host came to.
// Threads: the engine thread counts, any thread reads; shared, because a reading may outlive the
// tap.
#pragma once

#include <atomic>
#include <cstdint>

namespace kqview {

// Counters only ever grow.
struct copy_counters {
    std::atomic<std::uint64_t> n_copies{0};  // calls: packed rows at one distance are one
    std::atomic<std::uint64_t> n_bytes{0};   // that left a device
    // From when the engine thread knew that the rows could leave (the compute, and the copy within
    // the device, had ended) to when it knew that they were there. It asks for neither before it
    // has to: an upper bound, but where `are_awaited`.
    std::atomic<std::uint64_t> copy_ns{0};

    // Set by any thread, for benchmarks of copies: a step that leaves rows on a device ends when
    // they are on the host.
    std::atomic<bool> are_awaited{false};
};

}  // namespace kqview
