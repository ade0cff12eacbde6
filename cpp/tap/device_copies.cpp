#include "tap/device_copies.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace kqview {

namespace {

// Rows that a device brings for a layer of a plan.
std::size_t n_rows_of(const capture_plan::layer_rows& wanted) {
    switch (wanted.form) {
        case row_form::host: return 0;
        case row_form::device_mean: return 1;
        default: return wanted.heads.size();
    }
}

std::size_t query_floats(const row_target& target) {
    return static_cast<std::size_t>(target.layout.n_queries) *
           static_cast<std::size_t>(target.layout.n_columns);
}

// How a device's result lies: query q of head h in stream s at ((s * n_head + h) * n_rows + q) * n_cells.
struct result_shape {
    std::size_t n_cells, n_rows, n_head, element_bytes;

    explicit result_shape(const device_rows& rows)
        : element_bytes(rows.form == row_form::device_f16 ? 2 : 4) {
        // A mean has its heads, which are one now, in front.
        const auto* const ne = rows.tensor->ne + (rows.form == row_form::device_mean ? 1 : 0);
        n_cells = static_cast<std::size_t>(ne[0]);
        n_rows = static_cast<std::size_t>(ne[1]);
        n_head =
            rows.form == row_form::device_mean ? 1 : static_cast<std::size_t>(rows.tensor->ne[2]);
    }
};

// Columns [first, n_columns) of a row: tokens that are not decoded yet, for which the graph has no cells.
void fill_unseen(std::byte* row, std::size_t first, std::size_t n_columns, row_kind kind,
                 std::size_t element_bytes) {
    const float unseen = kind == row_kind::probs ? 0.0f : -std::numeric_limits<float>::infinity();
    if (element_bytes == sizeof(float)) {
        auto* const values = reinterpret_cast<float*>(row);
        std::fill(values + first, values + n_columns, unseen);
    } else {
        auto* const values = reinterpret_cast<ggml_fp16_t*>(row);
        std::fill(values + first, values + n_columns, ggml_fp32_to_fp16(unseen));
    }
}

}  // namespace

device_copies::device_copies(row_table& table) : table_(table) {
    for (std::size_t i = 0; i < table.targets.size(); ++i) {
        const auto& target = table.targets[i];
        std::size_t n_rows = 0;
        bool is_direct = true;
        for (const auto& wanted : target.plan->layers()) {
            n_rows += n_rows_of(wanted);
            is_direct &= wanted.form == row_form::host || target.plan->is_direct(wanted);
        }
        if (!is_direct) work_.push_back({i, std::vector<float>(n_rows * query_floats(target))});
    }
}

device_copies::unfinished* device_copies::work_of(std::size_t i_target) {
    const auto found = std::find_if(work_.begin(), work_.end(), [i_target](const auto& one) {
        return one.i_target == i_target;
    });
    return found == work_.end() ? nullptr : &*found;
}

std::vector<row_copy> device_copies::of(const device_part::share& share) {
    std::vector<row_copy> copies;
    for (std::size_t i = 0; i < table_.targets.size(); ++i) {
        add_rows(i, share, copies);
        add_hidden(table_.targets[i], share, copies);
    }
    return copies;
}

void device_copies::add_rows(std::size_t i_target, const device_part::share& share,
                             std::vector<row_copy>& copies) {
    const auto& target = table_.targets[i_target];
    const auto& plan = *target.plan;
    auto* const work = work_of(i_target);
    float* to_work = work ? work->rows.data() : nullptr;
    for (const auto& wanted : plan.layers()) {
        const auto n_rows = n_rows_of(wanted);
        float* const here = to_work;
        if (work) to_work += n_rows * query_floats(target);
        const auto found =
            std::find_if(share.rows.begin(), share.rows.end(), [&](const device_rows& rows) {
                return rows.il == wanted.il && rows.kind == plan.kind() && rows.form == wanted.form;
            });
        if (found == share.rows.end()) continue;  // another device's, or the host's
        if (work) {
            add_layer(target, *found, *share.way, wanted, reinterpret_cast<std::byte*>(here),
                      copies);
            continue;
        }
        const int row = plan.reduce() == row_reduction::none ? wanted.first_row : wanted.index;
        std::byte* const to = target.data + static_cast<std::size_t>(row) * query_floats(target) *
                                                plan.element_bytes();
        add_layer(target, *found, *share.way, wanted, to, copies);
        table_.n_rows_written.fetch_add(static_cast<int>(n_rows) * target.layout.n_queries,
                                        std::memory_order_relaxed);
    }
}

void device_copies::add_layer(const row_target& target, const device_rows& rows,
                              const transfer& way, const capture_plan::layer_rows& wanted,
                              std::byte* to, std::vector<row_copy>& copies) const {
    const result_shape shape(rows);
    const auto n_columns = static_cast<std::size_t>(target.layout.n_columns);
    const auto n_queries = static_cast<std::size_t>(target.layout.n_queries);
    const int first = target.i_query - (rows.n_queries - static_cast<int>(shape.n_rows));
    if (first < 0 || static_cast<std::size_t>(first) + n_queries > shape.n_rows) {
        throw error(errc::internal, "tap: the rows of a query are not in its step's graph");
    }
    const bool is_mean = rows.form == row_form::device_mean;
    const auto n_known = std::min(n_columns, shape.n_cells);
    const auto to_stride = n_columns * shape.element_bytes;
    for (std::size_t i = 0; i < n_rows_of(wanted); ++i) {
        const auto head = static_cast<std::size_t>(is_mean ? 0 : wanted.heads[i]);
        const auto row =
            (static_cast<std::size_t>(target.i_stream) * shape.n_head + head) * shape.n_rows +
            static_cast<std::size_t>(first);
        const auto from_stride = shape.n_cells * shape.element_bytes;
        add_copy(copies, {way.offset_of(rows.tensor) + row * from_stride, to, n_queries,
                          n_known * shape.element_bytes, from_stride, to_stride});
        for (std::size_t q = 0; q < n_queries; ++q, to += to_stride) {
            if (n_known < n_columns) {
                fill_unseen(to, n_known, n_columns, rows.kind, shape.element_bytes);
            }
        }
    }
}

void device_copies::add_hidden(const row_target& target, const device_part::share& share,
                               std::vector<row_copy>& copies) {
    if (!target.layout.has_hidden) return;
    const auto row_bytes = static_cast<std::size_t>(target.plan->n_embd()) * sizeof(float);
    for (const auto& one : share.states) {
        const int index = target.plan->find_hidden(one.il);
        if (index < 0) continue;
        // The last layer keeps the queries whose logits are wanted alone: one of a prompt.
        const int token = std::min(target.i_token, one.n_tokens - 1);
        const int row = std::max(0, token - (one.n_tokens - static_cast<int>(one.tensor->ne[1])));
        std::byte* const to =
            target.data + target.layout.hidden_offset + static_cast<std::size_t>(index) * row_bytes;
        add_copy(copies,
                 {share.way->offset_of(one.tensor) + static_cast<std::size_t>(row) * row_bytes, to,
                  1, row_bytes, row_bytes, row_bytes});
        table_.n_rows_written.fetch_add(1, std::memory_order_relaxed);
    }
}

void device_copies::finish() {
    for (const auto& work : work_) finish(work);
}

// What the kernel's threads do with rows of their own.
void device_copies::finish(const unfinished& work) {
    const auto& target = table_.targets[work.i_target];
    const auto n_columns = static_cast<std::size_t>(target.layout.n_columns);
    const auto n_queries = static_cast<std::size_t>(target.layout.n_queries);
    const float* arrived = work.rows.data();
    for (const auto& wanted : target.plan->layers()) {
        const auto n_rows = n_rows_of(wanted);
        if (n_rows == 0) continue;
        row_sink sink(table_, work.i_target, wanted, 0);
        for (std::size_t q = 0; q < n_queries; ++q) {
            sink.begin_query(static_cast<int>(q));
            for (std::size_t i = 0; i < n_rows; ++i) {
                float* const row = sink.place(static_cast<int>(i), 0);
                std::memcpy(row, arrived + (i * n_queries + q) * n_columns,
                            n_columns * sizeof(float));
                // The sink divides by the number of heads.
                if (wanted.form == row_form::device_mean) {
                    sink.scale(row, static_cast<float>(wanted.heads.size()));
                }
                sink.finish(static_cast<int>(i), row);
            }
            sink.end_query(1);
        }
        arrived += n_rows * query_floats(target);
    }
}

}  // namespace kqview
