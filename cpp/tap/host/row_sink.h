// Writes finished rows to their block: unchanged, as float16, as their k largest values, as sums
// over spans, or reduced over heads and layers first. Float16 values saturate: beyond +-65504 they
// would become infinite, and -inf means masked. One sink serves one compute thread, target and
// layer.
// Threads: ggml's compute threads; their shared state is in row_table, synchronised by atomics and
//          by ggml's barrier between two nodes.
#pragma once

#include <ggml.h>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tap/host/row_kernel.h"
#include "tap/plan.h"

namespace kqview {

// Where to write the rows of a run of queries.
struct row_target {
    std::shared_ptr<const capture_plan> plan;
    int i_stream;   // which of the graph's KV streams
    int i_query;    // index of the first query in that stream
    int n_behind;   // tokens of the batch behind the last query
    int n_visible;  // columns the first query sees; each further one sees one more, up to n_columns
    row_layout layout;  // of the rows in `data`
    std::byte* data;    // layout.size_bytes
};

// Shared state of the threads that reduce heads and layers of one target.
struct reduction_state {
    std::vector<float>
        partials;  // (thread, column): each thread's heads, for a target of one query
    std::atomic<int> n_arrived{0};
    std::vector<float> totals;        // (query, column): over the layers so far
    std::vector<int> n_layers_added;  // per query
};

// The targets of the running step, and what has been written to them.
struct row_table {
    std::vector<row_target> targets;
    std::deque<reduction_state> reductions;  // at least as many as targets; grows, never shrinks
    std::atomic<int> n_rows_written{0};
    std::atomic<const std::byte*> first_write{nullptr};  // where the kernel wrote row 0 of target 0
    std::vector<row_scratch> scratch;                    // one per compute thread
    // By stream of the graph: the column of each cell of a ring, -1 if it has none.
    std::vector<std::vector<std::int32_t>> ring_columns;

    // Call before a step: allocates the reduction state of `targets`.
    void prepare_reductions();
};

// Writes `n` values as float16, saturated.
void write_f16(const float* values, std::size_t n, ggml_fp16_t* to);

class row_sink {
public:
    row_sink(row_table& table, std::size_t i_target, const capture_plan::layer_rows& rows, int ith);

    // The rows of query `i_query` follow. With a single query, each thread delivers some of its
    // heads; with several, each thread delivers all heads of its queries.
    void begin_query(int i_query);

    // Where to compute head `i_head` (an index into the wanted heads); i_lane < max_heads_at_once.
    float* place(int i_head, int i_lane);

    // A row is complete: n_columns values.
    void finish(int i_head, const float* row);

    // The same, of a plan that is_sums(): the sums of its segments.
    void finish_sums(int i_head, std::span<const double> segments);

    // Adds a row that already covers several whole layers: the sum or maximum over all their heads.
    // For plans that reduce layers.
    void finish_layers(const float* row, int n_layers);

    // All heads of this thread are finished. `nth` threads share the heads of a single query.
    void end_query(int nth);

    void scale(float* row, float factor) const;

private:
    bool is_reduced() const { return plan_.reduce() != row_reduction::none; }
    std::size_t n_columns() const { return static_cast<std::size_t>(target_.layout.n_columns); }
    std::size_t index_of(int i_row) const;
    void add(float* sum, const float* row) const;
    void finish_layer(float* row);
    void write(int i_row, const float* row);
    void write_top(int i_row, const float* row);
    std::span<const double> segments_of(const float* row);
    void write_sums(int i_row, std::span<const double> segments);
    void count(const std::byte* to);

    row_table& table_;
    const row_target& target_;
    reduction_state& shared_;
    const capture_plan& plan_;
    const capture_plan::layer_rows& rows_;
    row_scratch& scratch_;
    const bool is_first_target_;
    const int ith_;
    int i_query_ = 0;
    float* sum_ = nullptr;  // over this thread's heads
    int n_summed_ = 0;
};

}  // namespace kqview
