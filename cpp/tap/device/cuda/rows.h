// Launches of the kernels that compute attention rows on an NVIDIA GPU. Nothing of ggml, so that
// bench/row_check.cu can run them alone.
// Threads: one that has made the device current.
#pragma once

#include <cstddef>
#include <string>

#include "tap/device/row_step.h"

namespace kqview::cuda {

// Whether keys of this type (a ggml_type) and these sizes can be read.
bool can_read_keys(int type, int n_dim, int n_head, int n_head_kv);

// Where a step's tables go: all of them in one copy. `host` is page-locked.
struct row_tables {
    std::byte* host;
    std::byte* device;
    std::size_t n_bytes;
};
std::size_t table_bytes(const row_step& step);

// Whether the kernels run on the current device; the reason if they do not.
bool can_run(std::string& why);

// Queues the copy of the tables and the kernels on `stream` (a cudaStream_t), not the copies of
// rows. `saved` and `memory` are on the device. Returns a cudaError_t.
int launch_rows(const row_step& step, const row_tables& tables, const std::byte* saved,
                std::byte* memory, void* stream);

}  // namespace kqview::cuda
