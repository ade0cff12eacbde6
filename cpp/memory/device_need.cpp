#include "memory/device_need.h"

#include <algorithm>

#include "base/error.h"

namespace kqview {

namespace {

// Weights and cache shrink with each layer that stays on the host; compute buffers hardly do.
int layers_that_fit(std::span<const device_need> needs, int n_layers) {
    double share = 1.0;
    for (const auto& need : needs) {
        const auto fixed = static_cast<double>(need.compute_bytes);
        const auto free = static_cast<double>(need.free_bytes);
        const auto layered = static_cast<double>(need.model_bytes + need.context_bytes);
        if (need.fits() || layered == 0) continue;
        share = std::min(share, std::max(0.0, free - fixed) / layered);
    }
    return static_cast<int>(share * n_layers);
}

}  // namespace

void check_device_needs(std::span<const device_need> needs, int n_layers) {
    for (const auto& need : needs) {
        if (need.fits()) continue;
        const int n_fitting = layers_that_fit(needs, n_layers);
        throw error(errc::out_of_memory, need.device, " needs ", size_text(need.needed_bytes()),
                    " (weights ", size_text(need.model_bytes), ", cache ",
                    size_text(need.context_bytes), ", compute ", size_text(need.compute_bytes),
                    "), ", size_text(need.free_bytes), " of ", size_text(need.total_bytes),
                    " are free; lower n_gpu_layers to about ", n_fitting,
                    ", or n_ctx, n_slots or n_ubatch",
                    need.context_bytes > need.model_bytes ? ", or choose a smaller kv_type" : "");
    }
}

bool says_out_of_memory(std::string_view log) {
    // ggml: "failed to allocate ... buffer", "cudaMalloc failed: out of memory",
    // "CUBLAS_STATUS_ALLOC_FAILED"; llama.cpp: "unable to allocate ... buffer". Other messages that
    // contain "alloc" are about memory as well.
    return log.find("alloc") != std::string_view::npos ||
           log.find("Malloc") != std::string_view::npos ||
           log.find("ALLOC_FAILED") != std::string_view::npos ||
           log.find("out of memory") != std::string_view::npos;
}

}  // namespace kqview
