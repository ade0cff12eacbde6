// What NVIDIA's driver knows that ggml does not tell. Its libraries are opened at run time: absent,
// every answer is empty. Nothing of CUDA is linked here, so a CPU build asks as well. Any thread.
#pragma once

#include <string>

namespace kqview {

struct nvidia_driver_info {
    std::string version;       // "580.95.05"
    std::string cuda_version;  // newest CUDA that it runs, "13.0"
};

nvidia_driver_info nvidia_driver();

// "9.0" of the device with this PCI address ("0000:c1:00.0"). Starts CUDA in the process: ask only
// where ggml's CUDA backend has a device.
std::string nvidia_compute_capability(const std::string& pci_address);

}  // namespace kqview
