#include "tap/device/transfer.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"

namespace kqview {

namespace {

// Sets the length of a flat tensor to the size of the copy.
void resize(ggml_tensor* bytes, std::size_t n_bytes) {
    bytes->ne[0] = static_cast<std::int64_t>(n_bytes);
    bytes->nb[1] = bytes->nb[2] = bytes->nb[3] = n_bytes;
}

}  // namespace

transfer::transfer(ggml_backend_dev_t device, copy_counters& counters)
    : device_(device), counters_(counters) {
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    // Backends without page-locked memory have no streams either: an RPC server answers in order.
    is_async_ = props.caps.async && props.caps.events && props.caps.host_buffer;
}

transfer::~transfer() {
    release();
    if (copy_stream_) ggml_backend_free(copy_stream_);
}

void transfer::release() {
    try {
        if (copy_stream_) ggml_backend_synchronize(copy_stream_);
    } catch (...) {  // failed copies have ended too; await has raised their error
    }
    for (auto& one : staging_) {
        if (one.filled) ggml_backend_event_free(one.filled);
        if (one.arrived) ggml_backend_event_free(one.arrived);
        if (one.buffer) ggml_backend_buffer_free(one.buffer);
        one = {};
    }
    if (results_) ggml_backend_buffer_free(results_);
    results_ = nullptr;
    result_bytes_ = nullptr;
    tensors_.reset();
    capacity_ = n_placed_ = n_scratch_ = 0;
}

ggml_backend_buffer_t transfer::allocate(std::size_t n_bytes) const {
    auto* const buffer =
        ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device_), n_bytes);
    if (buffer) return buffer;
    std::size_t n_free = 0, n_total = 0;
    ggml_backend_dev_memory(device_, &n_free, &n_total);
    throw error(errc::out_of_memory,
                "attention rows on " + std::string(ggml_backend_dev_name(device_)) + " need " +
                    std::to_string(is_async_ ? 3 : 1) + " x " + size_text(n_bytes) + ", " +
                    size_text(n_free) +
                    " are free; capture fewer layers, or lower n_ctx, n_slots or n_gpu_layers");
}

ggml_tensor* transfer::bytes_of(ggml_backend_buffer_t buffer) const {
    auto* const bytes =
        ggml_new_tensor_1d(tensors_.get(), GGML_TYPE_I8, static_cast<std::int64_t>(capacity_));
    ggml_backend_tensor_alloc(buffer, bytes, ggml_backend_buffer_get_base(buffer));
    return bytes;
}

void transfer::reserve(std::size_t n_bytes) {
    if (n_bytes <= capacity_) return;
    release();
    capacity_ = n_bytes;
    try {
        constexpr std::size_t n_tensors = 3;
        tensors_.reset(ggml_init({n_tensors * ggml_tensor_overhead() + 1, nullptr, true}));
        results_ = allocate(n_bytes);
        result_bytes_ = bytes_of(results_);
        if (!is_async_) {
            fetched_.resize(n_bytes);
            return;
        }
        if (!copy_stream_) copy_stream_ = ggml_backend_dev_init(device_, nullptr);
        for (auto& one : staging_) {
            one.buffer = allocate(n_bytes);
            one.bytes = bytes_of(one.buffer);
            one.filled = ggml_backend_event_new(device_);
            one.arrived = ggml_backend_event_new(device_);
        }
        const bool has_events =
            std::all_of(staging_.begin(), staging_.end(),
                        [](const staging& one) { return one.filled && one.arrived; });
        if (copy_stream_ && has_events) return;
        throw error(errc::out_of_memory, std::string(ggml_backend_dev_name(device_)) +
                                             " gives no stream or event for copies of attention "
                                             "rows; lower n_ctx or n_gpu_layers");
    } catch (...) {
        release();
        throw;
    }
}

bool transfer::place(ggml_tensor* result) {
    if (!results_) return false;
    const auto alignment = ggml_backend_buffer_get_alignment(results_);
    const auto at = (n_placed_ + alignment - 1) / alignment * alignment;
    const auto n_bytes = ggml_backend_buffer_get_alloc_size(results_, result);
    if (at + n_bytes + n_scratch_ > capacity_) return false;
    auto* const base = static_cast<std::byte*>(ggml_backend_buffer_get_base(results_));
    n_placed_ = at + n_bytes;
    return ggml_backend_tensor_alloc(results_, result, base + at) == GGML_STATUS_SUCCESS;
}

bool transfer::place_scratch(ggml_tensor* tensor) {
    if (!results_) return false;
    const auto alignment = ggml_backend_buffer_get_alignment(results_);
    const auto n_bytes = n_scratch_ + ggml_backend_buffer_get_alloc_size(results_, tensor);
    if (n_placed_ + n_bytes > capacity_) return false;
    const auto at = (capacity_ - n_bytes) / alignment * alignment;
    if (at < n_placed_) return false;
    n_scratch_ = capacity_ - at;
    auto* const base = static_cast<std::byte*>(ggml_backend_buffer_get_base(results_));
    return ggml_backend_tensor_alloc(results_, tensor, base + at) == GGML_STATUS_SUCCESS;
}

bool transfer::place_in(ggml_tensor* whole, std::size_t offset, ggml_tensor* part) {
    auto* const data = static_cast<std::byte*>(whole->data) + offset;
    return ggml_backend_tensor_alloc(whole->buffer, part, data) == GGML_STATUS_SUCCESS;
}

std::size_t transfer::offset_of(const ggml_tensor* result) const {
    const auto* const base = static_cast<const std::byte*>(ggml_backend_buffer_get_base(results_));
    return static_cast<std::size_t>(static_cast<const std::byte*>(result->data) - base);
}

bool transfer::start(ggml_backend_t compute, transfer_id id, std::size_t n_used,
                     const std::vector<row_copy>& copies) {
    resize(result_bytes_, n_used);
    if (!is_async_) {
        ggml_backend_synchronize(compute);
        const auto started = clock::now();
        count(1, n_used);
        ggml_backend_tensor_get(result_bytes_, fetched_.data(), 0, n_used);
        for (const auto& one : copies) {
            for (std::size_t i = 0; i < one.n_rows; ++i) {
                std::memcpy(one.to + i * one.to_stride,
                            fetched_.data() + one.from + i * one.from_stride, one.row_bytes);
            }
        }
        count(clock::now() - started);
        return false;
    }
    auto& stage = staging_[id % staging_.size()];
    if (stage.id != 0) await(stage.id);
    resize(stage.bytes, n_used);
    // On the compute's own stream, so behind it. A copy between two backends would be queued on
    // either, as the driver likes: CUDA's is on the source's, Vulkan's on the destination's.
    ggml_backend_tensor_copy_async(compute, compute, result_bytes_, stage.bytes);
    ggml_backend_event_record(stage.filled, compute);
    ggml_backend_event_wait(copy_stream_, stage.filled);
    stage.ready.reset();
    std::size_t n_bytes = 0;
    for (const auto& one : copies) n_bytes += one.n_rows * one.row_bytes;
    count(copies.size(), n_bytes);
    for (const auto& one : copies) {
        ggml_backend_tensor_get_2d_async(copy_stream_, stage.bytes, one.to, one.from, one.row_bytes,
                                         one.n_rows, one.from_stride, one.to_stride);
    }
    ggml_backend_event_record(stage.arrived, copy_stream_);
    stage.id = id;
    return true;
}

void transfer::note_computed() {
    for (auto& one : staging_) {
        if (one.id != 0 && !one.ready) one.ready = clock::now();
    }
}

void transfer::await(transfer_id id) {
    for (auto& one : staging_) {
        if (one.id == 0 || one.id > id) continue;
        one.id = 0;  // over, whether it succeeds or fails
        if (!one.ready) {
            ggml_backend_event_synchronize(one.filled);
            one.ready = clock::now();
        }
        ggml_backend_event_synchronize(one.arrived);
        count(clock::now() - *one.ready);
    }
}

void transfer::count(std::size_t n_copies, std::size_t n_bytes) {
    counters_.n_copies += n_copies;
    counters_.n_bytes += n_bytes;
}

void transfer::count(clock::duration spent) {
    counters_.copy_ns += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
}

}  // namespace kqview
