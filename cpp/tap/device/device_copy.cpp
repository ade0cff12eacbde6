#include "tap/device/device_copy.h"
#include <ggml-alloc.h>

#include <cstdint>
#include <string_view>

#include "base/error.h"

namespace kqview {

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
