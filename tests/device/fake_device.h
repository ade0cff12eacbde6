// A device for tests that is no hardware: its memory is the host's but says it is not, its streams
// do what they were told as late as order allows, and its new memory holds NaN. Whoever reads a
// copy before it was waited for, or lets a buffer be overwritten too soon, gets wrong values every
// time, not once a week.
// Threads: streams belong to the thread that uses their backend; the settings are for any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kqview::testing {

struct fake_device_settings {
    bool is_late = true;             // false: streams do everything at once
    std::int64_t fail_copy_in = -1;  // the so many-th copy to the host from now on fails; -1 = none
    std::size_t memory_bytes = std::size_t{4} << 30;  // of each device
    std::size_t pinned_bytes = std::size_t{1} << 30;  // page-locked memory there is
    std::string refused_op;                           // ggml's name of one it cannot compute
    double copy_s = 0;                                // that each copy to the host takes
    // ggml aborts, as CUDA's backend does, in the so many-th call from now on of this kind:
    // "graph", "buffer", "copy", "wait", or "thread", which is a graph on a thread that is none of
    // ours; what it logs before.
    std::string abort_at;
    std::int64_t abort_in = 0;
    std::string abort_log;
};

struct fake_device_counts {
    std::uint64_t n_graphs = 0;
    std::uint64_t n_copies_to_host = 0;  // out of a stream's queue
    std::uint64_t n_copies_on_device = 0;
    std::size_t used_bytes = 0;  // of all devices
};

// Registers the first `n_devices` with ggml: engines opened from then on find them, until
// `unregister_fake_devices`. Engines that are open keep theirs.
void register_fake_devices(int n_devices);
void unregister_fake_devices();
void set_fake_device(const fake_device_settings& settings);
fake_device_counts count_fake_device();

}  // namespace kqview::testing
