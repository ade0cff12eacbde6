// The result of a step as far as its rows are concerned, and counters of copies out of devices.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kqview {

// Numbers the steps whose rows a device transfers; 0 means none.
using transfer_id = std::uint64_t;

struct step_result {
    const std::byte* written_at = nullptr;  // where the CPU's kernel wrote the first row, or null
    transfer_id transfer = 0;               // await before reading the rows; 0 = the rows are there
};

// Cost of copying attention from devices to the host; other counters only grow.
// Threads: the engine thread writes, any thread reads. Shared, because a reader may outlive the
//          tap.
struct copy_counters {
    std::atomic<std::uint64_t> n_copies{0};       // copy calls; rows packed at one stride take one
    std::atomic<std::uint64_t> n_bytes{0};        // bytes copied off devices
    std::atomic<std::uint64_t> n_kernel_rows{0};  // that kernels of ours computed
    // Time from when the engine thread knew that the rows could be copied (the compute, and the
    // copy within the device, had ended) to when it knew that they had arrived. The thread checks
    // neither before it has to, so this is an upper bound; it is exact only with `are_awaited`.
    std::atomic<std::uint64_t> copy_ns{0};

    // Bytes that devices hold for rows on their way; this one falls, too.
    std::atomic<std::size_t> reserved_bytes{0};

    // Set by any thread, for copy benchmarks: a step with rows on a device then ends only once they
    // are on the host.
    std::atomic<bool> are_awaited{false};
};

}  // namespace kqview
