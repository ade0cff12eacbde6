// Page-locked host memory of a device, as ggml gives it out: what its copies reach without a
// detour.
// Threads: any.
#pragma once

#include <ggml-backend.h>

#include <atomic>
#include <memory>

#include "memory/host_buffer.h"

namespace kqview {

// Null where the device has no such memory. Blocks that the driver cannot lock are plain ones and
// say so. `is_lost`: the device failed, and giving a block back would end the process; it stays
// then.
std::shared_ptr<host_allocator> pinned_allocator(ggml_backend_dev_t device,
                                                 std::shared_ptr<const std::atomic<bool>> is_lost);

}  // namespace kqview
