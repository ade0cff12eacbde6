// One device's results on their way to the host. A step's results lie in one buffer on the device,
// at addresses that never change while a plan is wanted: graphs that were recorded (CUDA graphs) or
// sent before (RPC) stay valid. Behind the compute they are copied within the device to one of two
// staging buffers, and from there by a stream of its own to the host, while the next step computes.
// Owner:   device_tap. Threads: the engine thread; the copies run on the device's.
// Never:   reuses a staging buffer, or frees one, before the copies out of it have ended.
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

    // Room for a step's results. No transfer may be on its way. Raises out_of_memory with figures.
    void reserve(std::size_t n_bytes);

    // The next graph's results begin at the front of the buffer.
    void begin_graph() { n_placed_ = n_scratch_ = 0; }
    // Gives a result its memory. False: it has no room, or the backend refuses it.
    bool place(ggml_tensor* result);
    // Memory behind the results, which no copy touches.
    bool place_scratch(ggml_tensor* tensor);
    // A tensor that is a part of one in scratch memory.
    static bool place_in(ggml_tensor* whole, std::size_t offset, ggml_tensor* part);
    std::size_t n_placed() const { return n_placed_; }
    std::size_t offset_of(const ggml_tensor* result) const;

    // Sends the first `n_used` bytes off behind what `compute` has queued. True: `await` says when
    // they have arrived; false: they are there, because the device copies in order or not beside
    // its work.
    bool start(ggml_backend_t compute, transfer_id id, std::size_t n_used,
               const std::vector<row_copy>& copies);

    // What `start` queued behind is known to be done: copies on their way count their time from
    // here.
    void note_computed();

    // Blocks until the copies of this transfer, and of all before, have ended. Raises decode.
    void await(transfer_id id);

private:
    using clock = std::chrono::steady_clock;

    struct staging {
        ggml_backend_buffer_t buffer = nullptr;
        ggml_tensor* bytes = nullptr;
        ggml_backend_event_t filled = nullptr;  // the copy within the device has ended
        ggml_backend_event_t arrived = nullptr;
        transfer_id id = 0;                      // on its way; 0 = none
        std::optional<clock::time_point> ready;  // since when it is known to be filled
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
    std::vector<std::byte> fetched_;  // without streams: what came, before it is packed
    std::size_t capacity_ = 0;
    std::size_t n_placed_ = 0;
    std::size_t n_scratch_ = 0;
};

}  // namespace kqview
