#include "tap/row_op.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace kqview {

namespace {

const std::byte* bytes_of(const ggml_tensor* tensor) {
    return static_cast<const std::byte*>(tensor->data);
}

// One query of one target, as a node sees it.
struct query_view {
    const row_op& op;
    const ggml_tensor* node;
    const row_target& target;
    const capture_plan::layer_rows& rows;
    int i_query;    // in the target
    int n_visible;  // columns it sees
    mask_row mask;
};

mask_row mask_of(const row_op& op, const ggml_tensor* node, const row_target& target, int i_query,
                 int n_visible) {
    if (op.i_mask < 0) return {};
    const ggml_tensor* const mask = node->src[op.i_mask];
    const auto stream = static_cast<std::size_t>(target.i_stream % mask->ne[3]);
    const auto* const row = bytes_of(mask) + stream * mask->nb[3] +
                            static_cast<std::size_t>(target.i_query + i_query) * mask->nb[1];
    return read_mask(row, mask->type, n_visible);
}

const float* sink_of(const row_op& op, const ggml_tensor* node, int head) {
    return op.i_sinks < 0 ? nullptr : static_cast<const float*>(node->src[op.i_sinks]->data) + head;
}

// Columns behind the query: positions that it does not attend to.
void fill_unseen(const query_view& query, row_kind kind, float* row) {
    const float unseen = kind == row_kind::probs ? 0.0f : -std::numeric_limits<float>::infinity();
    std::fill(row + query.n_visible, row + query.target.layout.n_columns, unseen);
}

// Computes heads [begin, end) of the wanted ones from q and k.
void write_flash_rows(const query_view& query, int begin, int end, row_sink& sink,
                      row_scratch& scratch) {
    const auto& op = query.op;
    const auto& heads = query.rows.heads;
    const ggml_tensor* const q = query.node->src[0];
    const ggml_tensor* const k = query.node->src[1];
    const auto kind = query.target.plan->kind();
    const auto stream = static_cast<std::size_t>(query.target.i_stream);
    const int n_group = op.n_head / op.n_head_kv;
    const auto* const q_row =
        bytes_of(q) + stream * q->nb[3] +
        static_cast<std::size_t>(query.target.i_query + query.i_query) * q->nb[1];

    for (int i = begin; i < end;) {
        // A run of wanted heads that share a KV head reads its keys once.
        const int head_kv = heads[static_cast<std::size_t>(i)] / n_group;
        const float* queries[max_heads_at_once];
        float* out[max_heads_at_once];
        int n = 0;
        while (n < max_heads_at_once && i + n < end) {
            const int head = heads[static_cast<std::size_t>(i + n)];
            if (head / n_group != head_kv) break;
            queries[n] =
                reinterpret_cast<const float*>(q_row + static_cast<std::size_t>(head) * q->nb[2]);
            out[n] = sink.place(i + n, n);
            ++n;
        }
        const key_rows keys{
            bytes_of(k) + stream * k->nb[3] + static_cast<std::size_t>(head_kv) * k->nb[2],
            k->nb[1], k->type, static_cast<int>(k->ne[0]), static_cast<int>(k->ne[1])};
        dot_rows(keys, queries, n, query.n_visible, out, scratch);
        for (int j = 0; j < n; ++j) {
            const int head = heads[static_cast<std::size_t>(i + j)];
            if (kind == row_kind::logits) {
                hide_masked(out[j], query.n_visible, query.mask);
            } else {
                const float slope = alibi_slope(op.max_bias, op.n_head, head);
                logits_to_scores(out[j], query.n_visible, {op.scale, op.softcap, slope},
                                 query.mask);
                if (kind == row_kind::probs) {
                    scores_to_probs(out[j], query.n_visible, sink_of(op, query.node, head));
                }
            }
            fill_unseen(query, kind, out[j]);
            sink.finish(i + j, out[j]);
        }
        i += n;
    }
}

// Copies heads [begin, end) of the wanted ones out of the node's source.
void write_plain_rows(const query_view& query, int begin, int end, row_sink& sink) {
    const auto& op = query.op;
    const ggml_tensor* const source = query.node->src[0];
    const auto* const base =
        bytes_of(source) + static_cast<std::size_t>(query.target.i_stream) * source->nb[3] +
        static_cast<std::size_t>(query.target.i_query + query.i_query) * source->nb[1];
    for (int i = begin; i < end; ++i) {
        const int head = query.rows.heads[static_cast<std::size_t>(i)];
        const auto* const from =
            reinterpret_cast<const float*>(base + static_cast<std::size_t>(head) * source->nb[2]);
        float* const row = sink.place(i, 0);
        std::memcpy(row, from, static_cast<std::size_t>(query.n_visible) * sizeof(float));
        if (op.kind == row_kind::logits) hide_masked(row, query.n_visible, query.mask);
        if (op.kind == row_kind::scores) {
            const float slope = alibi_slope(op.max_bias, op.n_head, head);
            logits_to_scores(row, query.n_visible, {op.scale, 0.0f, slope}, query.mask);
        }
        fill_unseen(query, op.kind, row);
        sink.finish(i, row);
    }
}

void write_query(const row_op& op, const ggml_tensor* node, const row_target& target,
                 const capture_plan::layer_rows& rows, int i_query, int begin, int end,
                 row_sink& sink, row_scratch& scratch) {
    const int n_visible = std::min(target.n_visible + i_query, target.layout.n_columns);
    const auto mask = mask_of(op, node, target, i_query, n_visible);
    const query_view query{op, node, target, rows, i_query, n_visible, mask};
    if (op.is_flash) {
        write_flash_rows(query, begin, end, sink, scratch);
    } else {
        write_plain_rows(query, begin, end, sink);
    }
}

void write_target(const row_op& op, const ggml_tensor* node, std::size_t i_target,
                  const capture_plan::layer_rows& rows, int ith, int nth) {
    auto& table = *op.table;
    const auto& target = table.targets[i_target];
    const ggml_tensor* const source = node->src[op.is_flash ? 1 : 0];
    const int n_seen =
        std::min(target.n_visible + target.layout.n_queries - 1, target.layout.n_columns);
    if (n_seen > source->ne[op.is_flash ? 1 : 0]) return;  // end_step finds out
    auto& scratch = table.scratch[static_cast<std::size_t>(ith)];
    const auto n_heads = static_cast<int>(rows.heads.size());
    const int n_queries = target.layout.n_queries;
    row_sink sink(table, i_target, rows, ith);
    if (n_queries == 1) {  // the threads share its heads
        sink.begin_query(0);
        const int begin = n_heads * ith / nth;
        const int end = n_heads * (ith + 1) / nth;
        if (begin < end) write_query(op, node, target, rows, 0, begin, end, sink, scratch);
        return sink.end_query(nth);
    }
    // The threads take turns: rows of a causal model grow with their query.
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
        if (!op.is_flash && plan.kind() != op.kind) continue;
        if (const auto* const rows = plan.find(op.il)) write_target(op, node, i, *rows, ith, nth);
    }
}

void run_hidden_op(ggml_tensor* node, int ith, int, void* data) {
    if (ith != 0) return;
    const auto& op = *static_cast<const row_op*>(data);
    const ggml_tensor* const source = node->src[0];
    for (const auto& target : op.table->targets) {
        const int index = target.plan->find_hidden(op.il);
        if (index < 0 || !target.layout.has_hidden) continue;
        const auto n_embd = static_cast<std::size_t>(target.plan->n_embd());
        // The last layer keeps the queries whose logits are wanted alone: one of a prompt.
        const auto i_row =
            static_cast<std::size_t>(std::min<std::int64_t>(target.i_token, source->ne[1] - 1));
        std::memcpy(target.data + target.layout.hidden_offset +
                        static_cast<std::size_t>(index) * n_embd * sizeof(float),
                    bytes_of(source) + i_row * source->nb[1], n_embd * sizeof(float));
        op.table->n_rows_written.fetch_add(1, std::memory_order_relaxed);
    }
}

// The result is one float that nobody reads: rows leave through the table, not through ggml's memory.
ggml_tensor* make_node(ggml_context* tensors, std::vector<ggml_tensor*>& sources,
                       ggml_custom_op_t run, int n_tasks, row_op& op) {
    ggml_tensor* const node = ggml_custom_4d(tensors, GGML_TYPE_F32, 1, 1, 1, 1, sources.data(),
                                             static_cast<int>(sources.size()), run, n_tasks, &op);
    ggml_format_name(node, "kqview_rows-%d", op.il);
    return node;
}

void add_mask_and_sinks(std::vector<ggml_tensor*>& sources, const attention_site& site,
                        row_op& op) {
    if (site.mask) {
        op.i_mask = static_cast<int>(sources.size());
        sources.push_back(site.mask);
    }
    if (site.sinks) {
        op.i_sinks = static_cast<int>(sources.size());
        sources.push_back(site.sinks);
    }
}

void set_site(row_op& op, const attention_site& site) {
    op.il = site.il;
    op.n_head = site.n_head;
    op.n_head_kv = site.n_head_kv;
    op.scale = site.scale;
    op.max_bias = site.max_bias;
    op.softcap = site.softcap;
}

}  // namespace

ggml_tensor* make_flash_row_node(ggml_context* tensors, const attention_site& site, row_op& op) {
    set_site(op, site);
    op.is_flash = true;
    std::vector<ggml_tensor*> sources{site.q, site.k};
    add_mask_and_sinks(sources, site, op);
    return make_node(tensors, sources, run_row_op, GGML_N_TASKS_MAX, op);
}

ggml_tensor* make_plain_row_node(ggml_context* tensors, const attention_site& site, row_kind kind,
                                 row_op& op) {
    set_site(op, site);
    op.is_flash = false;
    op.kind = kind;
    std::vector<ggml_tensor*> sources{kind == row_kind::logits   ? site.kq
                                      : kind == row_kind::scores ? site.softmax->src[0]
                                                                 : site.softmax};
    // The softmax's result is final; its inputs still need the mask.
    if (kind != row_kind::probs) add_mask_and_sinks(sources, site, op);
    return make_node(tensors, sources, run_row_op, GGML_N_TASKS_MAX, op);
}

ggml_tensor* make_hidden_node(ggml_context* tensors, const hidden_site& site, row_op& op) {
    op.il = site.il;
    std::vector<ggml_tensor*> sources{site.output};
    return make_node(tensors, sources, run_hidden_op, 1, op);
}

}  // namespace kqview
