// Whether a device's kernels give the rows that ggml's nodes give there, by a small random case.
// Threads: the engine thread.
#pragma once

#include <ggml-backend.h>

#include <compare>

#include "tap/device/row_kernels.h"

namespace kqview {

// What decides how a kernel reads keys.
struct row_shape {
    int key_type = 0;  // ggml_type
    int n_dim = 0, n_head = 0, n_head_kv = 0;

    auto operator<=>(const row_shape&) const = default;
};

// A difference beyond rounding, and a failure, are named in the log.
bool agrees_with_nodes(row_kernels& kernels, ggml_backend_dev_t device, const row_shape& shape);

}  // namespace kqview
