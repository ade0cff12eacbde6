// The row kernels of an NVIDIA GPU, ordered against ggml's streams by ggml's events.
#pragma once

#include <ggml-backend.h>

#include <memory>
#include <string>

#include "tap/device/row_kernels.h"

namespace kqview::cuda {

// Null, and the reason, if this GPU or its driver cannot run them.
std::unique_ptr<row_kernels> make_rows(ggml_backend_dev_t device, std::string& why);

}  // namespace kqview::cuda
