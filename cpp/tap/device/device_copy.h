// A copy of the first bytes of one buffer to another on the same device, as a graph of one node.
// A stream of CUDA does one thing after the other. Vulkan overlaps what nothing orders, and ggml
// puts barriers between the nodes of graphs only: a bare copy may read before shaders have written.
// Owner:   transfer.
// Threads: the engine thread.
// Never:   is destroyed before its streams were waited for: Vulkan remembers the node until then.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <memory>

#include "tap/device/device_arena.h"

namespace kqview {

class device_copy {
public:
    device_copy(ggml_backend_dev_t device, device_arena& from, device_arena& to);

    // Queues the copy of `n_bytes` on `stream`. Raises decode.
    void run(ggml_backend_t stream, std::size_t n_bytes);

private:
    device_arena& from_;
    device_arena& to_;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors_{nullptr, ggml_free};
    ggml_tensor* node_ = nullptr;  // null: the stream keeps copies in order itself
    ggml_cgraph* graph_ = nullptr;
};

}  // namespace kqview
