// The bytes of one sequence (a slot) in a context's memory, in the format of state/ses1.h.
// llama.cpp writes and reads each part of the memory itself, through streams of ours that change
// two things. A cache gets one stream, however many it has. And cells that a sliding window hides
// are written too if the cache still has all of them: llama.cpp would read the others back into the
// first cells, where columns are not positions, and a slot without them cannot be truncated.
// Threads: the engine thread. The caller applies pending shifts first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"

struct llama_hparams;
struct llama_memory_i;
class llama_kv_cache;
class llama_kv_cache_dsv4;
class llama_memory_recurrent;

namespace kqview {

// One of the three.
struct memory_part {
    llama_kv_cache* cache = nullptr;
    llama_memory_recurrent* state = nullptr;
    llama_kv_cache_dsv4* compressor = nullptr;  // of its states, which blocks of tokens end up in
    // The cache is of layers with a sliding window; and whether it keeps only what windows see.
    bool has_window = false;
    bool is_ring = false;

    bool has_extra() const;       // cells carry more than a position
    std::size_t n_cells() const;  // that a cache has for a sequence
    // Of a recurrent state's blocks, those that llama.cpp writes without their type.
    std::vector<std::size_t> untyped() const;
};

// The parts of a memory, in the order of their bytes. Raises unsupported_model for a memory that
// cannot be saved whole, and for none; the message says why.
std::vector<memory_part> parts_of(llama_memory_i* memory);

// The parts that cannot drop the newest tokens of a sequence, or not all of them.
std::vector<memory_part> tail_parts_of(llama_memory_i* memory);

// Whether a part still has what a query at position `n_keep` sees: a ring may have dropped it.
bool has_what_is_seen(const memory_part& part, const llama_hparams& of, slot_id slot,
                      std::int32_t n_keep);

// What a part takes of the context's memory, for all sequences.
std::size_t memory_bytes_of(const memory_part& part);

// Writes the sequence's part to the front of `out` and returns its size; counts only if it does not
// fit.
std::size_t write_state(const memory_part& part, slot_id slot, std::span<std::byte> out);

// Replaces the sequence's part by one of `n_tokens` tokens from the front of `bytes`, which have
// been checked, or were written by this process. Returns the rest of them. Raises internal if
// llama.cpp refuses them, or does not put cells at their positions; the part's content is then
// undefined.
std::span<const std::byte> read_state(const memory_part& part, slot_id slot,
                                      std::span<const std::byte> bytes, int n_tokens);

}  // namespace kqview
