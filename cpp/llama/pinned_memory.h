// Page-locked host memory of a device, as ggml gives it out: what its copies reach without a detour.
// Threads: any.
#pragma once

#include <ggml-backend.h>

#include <memory>

#include "memory/host_buffer.h"

namespace kqview {

// Null where the device has no such memory. Blocks that the driver cannot lock are plain ones and say so.
std::shared_ptr<host_allocator> pinned_allocator(ggml_backend_dev_t device);

}  // namespace kqview
