// What a decode leaves of a step's rows, and the count of what was copied out of devices.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kqview {

// Counts the steps whose rows were sent off by a device; 0 is none.
using transfer_id = std::uint64_t;

struct step_result {
    const std::byte* written_at = nullptr;  // where the CPU's kernel wrote the first row, if it did
    transfer_id transfer = 0;               // to await before the rows are read; 0 = they are there
};

// What copying attention from devices to the host came to; the counters only ever grow.
// Threads: the engine thread counts, any thread reads; shared, because a reader may outlive the
//          tap.
struct copy_counters {
    std::atomic<std::uint64_t> n_copies{0};  // calls: packed rows at one distance are one
    std::atomic<std::uint64_t> n_bytes{0};   // that left a device
    // From when the engine thread knew that the rows could leave (the compute, and the copy within
    // the device, had ended) to when it knew that they had arrived. It asks for neither before it
    // has to, so this is an upper bound, and exact only with `are_awaited`.
    std::atomic<std::uint64_t> copy_ns{0};

    // Set by any thread, for benchmarks of copies: a step that leaves rows on a device then ends
    // when they are on the host.
    std::atomic<bool> are_awaited{false};
};

}  // namespace kqview
