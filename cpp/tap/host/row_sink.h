// Where finished rows go: into the block as they are, as float16, as their k largest values, or
// summed up over heads and layers first. A float16 saturates: one beyond +-65504 would be infinite,
// which reads as masked. One sink is one compute thread's work for one target in one layer.
// Threads: ggml's compute threads; what they share lies in row_table and is joined by atomics, and
//          by ggml's barrier between two nodes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "tap/host/row_kernel.h"
#include "tap/plan.h"

namespace kqview {

// Where the rows of a run of queries go.
struct row_target {
    std::shared_ptr<const capture_plan> plan;
    int i_stream;   // which of the graph's KV streams
    int i_query;    // the first query in that stream
    int i_token;    // ... and in the batch
    int n_visible;  // columns the first query sees; each next one sees one more, up to n_columns
    row_layout layout;  // of the rows in `data`
    std::byte* data;    // layout.size_bytes
};

// What the threads share while heads and layers of one target are reduced.
struct reduction_state {
    std::vector<float>
        partials;  // (thread, column): each thread's heads, for a target of one query
    std::atomic<int> n_arrived{0};
    std::vector<float> totals;        // (query, column): over the layers so far
    std::vector<int> n_layers_added;  // per query
};

// The targets of the step that runs now, and what was written to them.
struct row_table {
    std::vector<row_target> targets;
    std::deque<reduction_state> reductions;  // as many as targets at least; grows, never shrinks
    std::atomic<int> n_rows_written{0};
    std::atomic<const std::byte*> first_write{nullptr};  // row 0 of target 0, by the kernel
    std::vector<row_scratch> scratch;                    // one per compute thread

    // Before a step: room for the reductions of `targets`.
    void prepare_reductions();
};

class row_sink {
public:
    row_sink(row_table& table, std::size_t i_target, const capture_plan::layer_rows& rows, int ith);

    // Rows of query `i_query` follow; with one query each thread brings some of its heads, else
    // all.
    void begin_query(int i_query);

    // Where to compute head `i_head` (index into the wanted ones); i_lane < max_heads_at_once.
    float* place(int i_head, int i_lane);

    // A row is complete: n_columns values.
    void finish(int i_head, const float* row);

    // A row of several whole layers: the sum or the maximum of all their heads, for a plan that
    // reduces layers.
    void finish_layers(const float* row, int n_layers);

    // Every head of this thread was finished. `nth` threads bring the heads of a single query.
    void end_query(int nth);

    void scale(float* row, float factor) const;

private:
    bool is_reduced() const { return plan_.reduce() != row_reduction::none; }
    bool is_mean() const {
        return plan_.reduce() == row_reduction::mean || plan_.reduce() == row_reduction::mean_heads;
    }
    bool is_direct() const {
        return plan_.type() == row_type::f32 && plan_.top_k() == 0 && !is_reduced();
    }
    std::size_t n_columns() const { return static_cast<std::size_t>(target_.layout.n_columns); }
    std::size_t index_of(int i_row) const;
    void add(float* sum, const float* row) const;
    void finish_layer(float* row);
    void write(int i_row, const float* row);
    void write_top(int i_row, const float* row);
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
    float* sum_ = nullptr;  // of this thread's heads
    int n_summed_ = 0;
};

}  // namespace kqview
