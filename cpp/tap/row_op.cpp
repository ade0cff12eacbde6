#include "tap/row_op.h"

#include <algorithm>
#include <cstring>

namespace kqview {

namespace {

const std::byte* bytes_of(const ggml_tensor* tensor) {
    return static_cast<const std::byte*>(tensor->data);
}

template <class value>
value* offset(std::byte* base, std::size_t n_bytes) {
    return reinterpret_cast<value*>(base + n_bytes);
}

mask_row mask_of(const row_op& op, const ggml_tensor* node, const row_target& target) {
    if (op.i_mask < 0) return {};
    const ggml_tensor* const mask = node->src[op.i_mask];
    const auto stream = static_cast<std::size_t>(target.i_stream % mask->ne[3]);
    const auto* const row = bytes_of(mask) + stream * mask->nb[3] +
                            static_cast<std::size_t>(target.i_query) * mask->nb[1];
    return read_mask(row, mask->type, target.n_columns);
}

const float* sink_of(const row_op& op, const ggml_tensor* node, int head) {
    return op.i_sinks < 0 ? nullptr : static_cast<const float*>(node->src[op.i_sinks]->data) + head;
}

// The part of the wanted heads that compute thread `ith` of `nth` does.
struct share {
    int begin;
    int end;
};
share share_of(std::size_t n, int ith, int nth) {
    const auto total = static_cast<int>(n);
    return {total * ith / nth, total * (ith + 1) / nth};
}

// Writes finished rows to the target, converting where it asked for float16.
class row_writer {
public:
    row_writer(const row_op& op, const row_target& target, const capture_plan::layer_rows& rows,
               row_scratch& scratch)
        : op_(op), target_(target), rows_(rows), scratch_(scratch) {
        const auto n_columns = static_cast<std::size_t>(target.n_columns);
        if (!is_direct() && scratch_.rows.size() < n_columns * max_heads_at_once) {
            scratch_.rows.resize(n_columns * max_heads_at_once);
        }
    }

    // Where to compute row `i_head` (index into the wanted heads); i_slot < max_heads_at_once.
    float* place(int i_head, int i_slot) {
        const auto n_columns = static_cast<std::size_t>(target_.n_columns);
        return is_direct() ? reinterpret_cast<float*>(destination(i_head))
                           : scratch_.rows.data() + static_cast<std::size_t>(i_slot) * n_columns;
    }

    void finish(int i_head, const float* row) {
        std::byte* const to = destination(i_head);
        if (!is_direct()) {
            ggml_fp32_to_fp16_row(row, reinterpret_cast<ggml_fp16_t*>(to), target_.n_columns);
        }
        auto& table = *op_.table;
        if (to == table.targets.front().data)
            table.first_write.store(to, std::memory_order_relaxed);
        table.n_rows_written.fetch_add(1, std::memory_order_relaxed);
    }

private:
    bool is_direct() const { return target_.plan->type() == row_type::f32; }
    std::byte* destination(int i_head) const {
        return target_.data + static_cast<std::size_t>(rows_.first_row + i_head) *
                                  static_cast<std::size_t>(target_.n_columns) *
                                  target_.plan->element_bytes();
    }

    const row_op& op_;
    const row_target& target_;
    const capture_plan::layer_rows& rows_;
    row_scratch& scratch_;
};

void write_flash_rows(const row_op& op, const ggml_tensor* node, const row_target& target,
                      const capture_plan::layer_rows& rows, int ith, int nth) {
    const ggml_tensor* const q = node->src[0];
    const ggml_tensor* const k = node->src[1];
    const auto [begin, end] = share_of(rows.heads.size(), ith, nth);
    if (begin == end || target.n_columns > k->ne[1]) return;
    auto& scratch = op.table->scratch[static_cast<std::size_t>(ith)];
    row_writer writer(op, target, rows, scratch);
    const auto mask = mask_of(op, node, target);
    const auto kind = target.plan->kind();
    const auto stream = static_cast<std::size_t>(target.i_stream);
    const int n_group = op.n_head / op.n_head_kv;
    const auto* const q_row =
        bytes_of(q) + stream * q->nb[3] + static_cast<std::size_t>(target.i_query) * q->nb[1];

    for (int i = begin; i < end;) {
        // A run of wanted heads that share a KV head reads its keys once.
        const int head_kv = rows.heads[static_cast<std::size_t>(i)] / n_group;
        const float* queries[max_heads_at_once];
        float* out[max_heads_at_once];
        int n = 0;
        while (n < max_heads_at_once && i + n < end) {
            const int head = rows.heads[static_cast<std::size_t>(i + n)];
            if (head / n_group != head_kv) break;
            queries[n] =
                reinterpret_cast<const float*>(q_row + static_cast<std::size_t>(head) * q->nb[2]);
            out[n] = writer.place(i + n, n);
            ++n;
        }
        const key_rows keys{
            bytes_of(k) + stream * k->nb[3] + static_cast<std::size_t>(head_kv) * k->nb[2],
            k->nb[1], k->type, static_cast<int>(k->ne[0]), static_cast<int>(k->ne[1])};
        dot_rows(keys, queries, n, target.n_columns, out, scratch);
        for (int j = 0; j < n; ++j) {
            const int head = rows.heads[static_cast<std::size_t>(i + j)];
            if (kind == row_kind::logits) {
                hide_masked(out[j], target.n_columns, mask);
            } else {
                const float slope = alibi_slope(op.max_bias, op.n_head, head);
                logits_to_scores(out[j], target.n_columns, {op.scale, op.softcap, slope}, mask);
                if (kind == row_kind::probs) {
                    scores_to_probs(out[j], target.n_columns, sink_of(op, node, head));
                }
            }
            writer.finish(i + j, out[j]);
        }
        i += n;
    }
}

void write_plain_rows(const row_op& op, const ggml_tensor* node, const row_target& target,
                      const capture_plan::layer_rows& rows, int ith, int nth) {
    const ggml_tensor* const source = node->src[0];
    const auto [begin, end] = share_of(rows.heads.size(), ith, nth);
    if (begin == end || target.n_columns > source->ne[0]) return;
    row_writer writer(op, target, rows, op.table->scratch[static_cast<std::size_t>(ith)]);
    const auto mask = mask_of(op, node, target);
    const auto* const base = bytes_of(source) +
                             static_cast<std::size_t>(target.i_stream) * source->nb[3] +
                             static_cast<std::size_t>(target.i_query) * source->nb[1];
    for (int i = begin; i < end; ++i) {
        const int head = rows.heads[static_cast<std::size_t>(i)];
        const auto* const from =
            reinterpret_cast<const float*>(base + static_cast<std::size_t>(head) * source->nb[2]);
        float* const row = writer.place(i, 0);
        std::memcpy(row, from, static_cast<std::size_t>(target.n_columns) * sizeof(float));
        if (op.kind == row_kind::logits) hide_masked(row, target.n_columns, mask);
        if (op.kind == row_kind::scores) {
            const float slope = alibi_slope(op.max_bias, op.n_head, head);
            logits_to_scores(row, target.n_columns, {op.scale, 0.0f, slope}, mask);
        }
        writer.finish(i, row);
    }
}

void run_row_op(ggml_tensor* node, int ith, int nth, void* data) {
    const auto& op = *static_cast<const row_op*>(data);
    for (const auto& target : op.table->targets) {
        if (!op.is_flash && target.plan->kind() != op.kind) continue;
        const auto* const rows = target.plan->find(op.il);
        if (!rows) continue;
        if (op.is_flash) {
            write_flash_rows(op, node, target, *rows, ith, nth);
        } else {
            write_plain_rows(op, node, target, *rows, ith, nth);
        }
    }
}

// The result is one float that nobody reads: rows leave through the table, not through ggml's memory.
ggml_tensor* make_node(ggml_context* tensors, std::vector<ggml_tensor*>& sources, row_op& op) {
    ggml_tensor* const node =
        ggml_custom_4d(tensors, GGML_TYPE_F32, 1, 1, 1, 1, sources.data(),
                       static_cast<int>(sources.size()), run_row_op, GGML_N_TASKS_MAX, &op);
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
    return make_node(tensors, sources, op);
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
    return make_node(tensors, sources, op);
}

}  // namespace kqview
