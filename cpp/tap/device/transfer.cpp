#include "tap/device/transfer.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace kqview {

transfer::transfer(ggml_backend_dev_t device, copy_counters& counters)
    : device_(device),
      counters_(counters),
      results_(device),
      beside_(device),
      staging_{staging(device), staging(device)} {
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
        one.filled = one.arrived = nullptr;
        one.results.release();
        one.id = 0;
        one.beside.reset();
        one.failure = nullptr;
        one.ready.reset();
    }
    results_.release();
    beside_.release();
    sizes_ = {};
}

void transfer::allocate(device_arena& arena, std::size_t n_bytes) const {
    if (n_bytes == 0 || arena.reserve(n_bytes)) return;
    std::size_t n_free = 0, n_total = 0;
    ggml_backend_dev_memory(device_, &n_free, &n_total);
    const auto n_copies = is_async_ ? staging_.size() + 1 : 1;
    throw error(errc::out_of_memory,
                "attention rows on " + std::string(ggml_backend_dev_name(device_)) + " need " +
                    size_text(n_copies * sizes_.n_results + sizes_.n_beside) + ", " +
                    size_text(n_free) +
                    " are free; capture fewer layers, or lower n_ctx, n_slots or n_gpu_layers");
}

void transfer::reserve(const sizes& wanted) {
    if (wanted.n_results <= sizes_.n_results && wanted.n_beside <= sizes_.n_beside &&
        wanted.n_queries <= sizes_.n_queries) {
        return;
    }
    const sizes larger{std::max(wanted.n_results, sizes_.n_results),
                       std::max(wanted.n_beside, sizes_.n_beside),
                       std::max(wanted.n_queries, sizes_.n_queries)};
    release();
    sizes_ = larger;
    try {
        allocate(results_, larger.n_results);
        if (!is_async_) {
            fetched_.resize(larger.n_results);
            return;
        }
        allocate(beside_, larger.n_beside);
        if (!copy_stream_) copy_stream_ = ggml_backend_dev_init(device_, nullptr);
        for (auto& one : staging_) {
            allocate(one.results, larger.n_results);
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

void transfer::begin_graph() {
    results_.begin();
    beside_.begin(sizes_.n_queries);
}

bool transfer::start(ggml_backend_t compute, transfer_id id, std::size_t n_used,
                     const rows_out& copies, const work_beside& work) {
    if (!is_async_) {
        ggml_backend_synchronize(compute);
        const auto started = clock::now();
        count(1, n_used);
        ggml_backend_tensor_get(results_.bytes(n_used), fetched_.data(), 0, n_used);
        for (const auto& one : copies.of_results) {
            for (std::size_t i = 0; i < one.n_rows; ++i) {
                std::memcpy(one.to + i * one.to_stride,
                            fetched_.data() + one.from + i * one.from_stride, one.row_bytes);
            }
        }
        count(clock::now() - started);
        return false;
    }
    const auto parity = id % staging_.size();
    auto& stage = staging_[parity];
    if (stage.id != 0) await(stage.id);
    // On the compute's own stream, so behind it. A copy between two backends would be queued on
    // either, as the driver likes: CUDA's is on the source's, Vulkan's on the destination's.
    ggml_backend_tensor_copy_async(compute, compute, results_.bytes(n_used),
                                   stage.results.bytes(n_used));
    ggml_backend_event_record(stage.filled, compute);
    ggml_backend_event_wait(copy_stream_, stage.filled);
    stage.ready.reset();
    stage.id = id;
    stage.beside = work.graph;
    stage.failure = nullptr;
    if (work.graph) {
        const auto n_bytes = std::min(sizes_.n_queries, n_used);
        ggml_backend_tensor_copy_async(copy_stream_, copy_stream_, stage.results.bytes(n_bytes),
                                       beside_.bytes(n_bytes));
        work.graph->run(copy_stream_, work.streams, parity);
    }
    fetch(beside_, copies.of_beside);
    fetch(stage.results, copies.of_results);
    ggml_backend_event_record(stage.arrived, copy_stream_);
    return true;
}

void transfer::fetch(device_arena& from, const std::vector<row_copy>& copies) {
    if (copies.empty()) return;
    auto* const bytes = from.bytes(from.capacity());
    std::size_t n_bytes = 0;
    for (const auto& one : copies) {
        n_bytes += one.n_rows * one.row_bytes;
        ggml_backend_tensor_get_2d_async(copy_stream_, bytes, one.to, one.from, one.row_bytes,
                                         one.n_rows, one.from_stride, one.to_stride);
    }
    count(copies.size(), n_bytes);
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
        const auto beside = std::exchange(one.beside, nullptr);
        if (const auto failure = std::exchange(one.failure, nullptr)) {
            std::rethrow_exception(failure);
        }
        if (!one.ready) {
            ggml_backend_event_synchronize(one.filled);
            one.ready = clock::now();
        }
        ggml_backend_event_synchronize(one.arrived);
        count(clock::now() - *one.ready);
    }
}

void transfer::settle() noexcept {
    for (auto& one : staging_) {
        if (one.id == 0 || one.failure) continue;
        try {
            ggml_backend_event_synchronize(one.arrived);
        } catch (...) {
            one.failure = std::current_exception();
        }
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
