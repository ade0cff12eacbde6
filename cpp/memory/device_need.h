// What a model and its context would take of each device, beside what is free there, and the error
// that follows. Figures come from the llama layer; nothing here knows ggml. Any thread.
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
    std::size_t total_bytes = 0;  // 0: the device does not tell, so nothing is known of it

    std::size_t needed_bytes() const { return model_bytes + context_bytes + compute_bytes; }
    bool fits() const { return total_bytes == 0 || needed_bytes() <= free_bytes; }
};

// Raises out_of_memory for the first device that cannot hold its part, with needed, free, and what
// to lower. `n_layers` is how many layers the model can put on devices, its output counted; the
// message says about how many of them would fit.
void check_device_needs(std::span<const device_need> needs, int n_layers);

// Do these lines of llama.cpp's log speak of an allocation that failed?
bool says_out_of_memory(std::string_view log);

}  // namespace kqview
