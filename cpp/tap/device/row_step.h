// What a kernel of our own is to compute of a step's attention rows, beside the next step: each
// layer's operands, and a job for each target. A kernel reads keys in the cache and the queries
// that the step saved, and leaves rows in the form in which they are handed out, so that nothing is
// left to the host. Values alone, without pointers to owners: they are copied to the device as they
// are.
// Threads: built on the engine thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kqview {

// One layer's attention. Strides in bytes; offsets are those in what the step saved.
struct row_layer {
    static constexpr std::uint64_t nothing = ~std::uint64_t{0};

    const std::byte* keys;
    std::uint64_t key_cell_stride, key_head_stride, key_stream_stride;
    std::uint64_t query;  // float32 (stream, head, n_dim)
    std::uint64_t query_head_stride, query_stream_stride;
    std::uint64_t mask;  // (stream, n_cells), added to the scores; `nothing`: all columns are seen
    std::uint64_t mask_stream_stride;
    const float* sinks;  // (n_head), or null
    float scale, softcap, max_bias;
    std::int32_t n_dim, n_head, n_head_kv, n_cells;
    std::int32_t mask_is_half;
};

// Heads of a layer that share a KV head, read in one go.
struct row_item {
    std::int32_t layer;
    std::int32_t first_head;
    std::int32_t n_heads;
    std::int32_t rows;  // in row_step::numbers: the row of each head in its job, -1 for none
};

// Heads of an item at most, for the largest heads of a step: queries have to fit into a
// multiprocessor's memory.
constexpr int heads_at_once(int n_dim) { return n_dim <= 256 ? 32 : 16; }

// How a job's rows are handed out.
struct row_form {
    enum kind_of : std::int32_t { logits, scores, probs };
    enum reduction : std::int32_t { none, mean, max };  // of the rows of each group
    enum finish : std::int32_t { whole, top, sums };

    std::int32_t kind = logits;
    std::int32_t reduce = none;
    std::int32_t finish = whole;
    std::int32_t is_half = 0;  // float16 instead of float32

    bool operator==(const row_form&) const = default;
    // Whether values pass through memory before they are handed out.
    bool needs_values() const { return kind == probs || reduce != none || finish != whole; }
};

// The rows of one target on one device. Offsets are those in the kernel's memory.
struct row_job {
    std::int32_t stream;
    std::int32_t n_columns;
    std::int32_t first_item, n_items;
    std::int32_t n_rows;                 // before a reduction
    std::int32_t n_tiles;                // of row_tile columns
    std::int32_t first_group, n_groups;  // in numbers: n_groups + 1 ends of runs of rows
    std::int32_t n_values;               // of a row that is handed out
    std::int32_t first_cut, n_cuts;      // in numbers: see cut_ranges, then (first, last) of spans
    std::int32_t n_spans;
    std::uint64_t values;     // float32 (n_rows, n_columns)
    std::uint64_t parts;      // float32 (n_rows, n_tiles, 2): largest value, sum of exponentials
    std::uint64_t joined;     // float32 (n_rows, 2): what a row's exponentials are divided by
    std::uint64_t reduced;    // float32 (n_groups, n_columns)
    std::uint64_t out;        // (n_rows or n_groups, n_values)
    std::uint64_t positions;  // int32, as out, with `top`
    int n_rows_out() const { return n_groups > 0 ? n_groups : n_rows; }

    // Where the block can be written to from the device, rows go there instead; else null.
    std::byte* block_out;
    std::byte* block_positions;
};

constexpr int row_tile = 256;       // columns that a block of threads computes
constexpr int max_top_k = 1024;     // that a kernel finds; max_kernel_top_k of tap/plan.h
constexpr int max_row_cuts = 1025;  // of spans, that a kernel keeps sums between: those of 512

struct row_step {
    struct launch {  // jobs of one form
        row_form form;
        std::size_t first_job, n_jobs;
    };
    struct copy {  // from the kernel's memory to a block
        std::uint64_t from;
        std::byte* to;
        std::size_t n_bytes;
    };

    int key_type = 0;  // ggml_type, of all layers
    std::vector<row_layer> layers;
    std::vector<row_item> items;
    std::vector<std::int32_t> numbers;
    std::vector<row_job> jobs;
    std::vector<launch> launches;
    std::vector<copy> copies;
    std::size_t n_bytes = 0;  // of the kernel's memory that the jobs need
};

}  // namespace kqview
