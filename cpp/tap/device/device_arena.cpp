#include "tap/device/device_arena.h"

#include <ggml-alloc.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "base/error.h"

namespace kqview {

bool device_arena::reserve(std::size_t n_bytes) {
    release();
    buffer_ = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device_), n_bytes);
    if (!buffer_) return false;
    capacity_ = n_bytes;
    tensors_.reset(ggml_init({ggml_tensor_overhead() + 1, nullptr, true}));
    bytes_ = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I8, static_cast<std::int64_t>(capacity_));
    ggml_backend_tensor_alloc(buffer_, bytes_, ggml_backend_buffer_get_base(buffer_));
    return true;
}

void device_arena::release() {
    if (buffer_) ggml_backend_buffer_free(buffer_);
    buffer_ = nullptr;
    bytes_ = nullptr;
    tensors_.reset();
    capacity_ = n_placed_ = n_scratch_ = 0;
}

void device_arena::begin(std::size_t n_kept) {
    n_placed_ = std::min(n_kept, capacity_);
    n_scratch_ = 0;
}

bool device_arena::place(ggml_tensor* tensor) {
    if (!buffer_) return false;
    const auto alignment = ggml_backend_buffer_get_alignment(buffer_);
    const auto at = (n_placed_ + alignment - 1) / alignment * alignment;
    const auto n_bytes = ggml_backend_buffer_get_alloc_size(buffer_, tensor);
    if (at + n_bytes + n_scratch_ > capacity_) return false;
    n_placed_ = at + n_bytes;
    return place_at(at, tensor);
}

bool device_arena::place_scratch(ggml_tensor* tensor) {
    if (!buffer_) return false;
    const auto alignment = ggml_backend_buffer_get_alignment(buffer_);
    const auto n_bytes = n_scratch_ + ggml_backend_buffer_get_alloc_size(buffer_, tensor);
    if (n_placed_ + n_bytes > capacity_) return false;
    const auto at = (capacity_ - n_bytes) / alignment * alignment;
    if (at < n_placed_) return false;
    n_scratch_ = capacity_ - at;
    return place_at(at, tensor);
}

bool device_arena::place_at(std::size_t offset, ggml_tensor* tensor) {
    if (!buffer_) return false;
    auto* const base = static_cast<std::byte*>(ggml_backend_buffer_get_base(buffer_));
    return ggml_backend_tensor_alloc(buffer_, tensor, base + offset) == GGML_STATUS_SUCCESS;
}

bool device_arena::place_in(ggml_tensor* whole, std::size_t offset, ggml_tensor* part) {
    auto* const data = static_cast<std::byte*>(whole->data) + offset;
    return ggml_backend_tensor_alloc(whole->buffer, part, data) == GGML_STATUS_SUCCESS;
}

std::size_t device_arena::offset_of(const ggml_tensor* tensor) const {
    const auto* const base = static_cast<const std::byte*>(ggml_backend_buffer_get_base(buffer_));
    return static_cast<std::size_t>(static_cast<const std::byte*>(tensor->data) - base);
}

ggml_tensor* device_arena::bytes(std::size_t n_bytes) {
    bytes_->ne[0] = static_cast<std::int64_t>(n_bytes);
    bytes_->nb[1] = bytes_->nb[2] = bytes_->nb[3] = n_bytes;
    return bytes_;
}

// ---- copies between two of them

namespace {

// These are one backend, built for three makers.
bool keeps_order(ggml_backend_dev_t device) {
    const auto registry = ggml_backend_dev_backend_reg(device);
    const std::string_view name = registry ? ggml_backend_reg_name(registry) : "";
    return name == "CUDA" || name == "ROCm" || name == "MUSA";
}

void resize(ggml_tensor* tensor, std::int64_t n_values) {
    tensor->ne[0] = n_values;
    tensor->nb[1] = tensor->nb[2] = tensor->nb[3] =
        static_cast<std::size_t>(n_values) * sizeof(std::int32_t);
}

}  // namespace

device_copy::device_copy(ggml_backend_dev_t device, device_arena& from, device_arena& to)
    : from_(from), to_(to) {
    if (keeps_order(device)) return;
    constexpr std::size_t n_tensors = 3;
    tensors_.reset(ggml_init(
        {n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false), nullptr,
         true}));
    // Integers: no backend changes their bits.
    auto* const source = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1);
    auto* const target = ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I32, 1);
    if (!from.place_at(0, source) || !to.place_at(0, target)) return;
    auto* const node = ggml_cpy(tensors_.get(), source, target);
    if (ggml_backend_view_init(node) != GGML_STATUS_SUCCESS) return;
    if (!ggml_backend_dev_supports_op(device, node)) return;
    graph_ = ggml_new_graph_custom(tensors_.get(), n_tensors, false);
    ggml_build_forward_expand(graph_, node);
    node_ = node;
}

void device_copy::run(ggml_backend_t stream, std::size_t n_bytes) {
    if (!node_) {
        ggml_backend_tensor_copy_async(stream, stream, from_.bytes(n_bytes), to_.bytes(n_bytes));
        return;
    }
    const auto n_values =
        static_cast<std::int64_t>((n_bytes + sizeof(std::int32_t) - 1) / sizeof(std::int32_t));
    for (auto* const tensor : {node_, node_->src[0], node_->src[1]}) resize(tensor, n_values);
    if (ggml_backend_graph_compute_async(stream, graph_) == GGML_STATUS_SUCCESS) return;
    throw error(errc::decode, "attention rows could not be copied on their device");
}

}  // namespace kqview
