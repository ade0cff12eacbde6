#include "tap/device/transfer.h"
#include <ggml-alloc.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

// Kept for a plan that needs less: allocating is slow, and plans may alternate.
constexpr std::size_t spare_bytes = std::size_t{64} << 20;
// Vulkan keeps what a stream was told until the stream is waited for as a whole.
constexpr std::size_t n_between_drains = 256;

}  // namespace

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
    settle();
    try {
        if (kernels_) kernels_->synchronize();
        if (copy_stream_) ggml_backend_synchronize(copy_stream_);
    } catch (...) {  // its transfer has failed already
    }
    for (auto& one : staging_) {
        if (one.id != 0 && one.failure) failed_.emplace_back(one.id, one.failure);
        if (one.filled) ggml_backend_event_free(one.filled);
        if (one.arrived) ggml_backend_event_free(one.arrived);
        if (one.rows_done) ggml_backend_event_free(one.rows_done);
        one.filled = one.arrived = one.rows_done = nullptr;
        one.fill.reset();
        one.hand_over.reset();
        one.results.release();
        one.id = 0;
        one.beside.reset();
        one.failure = nullptr;
        one.ready.reset();
    }
    ran_beside_.reset();
    results_.release();
    beside_.release();
    sizes_ = {};
    note_reserved(0);
}

void transfer::note_reserved(std::size_t n_bytes) {
    counters_.reserved_bytes += n_bytes - reserved_bytes_;
    reserved_bytes_ = n_bytes;
}

std::size_t transfer::bytes_for(const sizes& wanted) const {
    if (!is_async_) return wanted.n_results;
    return (staging_.size() + 1) * wanted.n_results + wanted.n_beside;
}

void transfer::allocate(device_arena& arena, std::size_t n_bytes) const {
    if (n_bytes == 0 || arena.reserve(n_bytes)) return;
    std::size_t n_free = 0, n_total = 0;
    ggml_backend_dev_memory(device_, &n_free, &n_total);
    throw error(errc::out_of_memory, "attention rows on ", ggml_backend_dev_name(device_), " need ",
                size_text(bytes_for(sizes_)), ", ", size_text(n_free),
                " are free; capture fewer layers, or lower n_ctx, n_slots or n_gpu_layers");
}

void transfer::reserve(const sizes& wanted) {
    const bool has_room = wanted.n_results <= sizes_.n_results &&
                          wanted.n_beside <= sizes_.n_beside &&
                          wanted.n_queries <= sizes_.n_queries;
    if (has_room && reserved_bytes_ <= bytes_for(wanted) + spare_bytes) return;
    release();
    if (bytes_for(wanted) == 0) return;
    sizes_ = wanted;
    try {
        allocate(results_, wanted.n_results);
        if (!is_async_) {
            fetched_.resize(wanted.n_results);
            note_reserved(bytes_for(wanted));
            return;
        }
        allocate(beside_, wanted.n_beside);
        if (!copy_stream_) copy_stream_ = ggml_backend_dev_init(device_, nullptr);
        for (auto& one : staging_) {
            allocate(one.results, wanted.n_results);
            one.fill.emplace(device_, results_, one.results);
            if (wanted.n_beside > 0) one.hand_over.emplace(device_, one.results, beside_);
            one.filled = ggml_backend_event_new(device_);
            one.arrived = ggml_backend_event_new(device_);
            one.rows_done = ggml_backend_event_new(device_);
        }
        const bool has_events = std::all_of(
            staging_.begin(), staging_.end(),
            [](const staging& one) { return one.filled && one.arrived && one.rows_done; });
        if (copy_stream_ && has_events) {
            note_reserved(bytes_for(wanted));
            return;
        }
        throw error(
            errc::out_of_memory, ggml_backend_dev_name(device_),
            " gives no stream or event for copies of attention rows; lower n_ctx or n_gpu_layers");
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
    if (work.graph && ran_beside_ != work.graph) {
        // A stream may remember the nodes that it ran until it is waited for, as Vulkan's does to
        // see which of the next ones overlap. await() reports failures.
        settle();
        if (ran_beside_) ggml_backend_synchronize(copy_stream_);
        ran_beside_ = work.graph;
    }
    // On the compute's own stream, so behind it. A copy between two backends would be queued on
    // either, as the driver likes: CUDA's is on the source's, Vulkan's on the destination's.
    stage.fill->run(compute, n_used);
    ggml_backend_event_record(stage.filled, compute);
    stage.ready.reset();
    stage.id = id;
    stage.beside = work.graph;
    stage.failure = nullptr;
    try {
        const bool has_kernels = !work.by_kernel.jobs.empty();
        const bool has_others = !has_kernels || !copies.empty();
        if (has_kernels) {
            run_kernels(stage, work.by_kernel, parity,
                        has_others ? stage.rows_done : stage.arrived);
        }
        if (!has_others) return true;
        ggml_backend_event_wait(copy_stream_, stage.filled);
        if (work.graph) {
            stage.hand_over->run(copy_stream_, std::min(sizes_.n_queries, n_used));
            work.graph->run(copy_stream_, work.streams, parity);
        }
        fetch(beside_, copies.of_beside);
        fetch(stage.results, copies.of_results);
        if (has_kernels) ggml_backend_event_wait(copy_stream_, stage.rows_done);
        ggml_backend_event_record(stage.arrived, copy_stream_);
    } catch (...) {
        abandon(stage);
        throw;
    }
    return true;
}

void transfer::run_kernels(staging& stage, const row_step& step, std::size_t parity,
                           ggml_backend_event_t done) {
    if (step.n_bytes > beside_.capacity()) {
        throw error(errc::internal, "attention rows need ", size_text(step.n_bytes), " on ",
                    ggml_backend_dev_name(device_), ", ", size_text(beside_.capacity()),
                    " were reserved");
    }
    const auto base_of = [](device_arena& arena) {
        return static_cast<std::byte*>(arena.bytes(arena.capacity())->data);
    };
    kernels_->run(step, base_of(stage.results), base_of(beside_), parity, stage.filled, done);
    std::size_t n_bytes = 0;
    for (const auto& one : step.copies) n_bytes += one.n_bytes;
    for (const auto& job : step.jobs)
        counters_.n_kernel_rows += static_cast<std::uint64_t>(job.n_rows_out());
    count(step.copies.size(), n_bytes);
}

// Ends a transfer that failed, so that nothing of it is written any more.
void transfer::abandon(staging& stage) noexcept {
    try {
        if (kernels_) kernels_->synchronize();
        ggml_backend_synchronize(copy_stream_);
    } catch (...) {  // the failure that led here is raised
    }
    stage.id = 0;
    stage.beside = nullptr;
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
    // Waits for all of them before it raises: the others write to blocks as well.
    std::exception_ptr failure;
    const auto keep = [&](const std::exception_ptr& one) {
        if (!failure) failure = one;
    };
    if (!failed_.empty() && failed_.front().first <= id) {
        keep(failed_.front().second);
        std::erase_if(failed_, [id](const auto& one) { return one.first <= id; });
    }
    for (auto& one : staging_) {
        if (one.id == 0 || one.id > id) continue;
        one.id = 0;  // over, whether it succeeds or fails
        const auto beside = std::exchange(one.beside, nullptr);
        if (const auto known = std::exchange(one.failure, nullptr)) {
            keep(known);
            continue;
        }
        try {
            // Also if it is known to have passed: only then does Vulkan record into it again.
            ggml_backend_event_synchronize(one.filled);
            if (!one.ready) one.ready = clock::now();
            ggml_backend_event_synchronize(one.arrived);
            count(clock::now() - *one.ready);
            if (++n_awaited_ % n_between_drains == 0) ggml_backend_synchronize(copy_stream_);
        } catch (...) {
            keep(std::current_exception());
            abandon(one);
        }
    }
    if (failure) std::rethrow_exception(failure);
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
