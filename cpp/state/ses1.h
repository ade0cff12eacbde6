// SES1, a saved slot:  "SES1" | u32 n_tokens | n_tokens x i32 id | kv_data
// kv_data, as llama_state_seq_get_data writes it (all little endian):
//   u32 0xaf143cd8 | i32 sequence | u32 n_stream
//   then for each stream u32 n_cells and, unless that is 0:
//   each cell:     i32 position | u32 1 | [i32 x | i32 y | i32 token] | i32 sequence
//   u32 is_transposed | u32 n_layer
//   each layer:    i32 type | u64 row bytes | rows of K
//   each layer:    i32 type | u64 row bytes | rows of V
//     transposed:  i32 type | u32 element bytes | u32 n_columns | n_columns x n_cells elements
// A blob is written with one stream, however many the context has. Any number of streams is
// accepted if at most one has cells: so saved slots move between engines with different numbers of
// slots.
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

// Bytes before kv_data.
constexpr std::size_t ses1_header_bytes(std::size_t n_tokens) {
    return 8 + sizeof(token_id) * n_tokens;
}

// A validated blob: views into its bytes, valid as long as they are.
struct ses1_view {
    std::vector<token_id> tokens;
    std::span<const std::byte> kv_data;
    std::span<const std::byte> payload;  // of the stream that has cells, from its first cell
    std::uint32_t n_stream = 0;          // as in the blob
    bool is_in_order = true;             // cell i holds position i
};

// `own`: this process has just written the blob, so its values need no check.
enum class ses1_source { foreign, own };

// Reads a blob for a context of `layout`. Raises state_format for a malformed blob and
// state_mismatch for one from a different context; each names the field and its offset.
ses1_view read_ses1(std::span<const std::byte> blob, const kv_layout& layout, ses1_source source);

// The layout of kv_data that llama.cpp itself has just written for a sequence with at least one
// cell. Raises unsupported_model if the bytes do not follow the format above.
kv_layout learn_layout(std::span<const std::byte> kv_data, const kv_shape& shape);

// The offset in a blob's buffer at which llama.cpp must write kv_data of stream `i_stream`, so that
// the cells are at their final place for `seal_ses1`.
std::size_t ses1_write_offset(std::size_t n_tokens, std::uint32_t i_stream);

// Turns `buffer` into a blob. kv_data must have been written at ses1_write_offset and must end
// where `buffer` ends. Writes the header and leaves one stream. Returns the blob's size, at most
// the buffer's.
std::size_t seal_ses1(std::span<std::byte> buffer, std::span<const token_id> tokens,
                      std::uint32_t i_stream);

// kv_data for llama_state_seq_set_data of a context with `layout`, cells in position order.
std::vector<std::byte> to_native(const ses1_view& view, const kv_layout& layout);

// Sorts the cells of a sealed blob by position.
void sort_cells(std::span<std::byte> blob, const ses1_view& view, const kv_layout& layout);

}  // namespace kqview
