#include "tap/host/operands.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kqview {

namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

const std::byte* part_of(const ggml_tensor* tensor, const operand_strides& strides, int token,
                         int head, int stream) {
    return static_cast<const std::byte*>(tensor->data) +
           static_cast<std::size_t>(token) * strides.token +
           static_cast<std::size_t>(head) * strides.head +
           static_cast<std::size_t>(stream) * strides.stream;
}

}  // namespace

query_place place_of(const attention_site& site, int i_query, int i_stream) {
    // One of the two is 0: a batch is queries of one stream, or a query each of several.
    if (site.has_stream_per_query) return {0, i_query + i_stream};
    return {i_query, i_stream};
}

const float* query_of(const row_op& op, const ggml_tensor* node, query_place query, int head) {
    return reinterpret_cast<const float*>(
        part_of(node->src[0], op.site.q_strides, query.token, head, query.stream));
}

mask_row mask_of(const row_op& op, const ggml_tensor* node, query_place query, int head_kv,
                 int first, int n_cells) {
    if (op.i_mask < 0) return {};
    const ggml_tensor* const mask = node->src[op.i_mask];
    const auto* const row = part_of(mask, op.site.mask_strides, query.token, head_kv, query.stream);
    return read_mask(row + static_cast<std::size_t>(first) * ggml_type_size(mask->type), mask->type,
                     n_cells);
}

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

void scatter(const attention_site& site, const seen_keys& seen, row_kind kind, const float* from,
             float* to, int n_columns) {
    const float hidden = kind == row_kind::probs ? 0.0f : minus_infinity;
    std::fill_n(to, n_columns, hidden);
    for (int i = 0; i < site.n_cells; ++i) {
        if (from[i] == hidden) continue;  // a masked place may name any cell
        const int column = seen.gathered[i] / site.rows_per_cell % site.n_cells_max;
        if (column < n_columns) to[column] = from[i];
    }
}

}  // namespace kqview
