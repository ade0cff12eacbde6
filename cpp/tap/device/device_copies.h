// Which bytes of a step's results on devices go where, and what the host does with those that are
// not handed out as they are.
// Threads: the engine thread, after the step's compute was started.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <vector>

#include "tap/device/device_nodes.h"
#include "tap/device/transfer.h"
#include "tap/host/row_sink.h"

namespace kqview {

// What one graph has on devices. Lives as long as the graph.
struct device_part {
    struct hidden {
        int il;
        ggml_tensor* tensor;  // ne=[n_embd, n_rows]
        int n_tokens;         // of the graph; the rows are of the last ones
    };
    struct share {  // of one device
        transfer* way;
        std::vector<device_rows> rows;
        std::vector<hidden> states;
        std::size_t n_used = 0;
        ggml_backend_t backend = nullptr;  // that computes it
    };
    std::vector<share> shares;
};

class device_copies {
public:
    // Raises internal where rows that the targets want are not in the graph.
    device_copies(row_table& table, const device_part& part);

    // The copies out of one device that this step's targets want; counts rows that need no more
    // work as written. Fills what the graph has no columns for. Raises internal where a query is
    // not in the graph.
    std::vector<row_copy> of(const device_part::share& share);

    // Rows that are to be reduced, converted or cut once they have arrived: into memory of ours
    // first.
    bool has_work_left() const { return !work_.empty(); }
    void finish();

private:
    // What a target gets of one result.
    struct piece {
        std::size_t i_target;
        const device_part::share* share;
        const device_rows* rows;
        const capture_plan::layer_rows* wanted;  // null: of several layers
        std::size_t n_rows;
        std::byte* to = nullptr;
    };
    struct unfinished {
        std::vector<piece> pieces;  // of one target
        std::vector<float> rows;    // (row, query, column) of each piece
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
};

}  // namespace kqview
