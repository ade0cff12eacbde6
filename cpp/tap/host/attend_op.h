// The op that computes the attention of few queries on the CPU, in the place of llama.cpp's flash
// attention, and leaves rows of attention behind as it goes: keys are read once for both. llama.cpp
// walks the cache once for each query head, with sums in float16; `attend_kernel` walks it once for
// all heads, with sums in float32.
// Threads: ggml's compute threads run it. Nobody waits in it: work is cut into items that threads
//          claim, and whoever completes the last item of a stream's queries puts their results
//          together.
#pragma once

#include <ggml.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "tap/graph.h"
#include "tap/host/edit_op.h"
#include "tap/host/row_sink.h"
#include "tap/plan.h"

namespace kqview {

// Queries of a stream that threads share: of more, each takes runs of its own, of so many at most.
constexpr int most_shared_queries = 63;
constexpr int most_of_run = 64;

// What the nodes of a context share, which run one after another: partial results, and rows that
// are not written in place. A place is that of a query: of each of a step that are shared, else of
// those of a run, for each thread. The engine thread makes room before a step.
struct attend_memory {
    std::vector<float> partials;  // (place, head, chunk): largest score, sum, weighted values
    std::vector<float> row_max;   // (place, head, tile)
    std::vector<float> rows;      // (place, wanted head, column or piece)
    std::size_t row_floats = 0;   // of a place in `rows`
    int n_row_places = 0;
    // By target: what its rows keep, if they are sums alone (capture_plan::is_sums).
    std::vector<std::vector<cut_ranges::piece>> pieces;
    int n_of_run = most_of_run;  // fewer where rows are large

    // For a step of `n_tokens` tokens in each of `n_streams` streams.
    void prepare(const row_table& table, int n_streams, int n_tokens);
};

// One node; must outlive the graph.
struct attend_op {
    attend_op(const attention_site& of, row_table& rows, attend_memory& shared);

    attention_site site;
    operand_strides v_strides;
    row_table& table;
    attend_memory& memory;
    const edit_op* edits = nullptr;  // of what its heads give out
    std::atomic<int> next_item{0};
    std::vector<std::atomic<int>> n_done;  // items, by stream and run of queries

    // Before the graph is computed, on the engine thread.
    void begin() noexcept;
};

// Whether the op computes this layer's attention.
bool can_attend(const attention_site& site);

// Turns llama.cpp's node into one of `op`, in place, and leaves out the casts to F16 that it alone
// reads. `n_threads` is the most that will compute.
void replace_flash(attend_op& op, int n_threads);

}  // namespace kqview
