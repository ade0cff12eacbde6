// What a model and its context will need, before llama.cpp allocates it: plans of contexts without
// weights or caches. The context that a slot gets if the caller names none.
// Threads: any.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "llama/context_params.h"
#include "llama/model.h"
#include "memory/device_need.h"

namespace kqview {

// The context of a slot if the caller names none: the one that the model was trained with or, if
// that needs too much memory, the largest power of two below it that does not, but at least 4096
// tokens. On the host it may need half of what the weights leave free, because rows of attention
// and other processes need memory too; on each device nine tenths. Powers of two, so that a machine
// gives the same context every time although its free memory varies.
struct context_fit {
    int n_ctx = 0;
    int n_ctx_train = 0;
    // Where a larger context has no room, "host" or a device; empty if n_ctx is n_ctx_train.
    std::string limited_by = "";
    std::size_t needed_bytes = 0;   // there, of the next larger context
    std::size_t allowed_bytes = 0;  // there
};

// Plans contexts of a model without weights, `source` or one like it, only if memory might be
// short.
context_fit fit_context(model& source, const context_options& options);

// Raises request for options out of range, and out_of_memory if host memory cannot hold the
// context: llama.cpp writes to a cache while it creates it, and a system that overcommits memory
// would then kill the process.
void check_memory(const model& source, const context_options& options);

// Raises out_of_memory if a device cannot hold its part of the model and the context, before
// anything is loaded: llama.cpp plans both without weights. Reads only the file's header, and only
// if there is a device. A context that is still to be chosen (n_ctx = 0) counts as the smallest
// that fit_context gives. Also raises what the constructor of model raises, and request for options
// out of range.
void check_device_memory(const model_options& wanted, const context_options& options);

// Raises what opening this model and context would raise, as far as that is known without the
// weights: not a model file, options out of range, too little memory. Allocates almost nothing.
// Returns what they will need on the host (first) and on each device, without LoRA adapters. An
// n_ctx of 0 is what fit_context gives. Of a context that predicts, without the weights.
std::vector<device_need> check_opening(const model_options& wanted, const context_options& options);

}  // namespace kqview
