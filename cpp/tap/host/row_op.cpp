#include "tap/host/row_op.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "tap/host/row_kernel.h"

namespace kqview {

namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// ---- operands: where one query's part of q, k and the mask is, in any layout that a model uses

// A query's place in a node's operands.
struct query_place {
    int token;
    int stream;
};

query_place place_of(const attention_site& site, int i_query, int i_stream) {
    // One of the two is 0: a batch has several queries of one stream, or one query each of several.
    if (site.has_stream_per_query) return {0, i_query + i_stream};
    return {i_query, i_stream};
}

const float* query_of(const row_op& op, const ggml_tensor* node, query_place query, int head) {
    return reinterpret_cast<const float*>(
        part_of(node->src[0], op.site.q_strides, query.token, head, query.stream));
}

// Cells [first, first + n_cells) of the mask, the part that some heads share.
mask_row mask_of(const row_op& op, const ggml_tensor* node, query_place query, int part, int first,
                 int n_cells) {
    if (op.i_mask < 0) return {};
    const ggml_tensor* const mask = node->src[op.i_mask];
    const auto* const row = part_of(mask, op.site.mask_strides, query.token, part, query.stream);
    return read_mask(row + static_cast<std::size_t>(first) * ggml_type_size(mask->type), mask->type,
                     n_cells);
}

// The keys of one KV head that a query sees.
struct seen_keys {
    key_rows keys;   // in order of position, or gathered
    key_rows extra;  // keys that stand for no token
    mask_row extra_mask;
    const std::int32_t* gathered;  // where gathered keys come from, else null
};

seen_keys keys_of(const row_op& op, const ggml_tensor* node, query_place query, int head_kv) {
    const auto& site = op.site;
    const ggml_tensor* const k = node->src[1];
    const auto* const data = part_of(k, site.k_strides, 0, head_kv, query.stream);
    const auto n_embd = static_cast<int>(k->ne[0]);
    const auto stride = site.k_strides.token;
    seen_keys seen{{data, stride, k->type, n_embd, site.n_cells},
                   {data + static_cast<std::size_t>(site.n_cells) * stride, stride, k->type, n_embd,
                    site.n_extra_cells},
                   {},
                   nullptr};
    if (site.n_extra_cells > 0) {
        seen.extra_mask = mask_of(op, node, query, head_kv, site.n_cells, site.n_extra_cells);
    }
    if (op.i_gathered >= 0) {
        seen.gathered = reinterpret_cast<const std::int32_t*>(part_of(
            node->src[op.i_gathered], site.gathered_strides, query.token, head_kv, query.stream));
    }
    return seen;
}

// One logit for everything that takes part in the softmax without a column: the model's own sink,
// and every key that stands for no token. Empty if there is neither.
std::optional<float> sink_of(const row_op& op, const ggml_tensor* node, const seen_keys& seen,
                             const float* q, int head, row_scratch& scratch) {
    const auto& site = op.site;
    std::optional<float> sink;
    if (op.i_sinks >= 0) sink = static_cast<const float*>(node->src[op.i_sinks]->data)[head];
    const int n_extra = site.n_extra_cells;
    if (n_extra == 0) return sink;

    scratch.extra.resize(static_cast<std::size_t>(n_extra));
    float* const row = scratch.extra.data();
    dot_rows(seen.extra, &q, 1, n_extra, &row, scratch);
    const float slope = alibi_slope(site.max_bias, site.n_head, head);
    logits_to_scores(row, n_extra, {site.scale, site.softcap, slope}, seen.extra_mask);
    const float largest =
        std::max(sink.value_or(minus_infinity), *std::max_element(row, row + n_extra));
    if (largest == minus_infinity) return std::nullopt;
    double sum = sink ? std::exp(static_cast<double>(*sink) - largest) : 0.0;
    for (int i = 0; i < n_extra; ++i) sum += std::exp(static_cast<double>(row[i]) - largest);
    return largest + static_cast<float>(std::log(sum));
}

// Scatters a row over cells to columns; what no cell has counts as masked.
template <class function>
void scatter(int n_cells, row_kind kind, const float* from, float* to, int n_columns,
             function column_of) {
    const float hidden = unseen_value(kind);
    std::fill_n(to, n_columns, hidden);
    for (int i = 0; i < n_cells; ++i) {
        if (from[i] == hidden) continue;  // the column of a masked cell is arbitrary
        const int column = column_of(static_cast<std::size_t>(i));
        if (column >= 0 && column < n_columns) to[column] = from[i];
    }
}

// ---- rows

const std::byte* bytes_of(const ggml_tensor* tensor) {
    return static_cast<const std::byte*>(tensor->data);
}

std::size_t zu(std::int64_t n) { return static_cast<std::size_t>(n); }

// One query of one target, as a node sees it.
struct query_view {
    const row_op& op;
    const ggml_tensor* node;
    const row_target& target;
    const capture_plan::layer_rows& rows;
    query_place place;
    int n_visible;  // columns it sees
};

// The columns of a ring's cells; null where the site is none.
const std::vector<std::int32_t>* ring_of(const row_op& op, query_place query) {
    return op.site.is_ring ? &op.table->ring_columns[zu(query.stream)] : nullptr;
}

// Whether cells are not in the order of their columns.
bool has_other_columns(const row_op& op) { return op.i_gathered >= 0 || op.site.is_ring; }

// Columns after the query: positions that it does not attend to.
void fill_unseen(const query_view& query, row_kind kind, float* row) {
    std::fill(row + query.n_visible, row + query.target.layout.n_columns, unseen_value(kind));
}

// Computes wanted heads [begin, end) from q and k.
void write_flash_rows(const query_view& query, int begin, int end, row_sink& sink,
                      row_scratch& scratch) {
    const auto& op = query.op;
    const auto& site = op.site;
    const auto& heads = query.rows.heads;
    const auto kind = query.target.plan->kind();
    const int n_group = site.n_head / site.n_head_kv;
    const bool is_gathered = has_other_columns(op);
    const int n_cells = is_gathered ? site.n_cells : query.n_visible;
    const auto n_gathered = static_cast<std::size_t>(is_gathered ? n_cells : 0);
    if (scratch.gathered.size() < n_gathered * max_heads_at_once) {
        scratch.gathered.resize(n_gathered * max_heads_at_once);
    }

    int i_mask = 0;
    auto mask = mask_of(op, query.node, query.place, i_mask, 0, n_cells);
    const auto read_mask_of = [&](int head) {
        if (site.mask_of_head(head) == i_mask) return;
        i_mask = site.mask_of_head(head);
        mask = mask_of(op, query.node, query.place, i_mask, 0, n_cells);
    };

    for (int i = begin; i < end;) {
        // Wanted heads in a row that share a KV head read its keys once.
        const int head_kv = heads[static_cast<std::size_t>(i)] / n_group;
        const float* queries[max_heads_at_once];
        float* out[max_heads_at_once];
        int n = 0;
        while (n < max_heads_at_once && i + n < end) {
            const int head = heads[static_cast<std::size_t>(i + n)];
            if (head / n_group != head_kv) break;
            queries[n] = query_of(op, query.node, query.place, head);
            out[n] = is_gathered
                         ? scratch.gathered.data() + static_cast<std::size_t>(n) * n_gathered
                         : sink.place(i + n, n);
            ++n;
        }
        const auto seen = keys_of(op, query.node, query.place, head_kv);
        dot_rows(seen.keys, queries, n, n_cells, out, scratch);
        for (int j = 0; j < n; ++j) {
            const int head = heads[static_cast<std::size_t>(i + j)];
            read_mask_of(head);
            if (kind == row_kind::logits) {
                hide_masked(out[j], n_cells, mask);
            } else {
                const float slope = alibi_slope(site.max_bias, site.n_head, head);
                logits_to_scores(out[j], n_cells, {site.scale, site.softcap, slope}, mask);
                if (kind == row_kind::probs) {
                    const auto extra = sink_of(op, query.node, seen, queries[j], head, scratch);
                    scores_to_probs(out[j], n_cells, extra ? &*extra : nullptr);
                }
            }
            float* row = out[j];
            if (is_gathered) {
                row = sink.place(i + j, j);
                const auto* const ring = ring_of(op, query.place);
                scatter(n_cells, kind, out[j], row, query.n_visible, [&](std::size_t cell) {
                    return ring ? (*ring)[cell]
                                : seen.gathered[cell] / site.rows_per_cell % site.n_cells_max;
                });
            }
            fill_unseen(query, kind, row);
            sink.finish(i + j, row);
        }
        i += n;
    }
}

// Copies wanted heads [begin, end) from the node's source.
void write_plain_rows(const query_view& query, int begin, int end, row_sink& sink,
                      row_scratch& scratch) {
    const auto& op = query.op;
    const auto* const ring = ring_of(op, query.place);
    const int n_cells = ring ? op.site.n_cells : query.n_visible;
    if (ring) scratch.gathered.resize(std::max(scratch.gathered.size(), zu(n_cells)));
    const ggml_tensor* const source = query.node->src[0];
    const auto* const base = bytes_of(source) +
                             static_cast<std::size_t>(query.place.stream) * source->nb[3] +
                             static_cast<std::size_t>(query.place.token) * source->nb[1];
    int i_mask = 0;
    mask_row mask;
    for (int i = begin; i < end; ++i) {
        const int head = query.rows.heads[static_cast<std::size_t>(i)];
        if (i == begin || op.site.mask_of_head(head) != i_mask) {
            i_mask = op.site.mask_of_head(head);
            mask = mask_of(op, query.node, query.place, i_mask, 0, n_cells);
        }
        const auto* const from =
            reinterpret_cast<const float*>(base + static_cast<std::size_t>(head) * source->nb[2]);
        float* const row = sink.place(i, 0);
        float* const cells = ring ? scratch.gathered.data() : row;
        std::memcpy(cells, from, zu(n_cells) * sizeof(float));
        if (op.kind == row_kind::logits) hide_masked(cells, n_cells, mask);
        if (op.kind == row_kind::scores) {
            const float slope = alibi_slope(op.site.max_bias, op.site.n_head, head);
            logits_to_scores(cells, n_cells, {op.site.scale, 0.0f, slope}, mask);
        }
        if (ring) {
            scatter(n_cells, op.kind, cells, row, query.n_visible,
                    [&](std::size_t cell) { return (*ring)[cell]; });
        }
        fill_unseen(query, op.kind, row);
        sink.finish(i, row);
    }
}

void write_query(const row_op& op, const ggml_tensor* node, const row_target& target,
                 const capture_plan::layer_rows& rows, int i_query, int begin, int end,
                 row_sink& sink, row_scratch& scratch) {
    const int n_visible = std::min(target.n_visible + i_query, target.layout.n_columns);
    const auto place = place_of(op.site, target.i_query + i_query, target.i_stream);
    const query_view query{op, node, target, rows, place, n_visible};
    if (op.site.flash) {
        write_flash_rows(query, begin, end, sink, scratch);
    } else {
        write_plain_rows(query, begin, end, sink, scratch);
    }
}

void write_target(const row_op& op, const ggml_tensor* node, std::size_t i_target,
                  const capture_plan::layer_rows& rows, int ith, int nth) {
    auto& table = *op.table;
    const auto& target = table.targets[i_target];
    const int n_cells_max = op.site.is_ring      ? target.layout.n_columns
                            : op.i_gathered >= 0 ? op.site.n_cells_max
                                                 : op.site.n_cells;
    const auto last =
        place_of(op.site, target.i_query + target.layout.n_queries - 1, target.i_stream);
    const int n_seen =
        std::min(target.n_visible + target.layout.n_queries - 1, target.layout.n_columns);
    // end_step reports the missing rows
    if (n_seen > n_cells_max || last.stream >= op.site.n_stream) return;
    auto& scratch = table.scratch[static_cast<std::size_t>(ith)];
    const auto n_heads = static_cast<int>(rows.heads.size());
    const int n_queries = target.layout.n_queries;
    row_sink sink(table, i_target, rows, ith);
    if (n_queries == 1) {  // the threads share the heads
        sink.begin_query(0);
        const int begin = n_heads * ith / nth;
        const int end = n_heads * (ith + 1) / nth;
        if (begin < end) write_query(op, node, target, rows, 0, begin, end, sink, scratch);
        return sink.end_query(nth);
    }
    // The threads interleave: in a causal model, the cost of a row grows with its query.
    for (int i = ith; i < n_queries; i += nth) {
        sink.begin_query(i);
        write_query(op, node, target, rows, i, 0, n_heads, sink, scratch);
        sink.end_query(1);
    }
}

void run_row_op(ggml_tensor* node, int ith, int nth, void* data) {
    const auto& op = *static_cast<const row_op*>(data);
    for (std::size_t i = 0; i < op.table->targets.size(); ++i) {
        const auto& plan = *op.table->targets[i].plan;
        if (!op.site.flash && plan.kind() != op.kind) continue;
        if (const auto* const rows = plan.find(op.il)) write_target(op, node, i, *rows, ith, nth);
    }
}

void run_hidden_op(ggml_tensor* node, int ith, int, void* data) {
    if (ith != 0) return;
    const auto& op = *static_cast<const row_op*>(data);
    const ggml_tensor* const source = node->src[0];
    for (const auto& target : op.table->targets) {
        const auto& plan = *target.plan;
        const int index = plan.find_hidden(op.il);
        if (index < 0) continue;
        const int n_queries = target.layout.n_queries;
        // The last layer keeps only the queries whose logits are wanted, the last ones of a step.
        const auto first = source->ne[1] - target.n_behind - n_queries;
        if (first < 0) continue;  // end_step reports the missing rows
        const auto n_embd = static_cast<std::size_t>(plan.n_embd());
        auto* to = target.data + target.layout.hidden_offset +
                   zu(index) * zu(n_queries) * plan.hidden_bytes();
        for (int i = 0; i < n_queries; ++i, to += plan.hidden_bytes()) {
            const auto* const from = bytes_of(source) + zu(first + i) * source->nb[1];
            if (plan.type() == row_type::f16) {
                write_f16(reinterpret_cast<const float*>(from), n_embd,
                          reinterpret_cast<ggml_fp16_t*>(to));
            } else {
                std::memcpy(to, from, plan.hidden_bytes());
            }
        }
        op.table->n_rows_written.fetch_add(n_queries, std::memory_order_relaxed);
    }
}

// The result is one float that nothing reads: rows leave through the table, not through ggml's
// memory.
ggml_tensor* make_node(ggml_context* tensors, std::vector<ggml_tensor*>& sources,
                       ggml_custom_op_t run, int n_tasks, row_op& op) {
    ggml_tensor* const node = ggml_custom_4d(tensors, GGML_TYPE_F32, 1, 1, 1, 1, sources.data(),
                                             static_cast<int>(sources.size()), run, n_tasks, &op);
    ggml_format_name(node, "kqview_rows-%d", op.il);
    return node;
}

}  // namespace

ggml_tensor* make_row_node(ggml_context* tensors, const attention_site& site, row_kind kind,
                           row_op& op) {
    op.il = site.il;
    op.site = site;
    op.kind = kind;
    std::vector<ggml_tensor*> sources{site.node_of(kind)};
    if (site.flash) sources = {site.q, site.k};
    const auto add = [&](ggml_tensor* source) {
        if (!source) return -1;
        sources.push_back(source);
        return static_cast<int>(sources.size()) - 1;
    };
    // The softmax's result is final; its input still needs the mask.
    if (site.flash || kind != row_kind::probs) {
        op.i_mask = add(site.mask);
        op.i_sinks = add(site.sinks);
    }
    op.i_gathered = add(site.gathered);
    return make_node(tensors, sources, run_row_op, GGML_N_TASKS_MAX, op);
}

ggml_tensor* make_hidden_node(ggml_context* tensors, const hidden_site& site, row_op& op) {
    op.il = site.il;
    std::vector<ggml_tensor*> sources{site.output};
    return make_node(tensors, sources, run_hidden_op, 1, op);
}

}  // namespace kqview
