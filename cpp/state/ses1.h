// SES1, a saved slot:  "SES1" | u32 n_tokens | n_tokens x i32 id | kv_data
// kv_data (all little endian):
//   u32 0xaf143cd8 | i32 sequence | each part of the memory in turn
//   a cache:       u32 n_stream, then for each stream u32 n_cells and, unless that is 0:
//   each cell:     i32 position | u32 1 | [i32 x | i32 y | i32 token] | i32 sequence
//   u32 is_transposed | u32 n_layer
//   each layer:    i32 type | u64 row bytes | rows of K
//   each layer:    i32 type | u64 row bytes | rows of V
//     transposed:  i32 type | u32 element bytes | u32 n_columns | n_columns x n_cells elements
//   a recurrent state:  u32 n_cells and, unless that is 0: i32 last position | u32 0 | u32 0
//   u32 n_layer | each layer that has them:  i32 type | u64 row bytes | row of R;  then those of S
//     qwen4exp, behind a row of R:  u64 row bytes | row of the same type
// This is what llama_state_seq_get_data writes, with two exceptions. A cache is written with one
// stream, however many the context has, and any number is accepted if at most one has cells: so
// saved slots move between engines with different numbers of slots. And every cache has a cell for
// each token, also those that a sliding window hides: so a restored slot can be truncated.
//
// read_ses1() is the whole defence against a blob from outside: it checks every field against the
// context's own layout and has no side effects. Only accepted bytes go to llama.cpp, which trusts
// them.
// Threads: pure functions; uses nothing of llama.cpp.
// Never:   reads past a span, or trusts a number before checking it; sums are 64-bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "state/kv_layout.h"

namespace kqview {

// Bytes before the parts of the memory.
constexpr std::size_t ses1_header_bytes(std::size_t n_tokens) {
    return 16 + sizeof(token_id) * n_tokens;
}

// A validated blob: views into its bytes, valid as long as they are.
struct ses1_view {
    std::vector<token_id> tokens;
    std::span<const std::byte> memory;  // all parts, behind the header
    // Each part of the memory from its first cell to its last layer; empty without cells.
    std::vector<std::span<const std::byte>> payloads;
    std::vector<std::uint32_t> n_cells;  // of each part
    bool has_one_stream = true;          // each cache
    bool is_in_order = true;             // cell i of each cache holds position i, but for rings
};

// `own`: this process has just written the blob, so its values need no check.
enum class ses1_source { foreign, own };

// Reads a blob for a context of `layout`. Raises state_format for a malformed blob and
// state_mismatch for one from a different context; each names the field and its offset.
ses1_view read_ses1(std::span<const std::byte> blob, const kv_layout& layout, ses1_source source);

// A checkpoint of a slot: a view, valid as long as the bytes are.
struct saved_checkpoint {
    std::size_t n_tokens;
    std::span<const std::byte> parts;  // one after the other; caches have one stream
};

// Reads the checkpoints of a slot with these tokens; raises as read_ses1(). No bytes: none.
std::vector<saved_checkpoint> read_checkpoints(std::span<const std::byte> bytes,
                                               std::span<const token_id> tokens,
                                               const kv_layout& layout);

// Writes them to the front of `out`, which may be too small, and returns their size.
std::size_t write_checkpoints(std::span<std::byte> out,
                              std::span<const saved_checkpoint> checkpoints);

// Completes `known` by the layout of the parts that llama.cpp itself has just written for a
// sequence with at least one cell. Raises unsupported_model if the bytes do not follow the format
// above.
kv_layout learn_layout(std::span<const std::span<const std::byte>> parts, kv_layout known);

// Writes the bytes before the parts of the memory.
void write_ses1_header(std::span<std::byte> blob, std::span<const token_id> tokens, slot_id slot);

// The parts of the memory, with one stream per cache and cells in order of position.
std::vector<std::byte> to_plain(const ses1_view& view, const kv_layout& layout);

}  // namespace kqview
