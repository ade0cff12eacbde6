// Transfers one device's results to the host. A step's results lie in one device buffer, at
// addresses that stay fixed while a plan is wanted: recorded graphs (CUDA graphs) and graphs sent
// earlier (RPC) stay valid. After the compute, the results are copied within the device to one of
// two staging buffers; a separate stream copies them from there to the host while the next step
// computes.
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
#include <memory>
#include <optional>
#include <vector>

#include "tap/device/row_copy.h"
#include "tap/step_result.h"

namespace kqview {

class transfer {
public:
    transfer(ggml_backend_dev_t device, copy_counters& counters);
    ~transfer();
    transfer(const transfer&) = delete;
    transfer& operator=(const transfer&) = delete;

    ggml_backend_dev_t device() const { return device_; }

    // Allocates room for a step's results. No transfer may be in flight. Raises out_of_memory with
    // the sizes.
    void reserve(std::size_t n_bytes);

    // Starts placing the next graph's results at the front of the buffer.
    void begin_graph() { n_placed_ = n_scratch_ = 0; }
    // Assigns memory to a result. Returns false if there is no room or the backend refuses it.
    bool place(ggml_tensor* result);
    // As place(), in scratch memory after the results, which no copy reads.
    bool place_scratch(ggml_tensor* tensor);
    // Places a tensor as a part of one in scratch memory.
    static bool place_in(ggml_tensor* whole, std::size_t offset, ggml_tensor* part);
    std::size_t n_placed() const { return n_placed_; }
    std::size_t offset_of(const ggml_tensor* result) const;

    // Queues the transfer of the first `n_used` bytes behind the work queued on `compute`. True:
    // the copies are in flight, call `await`. False: they are done, because the device copies in
    // order or cannot copy while it computes.
    bool start(ggml_backend_t compute, transfer_id id, std::size_t n_used,
               const std::vector<row_copy>& copies);

    // The compute that `start` queued behind is known to have ended: the time of copies in flight
    // counts from here.
    void note_computed();

    // Blocks until the copies of this transfer, and of all earlier ones, have ended. Raises decode.
    void await(transfer_id id);

private:
    using clock = std::chrono::steady_clock;

    struct staging {
        ggml_backend_buffer_t buffer = nullptr;
        ggml_tensor* bytes = nullptr;
        ggml_backend_event_t filled = nullptr;  // the copy within the device has ended
        ggml_backend_event_t arrived = nullptr;
        transfer_id id = 0;                      // in flight; 0 = none
        std::optional<clock::time_point> ready;  // when it was first known to be filled
    };

    void release();
    void count(std::size_t n_copies, std::size_t n_bytes);
    void count(clock::duration spent);
    ggml_backend_buffer_t allocate(std::size_t n_bytes) const;
    ggml_tensor* bytes_of(ggml_backend_buffer_t buffer) const;

    ggml_backend_dev_t device_;
    copy_counters& counters_;
    bool is_async_;
    ggml_backend_t copy_stream_ = nullptr;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors_{nullptr, ggml_free};
    ggml_backend_buffer_t results_ = nullptr;
    ggml_tensor* result_bytes_ = nullptr;
    std::array<staging, 2> staging_;
    std::vector<std::byte> fetched_;  // without streams: fetched bytes before they are packed
    std::size_t capacity_ = 0;
    std::size_t n_placed_ = 0;
    std::size_t n_scratch_ = 0;
};

}  // namespace kqview
