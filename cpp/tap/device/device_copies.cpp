#include "tap/device/device_copies.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "tap/device/row_step.h"

namespace kqview {

namespace {

// Number of values of all queries of one row.
std::size_t size_of(const row_target& target, int n_values) {
    return static_cast<std::size_t>(target.layout.n_queries) * static_cast<std::size_t>(n_values);
}

// Fills columns [first, n_columns) of a row: tokens not decoded yet, for which the graph has no
// cells.
void fill_unseen(std::byte* row, std::size_t first, std::size_t n_columns, row_kind kind,
                 std::size_t element_bytes) {
    const float unseen = unseen_value(kind);
    if (element_bytes == sizeof(float)) {
        auto* const values = reinterpret_cast<float*>(row);
        std::fill(values + first, values + n_columns, unseen);
    } else {
        auto* const values = reinterpret_cast<ggml_fp16_t*>(row);
        std::fill(values + first, values + n_columns, ggml_fp32_to_fp16(unseen));
    }
}

bool is_by_kernel(const device_part& part, int il) {
    return std::ranges::any_of(part.shares, [il](const auto& share) {
        return share.by_kernel && share.by_kernel->holds(il);
    });
}

}  // namespace

device_copies::device_copies(row_table& table, const device_part& part) : table_(table) {
    for (std::size_t i = 0; i < table.targets.size(); ++i) place(pieces_of(i, part));
}

// Pieces in the plan's order.
std::vector<device_copies::piece> device_copies::pieces_of(std::size_t i_target,
                                                           const device_part& part) const {
    const auto& plan = *table_.targets[i_target].plan;
    std::vector<piece> pieces;
    std::size_t n_joined = 0;
    std::size_t n_joined_found = 0;
    for (const auto& wanted : plan.layers()) {
        if (!wanted.on_device || is_by_kernel(part, wanted.il)) continue;
        const auto& want = *wanted.on_device;
        n_joined += want.joins_layers() ? 1 : 0;
        bool is_found = want.joins_layers();
        for (const auto& share : part.shares) {
            for (const auto& rows : share.rows) {
                const bool has_layer = rows.layers.front() == wanted.il;
                if (rows.want != want || !has_layer) continue;
                // A row over several layers is listed under the first of them.
                is_found = true;
                if (want.joins_layers()) n_joined_found += rows.layers.size();
                pieces.push_back({i_target, &share, &rows, want.joins_layers() ? nullptr : &wanted,
                                  want.joins_layers() ? 1 : wanted.n_rows_brought()});
            }
        }
        if (!is_found) throw error(errc::internal, "rows of a layer are not in its graph");
    }
    if (n_joined_found != n_joined) {
        throw error(errc::internal, "rows of layers are not in their graph");
    }
    return pieces;
}

// Chooses where the rows of a target go: into its block if all of them arrive in their final form,
// otherwise all into a buffer of this object.
void device_copies::place(std::vector<piece> pieces) {
    if (pieces.empty()) return;
    const auto& target = table_.targets[pieces.front().i_target];
    const auto& plan = *target.plan;
    const auto is_direct = [&](const piece& one) {
        if (one.wanted) return plan.is_direct(*one.wanted);
        return one.rows->layers.size() == plan.layers().size() && plan.keeps_columns() &&
               plan.type() == one.rows->want.type;
    };
    if (std::all_of(pieces.begin(), pieces.end(), is_direct)) {
        for (auto& one : pieces) {
            const int row = !one.wanted                            ? 0
                            : plan.reduce() == row_reduction::none ? one.wanted->first_row
                                                                   : one.wanted->index;
            one.to = target.data + static_cast<std::size_t>(row) *
                                       size_of(target, target.layout.n_values) *
                                       plan.element_bytes();
            pieces_.push_back(one);
        }
        return;
    }
    std::size_t n_rows = 0;
    for (const auto& one : pieces) n_rows += one.n_rows;
    auto& work = work_.emplace_back();
    const auto row_floats = size_of(target, target.layout.n_columns);
    work.rows.resize(n_rows * row_floats);
    auto* to = work.rows.data();
    for (auto& one : pieces) {
        one.to = reinterpret_cast<std::byte*>(to);
        to += one.n_rows * row_floats;
    }
    work.pieces = std::move(pieces);
}

rows_out device_copies::of(const device_part::share& share) {
    rows_out copies;
    auto& rows = share.beside ? copies.of_beside : copies.of_results;
    for (std::size_t i = 0; i < table_.targets.size(); ++i) {
        const auto& target = table_.targets[i];
        std::vector<row_copy> of_target;
        for (const auto& one : pieces_) {
            if (one.share != &share || one.i_target != i) continue;
            add_rows(one, of_target);
            table_.n_rows_written.fetch_add(static_cast<int>(one.n_rows) * target.layout.n_queries,
                                            std::memory_order_relaxed);
        }
        for (const auto& work : work_) {
            for (const auto& one : work.pieces) {
                if (one.share == &share && one.i_target == i) add_rows(one, of_target);
            }
        }
        pack_copies(of_target);
        rows.insert(rows.end(), of_target.begin(), of_target.end());
        of_target.clear();
        add_hidden(target, share, of_target);
        pack_copies(of_target);
        copies.of_results.insert(copies.of_results.end(), of_target.begin(), of_target.end());
    }
    return copies;
}

row_step device_copies::step_of(const device_part::share& share) {
    if (!share.by_kernel) return {};
    const auto* const kernels = share.way->kernels();
    auto step = share.by_kernel->step_of(
        table_.targets, [kernels](const void* memory) { return kernels->reaches(memory); });
    int n_rows = 0;
    for (const auto& job : step.jobs) n_rows += job.n_rows_out();
    table_.n_rows_written.fetch_add(n_rows, std::memory_order_relaxed);
    return step;
}

// In a result, query q of head h in its stream s is at ((s * n_head + h) * n_rows + q) * n_values.
void device_copies::add_rows(const piece& one, std::vector<row_copy>& copies) const {
    const auto& target = table_.targets[one.i_target];
    const auto& rows = *one.rows;
    const auto element_bytes = rows.want.element_bytes();
    // Columns, or sums over spans.
    const auto n_columns = rows.want.n_values(static_cast<std::size_t>(target.layout.n_columns));
    const auto n_queries = static_cast<std::size_t>(target.layout.n_queries);
    const int first = target.i_query - (rows.n_queries - static_cast<int>(rows.n_rows));
    const slot_range stream{target.i_stream, 1};
    if (first < 0 || static_cast<std::size_t>(first) + n_queries > rows.n_rows ||
        !rows.streams.covers(stream)) {
        throw error(errc::internal, "the rows of a query are not in its step's graph");
    }
    const auto n_known = std::min(n_columns, rows.n_values);
    const auto from_stride = rows.n_values * element_bytes;
    const auto to_stride = n_columns * element_bytes;
    const bool is_reduced = rows.want.reduce != row_reduction::none;
    std::byte* to = one.to;
    for (std::size_t i = 0; i < one.n_rows; ++i) {
        const auto head = static_cast<std::size_t>(is_reduced ? 0 : one.wanted->heads[i]);
        const auto row =
            (static_cast<std::size_t>(stream.first - rows.streams.first) * rows.n_head + head) *
                rows.n_rows +
            static_cast<std::size_t>(first);
        const auto& from = one.share->beside ? one.share->way->beside() : one.share->way->results();
        add_copy(copies, {from.offset_of(rows.tensor) + row * from_stride, to, n_queries,
                          n_known * element_bytes, from_stride, to_stride});
        for (std::size_t q = 0; q < n_queries; ++q, to += to_stride) {
            if (n_known < n_columns) {
                fill_unseen(to, n_known, n_columns, rows.want.kind, element_bytes);
            }
        }
    }
}

void device_copies::add_hidden(const row_target& target, const device_part::share& share,
                               std::vector<row_copy>& copies) {
    const auto& plan = *target.plan;
    const int n_queries = target.layout.n_queries;
    const auto n_values = size_of(target, plan.n_embd());
    const auto row_bytes = static_cast<std::size_t>(plan.n_embd()) * sizeof(float);
    for (const auto& one : share.states) {
        const int index = plan.find_hidden(one.il);
        if (index < 0) continue;
        // The last layer keeps only the queries whose logits are wanted, the last ones of a step.
        const auto first = one.tensor->ne[1] - target.n_behind - n_queries;
        if (first < 0) throw error(errc::internal, "a hidden state is not in its step's graph");
        std::byte* to = target.data + target.layout.hidden_offset +
                        static_cast<std::size_t>(index) * n_values * plan.element_bytes();
        if (plan.type() == row_type::f16) {
            auto& wide = wide_states_.emplace_back(std::vector<float>(n_values),
                                                   reinterpret_cast<ggml_fp16_t*>(to));
            to = reinterpret_cast<std::byte*>(wide.values.data());
        }
        add_copy(copies,
                 {share.way->results().offset_of(one.tensor) +
                      static_cast<std::size_t>(first) * row_bytes,
                  to, static_cast<std::size_t>(n_queries), row_bytes, row_bytes, row_bytes});
        table_.n_rows_written.fetch_add(n_queries, std::memory_order_relaxed);
    }
}

void device_copies::finish() {
    for (const auto& one : wide_states_) write_f16(one.values.data(), one.values.size(), one.to);
    for (const auto& work : work_) {
        for (const auto& one : work.pieces) finish(one);
    }
}

// As the host kernel's threads do with the rows they compute.
void device_copies::finish(const piece& one) {
    const auto& target = table_.targets[one.i_target];
    const auto& plan = *target.plan;
    const auto n_columns = static_cast<std::size_t>(target.layout.n_columns);
    const auto n_queries = static_cast<std::size_t>(target.layout.n_queries);
    const auto* const arrived = reinterpret_cast<const float*>(one.to);
    // The sink divides sums by the number of heads.
    const auto factor = static_cast<float>(one.rows->n_heads_reduced);
    row_sink sink(table_, one.i_target, one.wanted ? *one.wanted : plan.layers().front(), 0);
    for (std::size_t q = 0; q < n_queries; ++q) {
        sink.begin_query(static_cast<int>(q));
        for (std::size_t i = 0; i < one.n_rows; ++i) {
            float* const row = sink.place(static_cast<int>(i), 0);
            std::memcpy(row, arrived + (i * n_queries + q) * n_columns, n_columns * sizeof(float));
            if (is_mean(one.rows->want.reduce)) sink.scale(row, factor);
            if (one.wanted) {
                sink.finish(static_cast<int>(i), row);
            } else {
                sink.finish_layers(row, static_cast<int>(one.rows->layers.size()));
            }
        }
        if (one.wanted) sink.end_query(1);
    }
}

}  // namespace kqview
