// Options of a context, and what they are for llama.cpp.
// Threads: any.
#pragma once

#include <llama.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "llama/devices.h"
#include "llama/model.h"

namespace kqview {

constexpr int n_states_kept = 7;
constexpr int cell_padding = 256;  // llama.cpp pads the cells of a sequence to this

enum class flash_attention { automatic, off, on };

struct context_options {
    int n_ctx = 0;  // tokens per slot; 0 = what the model was trained with, see fit_context
    int n_slots = 1;
    int n_batch = 2048;
    int n_ubatch = 512;
    int n_threads = 1;
    int n_threads_batch = 0;  // 0 = as n_threads
    flash_attention flash = flash_attention::automatic;
    rows_place device_rows = rows_place::automatic;
    bool attends = false;  // few queries on the CPU: our attention instead of flash attention
    std::string kv_type = "f16";
    bool swa_full = true;
    // Texts may be guessed on: recurrent state is kept after each of the last n_states_kept tokens
    // of a step as well, where llama.cpp can, so that these can be dropped.
    bool guesses = false;
    // Other tokens are predicted from what this context makes of each (token_states).
    bool tells_states = false;
    // Its graph is that of the layers which predict from such states, not the model's own.
    bool predicts = false;
    std::string pooling;  // "none", "mean", "cls", "last", "rank"; "" = as in the model's file
    std::size_t host_memory_bytes = 0;  // limit for this process; 0 = do not check
    std::size_t free_memory_bytes = 0;  // on the host, before the weights; 0 = unknown
    // Tests only: the decodes, counted from 1, that llama.cpp aborts midway. CPU only.
    std::vector<std::uint64_t> aborted_decodes;
};

// Tokens of a slot, as asked for or as the model was trained with.
int n_ctx_of(const model& source, const context_options& options);

// Raises request for options out of range.
llama_context_params params_of(const model& source, const context_options& options);

// llama.cpp's name of a kind of pooling; "" for a value that a file may have but this llama.cpp
// does not know.
const char* name_of(enum llama_pooling_type type);

using context_handle = std::unique_ptr<llama_context, void (*)(llama_context*)>;

// A context without a cache (an encoder, a diffusion model) computes every token of a batch in one
// step and outputs all of them. Only the opened context tells whether a model has a cache. Null if
// llama.cpp refuses.
context_handle open_context(llama_model* source, llama_context_params params);

}  // namespace kqview
