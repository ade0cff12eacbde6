// Plans the copies of a step's device results to the host, and finishes there the rows that do not
// arrive in their final form.
// Threads: the engine thread, after it started the step's compute.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "tap/device/device_nodes.h"
#include "tap/device/row_copy.h"
#include "tap/device/row_step.h"
#include "tap/device/row_work.h"
#include "tap/device/side_graph.h"
#include "tap/device/transfer.h"
#include "tap/host/row_sink.h"
#include "tap/plan.h"

namespace kqview {

// The results that one graph leaves on devices. Lives as long as the graph.
struct device_part {
    struct hidden {
        int il;
        ggml_tensor* tensor;  // F32 ne=[n_embd, n_rows], of the last tokens of the graph
    };
    struct share {  // one device's part
        transfer* way;
        std::vector<device_rows> rows;
        std::vector<hidden> states;
        std::size_t n_used = 0;
        ggml_backend_t backend = nullptr;  // computes the results
        // Null: `rows` are results of the graph itself. Otherwise its results are the `queries`.
        std::shared_ptr<side_graph> beside = nullptr;
        std::vector<ggml_tensor*> queries{};
        std::shared_ptr<row_work> by_kernel = nullptr;  // as `beside`, where a kernel computes rows

        const ggml_tensor* first_result() const {
            if (!queries.empty()) return queries.front();
            return rows.empty() ? states.front().tensor : rows.front().tensor;
        }
    };
    std::vector<share> shares;
};

class device_copies {
public:
    // Raises internal if the graph lacks rows that the targets want.
    device_copies(row_table& table, const device_part& part);

    // The copies out of one device that this step's targets want. Counts rows that need no further
    // work as written, and fills the columns that the graph does not have. Raises internal if the
    // graph lacks a query.
    rows_out of(const device_part::share& share);
    // The same for rows that a kernel computes.
    row_step step_of(const device_part::share& share);

    // True if rows must still be reduced, converted or cut after they arrive; these go to a buffer
    // of this object first.
    bool has_work_left() const { return !work_.empty() || !wide_states_.empty(); }
    void finish();

private:
    // The rows of one result that belong to one target.
    struct piece {
        std::size_t i_target;
        const device_part::share* share;
        const device_rows* rows;
        const capture_plan::layer_rows* wanted;  // null: the rows cover several layers
        std::size_t n_rows;
        std::byte* to = nullptr;
    };
    struct unfinished {
        std::vector<piece> pieces;  // of one target
        std::vector<float> rows;    // (row, query, column) of each piece
    };
    struct wide_state {
        std::vector<float> values;
        ggml_fp16_t* to;
    };

    std::vector<piece> pieces_of(std::size_t i_target, const device_part& part) const;
    void place(std::vector<piece> pieces);
    void add_rows(const piece& one, std::vector<row_copy>& copies) const;
    void add_hidden(const row_target& target, const device_part::share& share,
                    std::vector<row_copy>& copies);
    void finish(const piece& one);

    row_table& table_;
    std::vector<piece> pieces_;
    std::vector<unfinished> work_;
    std::vector<wide_state> wide_states_;  // to be made float16
};

}  // namespace kqview
