#include "tap/device/cuda/cuda_rows.h"

#include <cuda_runtime.h>
#include <ggml-backend-impl.h>

#include <array>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "tap/device/cuda/rows.h"

namespace kqview::cuda {

namespace {

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    throw error(errc::decode, "attention rows on a GPU: ", what,
                " failed: ", cudaGetErrorString(status));
}

// ggml names its devices CUDA0, CUDA1 ...; the number is the driver's.
int number_of(ggml_backend_dev_t device) {
    const std::string_view name(ggml_backend_dev_name(device));
    const auto digits = name.find_last_not_of("0123456789") + 1;
    return std::atoi(std::string(name.substr(digits)).c_str());
}

// A ggml event of CUDA's backend is the driver's.
cudaEvent_t event_of(ggml_backend_event_t event) {
    return static_cast<cudaEvent_t>(event->context);
}

class cuda_rows final : public row_kernels {
public:
    explicit cuda_rows(int device) : device_(device) {
        int least = 0, greatest = 0;
        check(cudaSetDevice(device_), "choosing the device");
        check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
        // The step goes first.
        check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, least),
              "making a stream");
    }

    ~cuda_rows() override {
        cudaSetDevice(device_);
        cudaStreamSynchronize(stream_);
        for (auto& one : host_) cudaFreeHost(one);
        cudaFree(tables_);
        cudaStreamDestroy(stream_);
    }

    bool can_read(int key_type, int n_dim, int n_head, int n_head_kv) const override {
        return can_read_keys(key_type, n_dim, n_head, n_head_kv);
    }

    bool reaches(const void* memory) const override {
        cudaPointerAttributes found{};
        if (cudaPointerGetAttributes(&found, memory) != cudaSuccess) {
            cudaGetLastError();
            return false;
        }
        return found.type == cudaMemoryTypeHost && found.devicePointer == memory;
    }

    void run(const row_step& step, const std::byte* saved, std::byte* memory, std::size_t parity,
             ggml_backend_event_t after, ggml_backend_event_t done) override {
        check(cudaSetDevice(device_), "choosing the device");
        make_room(table_bytes(step));
        check(cudaStreamWaitEvent(stream_, event_of(after), 0), "waiting for the step");
        check(static_cast<cudaError_t>(launch_rows(step, {host_[parity], tables_, n_table_bytes_},
                                                   saved, memory, stream_)),
              "starting a kernel");
        for (const auto& one : step.copies) {
            check(cudaMemcpyAsync(one.to, memory + one.from, one.n_bytes, cudaMemcpyDeviceToHost,
                                  stream_),
                  "copying rows");
        }
        check(cudaEventRecord(event_of(done), stream_), "recording an event");
    }

    void synchronize() override {
        check(cudaSetDevice(device_), "choosing the device");
        check(cudaStreamSynchronize(stream_), "waiting for rows");
    }

private:
    void make_room(std::size_t n_bytes) {
        if (n_bytes <= n_table_bytes_) return;
        check(cudaStreamSynchronize(stream_), "waiting for rows");
        for (auto& one : host_) {
            cudaFreeHost(one);
            one = nullptr;
        }
        cudaFree(tables_);
        tables_ = nullptr;
        n_table_bytes_ = 0;
        const auto wanted = 2 * n_bytes;
        for (auto& one : host_)
            check(cudaMallocHost(reinterpret_cast<void**>(&one), wanted), "page-locking tables");
        check(cudaMalloc(reinterpret_cast<void**>(&tables_), wanted), "memory for tables");
        n_table_bytes_ = wanted;
    }

    const int device_;
    cudaStream_t stream_ = nullptr;
    // By parity: the copy out of it may not have begun when the next step's is written.
    std::array<std::byte*, 2> host_{};
    std::byte* tables_ = nullptr;
    std::size_t n_table_bytes_ = 0;
};

}  // namespace

std::unique_ptr<row_kernels> make_rows(ggml_backend_dev_t device, std::string& why) {
    try {
        const int number = number_of(device);
        check(cudaSetDevice(number), "choosing the device");
        if (!can_run(why)) return nullptr;
        return std::make_unique<cuda_rows>(number);
    } catch (const error& failure) {
        why = failure.what();
        return nullptr;
    }
}

}  // namespace kqview::cuda
