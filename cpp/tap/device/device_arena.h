// One buffer on a device, from which tensors get memory: results from the front, scratch memory
// from the back. Addresses stay fixed while nothing is reserved, so recorded graphs stay valid.
// Also copies between two such buffers of a device.
// Owner:   transfer.
// Threads: the engine thread.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <memory>

namespace kqview {

class device_arena {
public:
    explicit device_arena(ggml_backend_dev_t device) : device_(device) {}
    ~device_arena() { release(); }

    // Replaces the buffer, whose tensors must not be used any more. False: the device has no room.
    bool reserve(std::size_t n_bytes);
    void release();
    std::size_t capacity() const { return capacity_; }

    // Forgets what was placed behind the first `n_kept` bytes, for the next graph.
    void begin(std::size_t n_kept = 0);
    // Assigns memory to a tensor. Returns false if there is no room or the backend refuses it.
    bool place(ggml_tensor* tensor);
    // As place(), from the back.
    bool place_scratch(ggml_tensor* tensor);
    // Places a tensor at an offset, such as that of one in another arena.
    bool place_at(std::size_t offset, ggml_tensor* tensor);
    // Places a tensor as a part of another.
    static bool place_in(ggml_tensor* whole, std::size_t offset, ggml_tensor* part);
    std::size_t n_placed() const { return n_placed_; }
    std::size_t offset_of(const ggml_tensor* tensor) const;

    // The first `n_bytes` as a flat tensor, for copies; valid until the next call.
    ggml_tensor* bytes(std::size_t n_bytes);

private:
    ggml_backend_dev_t device_;
    ggml_backend_buffer_t buffer_ = nullptr;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors_{nullptr, ggml_free};
    ggml_tensor* bytes_ = nullptr;
    std::size_t capacity_ = 0;
    std::size_t n_placed_ = 0;
    std::size_t n_scratch_ = 0;
};

// A copy of the first bytes of one buffer to another on the same device, as a graph of one node.
// A stream of CUDA does one thing after the other. Vulkan overlaps what nothing orders, and ggml
// puts barriers between the nodes of graphs only: a bare copy may read before shaders have written.
// Never:   is destroyed before its streams were waited for: Vulkan remembers the node until then.
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
