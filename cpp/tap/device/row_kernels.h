// Kernels of our own that compute a step's attention rows beside the next step, in the form in
// which they are handed out. A device that has none computes rows by ggml's nodes (device_nodes).
// Owner:   the device_tap, one for each device.
// Threads: the engine thread.
#pragma once

#include <ggml-backend.h>

#include <cstddef>
#include <memory>
#include <string>

#include "tap/device/row_step.h"

namespace kqview {

class row_kernels {
public:
    virtual ~row_kernels() = default;

    // Whether keys of this type (a ggml_type) and these sizes can be read.
    virtual bool can_read(int key_type, int n_dim, int n_head, int n_head_kv) const = 0;
    // Whether kernels can write to this memory of the host.
    virtual bool reaches(const void* memory) const = 0;

    // Queues the step behind `after`, with its copies to the host; `done` is recorded behind them.
    // `saved` and `memory` are on the device, of which the step before is done with `saved` of the
    // same parity. Raises decode.
    virtual void run(const row_step& step, const std::byte* saved, std::byte* memory,
                     std::size_t parity, ggml_backend_event_t after, ggml_backend_event_t done) = 0;
    // Blocks until all that was queued has ended. Raises decode.
    virtual void synchronize() = 0;
};

// Null if the device has none, or if the environment variable KQVIEW_DEVICE_ROWS is "ggml"; one
// that should run and cannot is named in the log.
std::unique_ptr<row_kernels> make_row_kernels(ggml_backend_dev_t device);

// Whether this build has kernels for a device, without asking the driver.
bool may_have_row_kernels(ggml_backend_dev_t device);

// For tests: what make_row_kernels asks first.
using row_kernels_maker = std::unique_ptr<row_kernels> (*)(ggml_backend_dev_t);
void set_row_kernels_maker(row_kernels_maker maker);

}  // namespace kqview
