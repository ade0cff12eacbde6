// Transfers one device's results to the host. A step's results lie in one device buffer, at
// addresses that stay fixed while a plan is wanted: recorded graphs (CUDA graphs) and graphs sent
// earlier (RPC) stay valid. After the compute, the results are copied within the device to one of
// two staging buffers; a separate stream copies them from there to the host while the next step
// computes. Where the results are queries (side_graph), that stream first computes the rows;
// kernels of our own have a stream of theirs (row_kernels).
// Owner:   device_tap.
// Threads: the engine thread; the device performs the copies.
// Never:   reuses or frees a staging buffer before the copies out of it have ended.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tap/device/device_arena.h"
#include "tap/device/row_copy.h"
#include "tap/device/row_kernels.h"
#include "tap/device/row_step.h"
#include "tap/device/side_graph.h"
#include "tap/step_result.h"

namespace kqview {

// Copies to the host.
struct rows_out {
    std::vector<row_copy> of_results;
    std::vector<row_copy> of_beside;  // out of rows computed beside the step

    bool empty() const { return of_results.empty() && of_beside.empty(); }
};

// What a step leaves to be computed beside the next one.
struct work_beside {
    std::shared_ptr<side_graph> graph;  // null: nothing
    std::vector<side_graph::stream_view> streams;
    row_step by_kernel;
};

class transfer {
public:
    transfer(ggml_backend_dev_t device, copy_counters& counters);
    ~transfer();

    ggml_backend_dev_t device() const { return device_; }

    // Kernels of ours on this device; null: ggml's nodes compute all rows.
    row_kernels* kernels() const { return kernels_.get(); }
    void take(std::unique_ptr<row_kernels> kernels) { kernels_ = std::move(kernels); }

    // Whether the device computes and copies at the same time.
    bool is_async() const { return is_async_; }

    // Bytes of a step's results, and of what is computed beside the step: rows, and the queries
    // that they are computed from, which are the first of the results.
    struct sizes {
        std::size_t n_results = 0;
        std::size_t n_beside = 0;
        std::size_t n_queries = 0;
    };
    // Bytes on the device that reserve() would allocate for them.
    std::size_t bytes_for(const sizes& wanted) const;
    // Allocates room for both, and frees what is far more than that. Waits for transfers in flight;
    // `await` still raises what failed. Raises out_of_memory with the sizes, and then has no room.
    void reserve(const sizes& wanted);

    // Starts placing the next graph's results.
    void begin_graph();
    device_arena& results() { return results_; }
    // Rows computed beside the step, behind the copies of its queries.
    device_arena& beside() { return beside_; }

    // Queues the transfer of the first `n_used` bytes behind the work queued on `compute`. True:
    // the copies are in flight, call `await`. False: they are done, because the device copies in
    // order or cannot copy while it computes.
    bool start(ggml_backend_t compute, transfer_id id, std::size_t n_used, const rows_out& copies,
               const work_beside& work);

    // The compute that `start` queued behind is known to have ended: the time of copies in flight
    // counts from here.
    void note_computed();

    // Blocks until the copies of this transfer, and of all earlier ones, have ended. Raises decode.
    void await(transfer_id id);
    // Blocks until nothing is in flight; `await` still raises what failed.
    void settle() noexcept;

private:
    using clock = std::chrono::steady_clock;

    struct staging {
        explicit staging(ggml_backend_dev_t device) : results(device) {}

        device_arena results;                   // a copy of the step's
        std::optional<device_copy> fill;        // by the step's stream
        std::optional<device_copy> hand_over;   // of queries, to what is beside the step
        ggml_backend_event_t filled = nullptr;  // the copy within the device has ended
        ggml_backend_event_t arrived = nullptr;
        ggml_backend_event_t rows_done = nullptr;  // those of kernels
        transfer_id id = 0;                        // in flight; 0 = none
        std::shared_ptr<side_graph> beside;        // of this transfer
        std::exception_ptr failure;                // of this transfer, found by settle()
        std::optional<clock::time_point> ready;    // when it was first known to be filled
    };

    void release();
    void run_kernels(staging& stage, const row_step& step, std::size_t parity,
                     ggml_backend_event_t done);
    void abandon(staging& stage) noexcept;
    void count(std::size_t n_copies, std::size_t n_bytes);
    void count(clock::duration spent);
    void allocate(device_arena& arena, std::size_t n_bytes) const;
    void note_reserved(std::size_t n_bytes);
    void fetch(device_arena& from, const std::vector<row_copy>& copies);

    ggml_backend_dev_t device_;
    copy_counters& counters_;
    bool is_async_;
    ggml_backend_t copy_stream_ = nullptr;
    std::unique_ptr<row_kernels> kernels_;
    device_arena results_;
    device_arena beside_;
    std::array<staging, 2> staging_;
    std::shared_ptr<side_graph> ran_beside_;  // last on the copy stream
    sizes sizes_;
    std::size_t reserved_bytes_ = 0;
    std::size_t n_awaited_ = 0;
    // Transfers that failed before their buffers were freed, oldest first.
    std::vector<std::pair<transfer_id, std::exception_ptr>> failed_;
    std::vector<std::byte> fetched_;  // without streams: fetched bytes before they are packed
};

}  // namespace kqview
