// The layers of one graph whose rows a kernel computes beside the step, and what it is told for the
// targets of a step. The graph saves queries, and masks where they say more than how many columns
// there are.
// Owner:   the device_part of a graph.
// Threads: the engine thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "tap/device/row_step.h"
#include "tap/host/row_sink.h"
#include "tap/plan.h"

namespace kqview {

class row_work {
public:
    explicit row_work(int n_queries) : n_queries_(n_queries) {}

    void add(int il, const row_layer& layer, int key_type);
    bool holds(int il) const { return index_of_.contains(il); }

    // The jobs of these targets, of those layers that are here. `reaches`: whether a kernel can
    // write to memory of the host. Raises internal if the graph lacks a query.
    row_step step_of(std::span<const row_target> targets,
                     const std::function<bool(const void*)>& reaches);

    // Bytes that a job's rows take at most.
    struct need {
        std::size_t n_rows = 0;    // before a reduction
        std::size_t n_layers = 0;  // reduced, or 0
        std::size_t n_columns = 0;
        bool has_half = false;
    };
    static std::size_t bytes_for(const need& wanted);

private:
    // What the steps of a plan have in common: found once, for a step waits for it.
    struct plan_rows {
        std::shared_ptr<const capture_plan> plan;
        row_form form;
        std::vector<row_item> items;        // rows: in `numbers` here
        std::vector<std::int32_t> numbers;  // rows of heads, then ends of groups, cuts and spans
        row_job job{};                      // as far as it does not depend on the step
        std::vector<std::size_t> places;    // in the block, of rows that are handed out
    };

    const plan_rows& rows_of(const std::shared_ptr<const capture_plan>& plan);
    void add_items(const capture_plan::layer_rows& wanted, std::int32_t first_row,
                   plan_rows& to) const;
    static void add_item(std::int32_t layer, std::size_t first_head,
                         std::span<const std::int32_t> rows, plan_rows& to);
    void add_job(const row_target& target, const plan_rows& rows,
                 const std::function<bool(const void*)>& reaches, row_step& step) const;

    int n_queries_;  // of the step, in each stream
    int key_type_ = 0;
    std::map<int, std::int32_t> index_of_;  // in layers_
    std::vector<row_layer> layers_;
    std::deque<plan_rows> known_;  // the newest last
};

}  // namespace kqview
