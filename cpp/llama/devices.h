// The properties of ggml's devices, what NVIDIA's driver adds to them, and the page-locked host
// memory that a device offers.
// Threads: any, after start_llama().
#pragma once

#include <ggml-backend.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory/host_buffer.h"

namespace kqview {

// How attention rows get from a layer's device to the block that a view shows.
enum class capture_path {
    zero_copy,  // the kernel writes into it
    pinned,     // one copy into page-locked memory
    plain,      // one copy into memory that the device cannot reach by itself
};

// Where rows of layers on devices are computed.
enum class rows_place {
    automatic,  // beside the next step where that is cheaper
    in_graph,   // in the step's own graph
    beside,     // beside the next step, where a device can
};

// The only place that decides it, from the capabilities that a device reports. After an allocation,
// the buffer's type tells what a block really is.
capture_path capture_path_of(ggml_backend_dev_t device);
const char* name_of(capture_path path);

struct device_info {
    std::string name;
    std::string description;
    // "CPU", "GPU", "IGPU" (shares the host's memory), "ACCEL" (helps the CPU) or "META"
    std::string type;
    std::string backend;  // the part of ggml that drives it: "CPU", "CUDA", "RPC" ...
    std::size_t memory_free_bytes = 0;
    std::size_t memory_total_bytes = 0;
    std::string compute_capability;  // "9.0"; empty unless NVIDIA's
    capture_path capture = capture_path::plain;
};

// A backend's name and the build flags it reports ("CUDA": ARCHS = 900 ...).
struct backend_info {
    std::string name;
    std::vector<std::pair<std::string, std::string>> features;
};

std::vector<device_info> list_devices();
std::vector<backend_info> list_backends();

// This machine's devices of one type, and the GPUs to which llama.cpp offloads layers: integrated
// ones only if there are no others.
std::vector<ggml_backend_dev_t> local_devices(enum ggml_backend_dev_type type);
std::vector<ggml_backend_dev_t> local_gpus();

// "CUDA0 3.10 GiB of 79.20 GiB, CPU 512.0 MiB of 1.00 GiB", for messages.
std::string free_memory_text();

// What NVIDIA's driver knows but ggml does not report. Its libraries are opened at run time, so a
// CPU build has this too; without them every field is empty.
struct nvidia_driver_info {
    std::string version;       // "580.95.05"
    std::string cuda_version;  // newest CUDA that it supports, "13.0"
};
nvidia_driver_info nvidia_driver();

// Page-locked memory that a device copies into directly, or null if the device has none. If the
// driver cannot lock a block, the block is plain and reports it. `is_lost` is set when the device
// has failed: freeing a block would then end the process, so blocks are leaked.
std::shared_ptr<host_allocator> pinned_allocator(ggml_backend_dev_t device,
                                                 std::shared_ptr<const std::atomic<bool>> is_lost);

}  // namespace kqview
