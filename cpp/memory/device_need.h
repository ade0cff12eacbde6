// How much memory a model and its context need on each device, how much is free there, and the
// error if it is too little. The llama layer supplies the figures; this file does not use ggml.
// Threads: any.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace kqview {

struct device_need {
    std::string device;  // its name, such as "CUDA0"
    std::size_t model_bytes = 0;
    std::size_t context_bytes = 0;  // the KV cache
    std::size_t compute_bytes = 0;
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;  // 0: the device does not report it, so nothing is checked

    std::size_t needed_bytes() const { return model_bytes + context_bytes + compute_bytes; }
    bool fits() const { return total_bytes == 0 || needed_bytes() <= free_bytes; }
};

// Raises out_of_memory for the first device that cannot hold its part; the message says what is
// needed, what is free and what to lower. `n_layers` counts the layers that the model can put on
// devices, including its output; the message estimates how many of them would fit.
void check_device_needs(std::span<const device_need> needs, int n_layers);

// True if these lines of llama.cpp's log report a failed allocation.
bool says_out_of_memory(std::string_view log);

}  // namespace kqview
