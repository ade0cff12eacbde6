#include "tap/device/row_kernels.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "base/log.h"
#include "tap/device/device_nodes.h"
#ifdef KQVIEW_CUDA_ROWS
#include "tap/device/cuda/cuda_rows.h"
#endif

namespace kqview {

namespace {

std::atomic<row_kernels_maker> maker_for_tests{nullptr};

}  // namespace

std::unique_ptr<row_kernels> make_row_kernels(ggml_backend_dev_t device) {
    const auto* const wanted = std::getenv("KQVIEW_DEVICE_ROWS");
    if (wanted && std::string_view(wanted) == "ggml") return nullptr;
    if (const auto make = maker_for_tests.load()) return make(device);
#ifdef KQVIEW_CUDA_ROWS
    if (!is_cuda(device)) return nullptr;
    std::string why;
    if (auto made = cuda::make_rows(device, why)) return made;
    const auto line = text_of("attention rows on ", ggml_backend_dev_name(device),
                              " are computed by ggml's nodes, not by kqview's kernel: ", why, "\n");
    log_ring::instance().write(log_level::warning, line.c_str());
#endif
    return nullptr;
}

bool may_have_row_kernels([[maybe_unused]] ggml_backend_dev_t device) {
#ifdef KQVIEW_CUDA_ROWS
    return is_cuda(device);
#else
    return false;
#endif
}

void set_row_kernels_maker(row_kernels_maker maker) { maker_for_tests = maker; }

}  // namespace kqview
