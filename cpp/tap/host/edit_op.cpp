#include "tap/host/edit_op.h"

#include <ggml-backend.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <vector>

#include "tap/hook_channel.h"
#include "tap/host/row_kernel.h"
#include "tap/plan.h"

namespace kqview {

namespace {

std::size_t zu(std::int64_t n) { return static_cast<std::size_t>(n); }

// ---- what a layer has of each token

void apply(const output_edit& edit, int position, float* row, std::size_t n_embd) {
    const auto* const values = edit.at(position, n_embd);
    if (!values) return;
    if (edit.replaces) {
        std::copy_n(values, n_embd, row);
    } else {
        for (std::size_t i = 0; i < n_embd; ++i) row[i] += values[i];
    }
}

// The row of a layer's output that belongs to a token, and the token's position.
struct edited_row {
    float* values;
    int position;
};

void ask_hook(const hook_lease& hook, int il, std::span<const edited_row> rows,
              std::size_t n_embd) {
    if (rows.empty()) return;
    std::vector<float> all;
    all.reserve(rows.size() * n_embd);
    for (const auto& row : rows) all.insert(all.end(), row.values, row.values + n_embd);
    // What fails is kept by the channel.
    if (!hook.channel->ask(il, static_cast<int>(rows.size()), all)) return;
    for (std::size_t i = 0; i < rows.size(); ++i)
        std::copy_n(all.data() + i * n_embd, n_embd, rows[i].values);
}

void edit_with_hooks(const std::vector<output_edit>& edits, int il,
                     std::span<const edited_row> rows, std::size_t n_embd) {
    for (const auto& edit : edits) {
        if (edit.hook) {
            ask_hook(*edit.hook, il, rows, n_embd);
        } else {
            for (const auto& row : rows) apply(edit, row.position, row.values, n_embd);
        }
    }
}

void run_output_edit(ggml_tensor* node, int ith, int nth, void* data) {
    const auto& op = *static_cast<const edit_op*>(data);
    const ggml_tensor* const output = node->src[0];
    const auto n_embd = zu(output->ne[0]);
    for (const auto& run : op.table->runs) {
        const auto* const of_layer = run.plan->find(op.il);
        if (!of_layer || of_layer->outputs[op.point].empty()) continue;
        const auto& edits = of_layer->outputs[op.point];
        // end_step reports what was not edited
        if (output->ne[1] != op.table->n_tokens && output->ne[1] != op.table->n_outputs) continue;
        const auto for_rows = [&](int first, int step, const auto& use) {
            for (int i = first; i < run.n_tokens; i += step) {
                const auto i_row = op.table->row_of(output, run.i_token + i);
                if (i_row < 0) continue;
                auto* const row = static_cast<std::byte*>(output->data) + zu(i_row) * output->nb[1];
                use(edited_row{reinterpret_cast<float*>(row), run.position + i});
            }
        };
        if (!of_layer->has_hook(op.point)) {
            for_rows(ith, nth, [&](const edited_row& row) {
                for (const auto& edit : edits) apply(edit, row.position, row.values, n_embd);
            });
        } else if (ith == 0) {
            // A hook sees all rows at once, with the edits before it, so one thread does the work.
            try {
                std::vector<edited_row> rows;
                for_rows(0, 1, [&](const edited_row& row) { rows.push_back(row); });
                edit_with_hooks(edits, op.il, rows, n_embd);
            } catch (const std::bad_alloc&) {  // must not cross ggml
                continue;
            }
        }
        if (ith == 0) op.table->n_done.fetch_add(1, std::memory_order_relaxed);
    }
}

// ---- heads

// What heads give out. Flash attention leaves ne=[n_value, n_head, n_tokens, n_stream], the product
// of probabilities and values ne=[n_value, n_tokens, n_head, n_stream].
struct head_outputs {
    const edit_op& op;
    const ggml_tensor* tensor;
    const edited_run& run;

    int n_values() const { return static_cast<int>(tensor->ne[0]); }
    float* of(int i_token, int head) const {
        const bool is_flash = op.site.flash != nullptr;
        return reinterpret_cast<float*>(static_cast<std::byte*>(tensor->data) +
                                        zu(run.i_stream) * tensor->nb[3] +
                                        zu(run.i_query + i_token) * tensor->nb[is_flash ? 2 : 1] +
                                        zu(head) * tensor->nb[is_flash ? 1 : 2]);
    }
};

// What float16 holds, in which products with F16 weights read them: an infinite value would reach
// the cache and stay there, hidden from other requests but not from their sums.
constexpr float most_of_head = 6e4f;

void edit_heads_of(const layer_edits& edits, const head_outputs& outputs, int i_token) {
    const auto n = zu(outputs.n_values());
    for (const auto& one : edits.set_heads) {
        if (const auto* const values = one.at(outputs.run.position + i_token, n))
            std::copy_n(values, n, outputs.of(i_token, one.head));
    }
    for (const auto& one : edits.heads) {
        auto* const values = outputs.of(i_token, one.head);
        for (std::size_t j = 0; j < n; ++j)
            values[j] = std::clamp(values[j] * one.factor, -most_of_head, most_of_head);
    }
}

void record_heads(head_record::layer& record, const head_outputs& outputs) {
    const auto& run = outputs.run;
    record.n_head = outputs.op.site.n_head;
    record.n_value = outputs.n_values();
    const auto row = zu(record.n_head) * zu(record.n_value);
    record.values.resize(std::max(record.values.size(), zu(run.position + run.n_tokens) * row));
    for (int i = 0; i < run.n_tokens; ++i) {
        auto* to = record.values.data() + zu(run.position + i) * row;
        for (int head = 0; head < record.n_head; ++head, to += record.n_value)
            std::copy_n(outputs.of(i, head), zu(record.n_value), to);
    }
}

void run_head_edit(ggml_tensor* node, int ith, int nth, void* data) {
    const auto& op = *static_cast<const edit_op*>(data);
    for (const auto& run : op.table->runs) {
        if (!run.plan->acts_on_heads(op.il)) continue;
        const head_outputs outputs{op, node->src[0], run};
        const auto* const edits = run.plan->find(op.il);
        // A record is written by one thread, behind its own edits.
        const auto& record = run.plan->record;
        const bool is_recorded = record && record->layers.contains(op.il);
        if (is_recorded && ith != 0) continue;
        for (int i = ith; edits && i < run.n_tokens; i += is_recorded ? 1 : nth)
            edit_heads_of(*edits, outputs, i);
        if (ith != 0) continue;
        try {
            if (is_recorded) record_heads(record->layers.at(op.il), outputs);
        } catch (const std::bad_alloc&) {  // as above
            continue;
        }
        op.table->n_done.fetch_add(1, std::memory_order_relaxed);
    }
}

// Like a node that reads rows, it has a result that nothing reads.
ggml_tensor* make_node(ggml_context* tensors, ggml_tensor* source, ggml_custom_op_t run,
                       edit_op& op) {
    ggml_tensor* const node =
        ggml_custom_4d(tensors, GGML_TYPE_F32, 1, 1, 1, 1, &source, 1, run, GGML_N_TASKS_MAX, &op);
    ggml_format_name(node, "kqview_edit-%d", op.il);
    return node;
}

// ---- masks

float read(const std::byte* cell, ggml_type type) {
    if (type == GGML_TYPE_F32) {
        float value;
        std::memcpy(&value, cell, sizeof value);
        return value;
    }
    ggml_fp16_t value;
    std::memcpy(&value, cell, sizeof value);
    return ggml_fp16_to_fp32(value);
}

void write(float value, std::byte* cell, ggml_type type) {
    if (type == GGML_TYPE_F32) {
        std::memcpy(cell, &value, sizeof value);
    } else {
        const auto half = ggml_fp32_to_fp16(value);
        std::memcpy(cell, &half, sizeof half);
    }
}

bool acts_on(const score_bias& edit, int head) {
    return edit.heads.empty() || std::ranges::find(edit.heads, head) != edit.heads.end();
}

// Adds biases to one query's row of a mask. `head`: whose row it is, -1 for that of all heads;
// `slope`: what the head multiplies its mask with.
void add_biases(const std::vector<score_bias>& biases, int position, int head, float slope,
                std::byte* row, const ggml_tensor* mask) {
    const auto n_bytes = ggml_type_size(mask->type);
    for (const auto& one : biases) {
        if (position < one.queries.start || position >= one.queries.stop) continue;
        if (head >= 0 && !acts_on(one, head)) continue;
        const bool hides = one.bias == -std::numeric_limits<float>::infinity();
        for (const auto& keys : one.keys) {
            const int stop = std::min(keys.stop, static_cast<int>(mask->ne[0]));
            for (int i = keys.start; i < stop; ++i) {
                if (hides && i == position) continue;
                auto* const cell = row + zu(i) * n_bytes;
                write(read(cell, mask->type) + one.bias / slope, cell, mask->type);
            }
        }
    }
}

const edited_run* run_at(const edit_table& table, int stream, int query) {
    for (const auto& run : table.runs) {
        if (run.i_stream == stream && query >= run.i_query && query < run.i_query + run.n_tokens)
            return &run;
    }
    return nullptr;
}

void run_mask_edit(ggml_tensor* node, int ith, int nth, void* data) {
    const auto& op = *static_cast<const edit_op*>(data);
    const ggml_tensor* const mask = node->src[0];
    const auto n_bytes = zu(mask->ne[0]) * ggml_type_size(mask->type);
    const bool by_head = op.site.heads_per_mask > 0;
    const auto [n_cells, n_queries, n_parts, n_streams] = node->ne;
    for (std::int64_t i = ith; i < n_queries * n_streams; i += nth) {
        const auto query = i % n_queries, stream = i / n_queries;
        const auto* const from = static_cast<const std::byte*>(mask->data) +
                                 zu(query) * mask->nb[1] + zu(stream) * mask->nb[3];
        auto* to = static_cast<std::byte*>(node->data) + zu(query) * node->nb[1] +
                   zu(stream) * node->nb[3];
        const auto* const run =
            run_at(*op.table, static_cast<int>(stream), static_cast<int>(query));
        const auto* const edits = run ? run->plan->find(op.il) : nullptr;
        for (int part = 0; part < n_parts; ++part, to += node->nb[2]) {
            std::memcpy(to, from, n_bytes);
            if (!edits) continue;
            const float slope =
                by_head ? alibi_slope(op.site.max_bias, op.site.n_head, part) : 1.0f;
            const int position = run->position + static_cast<int>(query) - run->i_query;
            add_biases(edits->biases, position, by_head ? part : -1, slope, to, node);
        }
    }
    if (ith != 0) return;
    for (const auto& run : op.table->runs) {
        const auto* const edits = run.plan->find(op.il);
        if (edits && !edits->biases.empty())
            op.table->n_done.fetch_add(1, std::memory_order_relaxed);
    }
}

}  // namespace

void edit_table::begin(std::span<const step_token> tokens) {
    runs.clear();
    n_done.store(0, std::memory_order_relaxed);
    if (std::ranges::none_of(tokens, [](const step_token& one) { return one.edits != nullptr; }))
        return;
    n_tokens = static_cast<int>(tokens.size());
    n_outputs = 0;
    output_of.clear();
    int i_first = 0;  // token of the slot
    for (int i = 0; i < n_tokens; ++i) {
        const auto& token = tokens[zu(i)];
        output_of.push_back(token.wants_logits ? n_outputs++ : -1);
        if (token.slot != tokens[zu(i_first)].slot) i_first = i;
        if (!token.edits) continue;
        if (i == i_first) {
            runs.push_back(
                {token.edits, i, 1, token.position, token.slot - tokens.front().slot, 0});
        } else {
            ++runs.back().n_tokens;
        }
    }
}

int edit_table::n_due() const {
    int n = 0;
    for (const auto& run : runs) {
        for (const auto& [il, edits] : run.plan->layers) {
            for (const auto point : edit_points) n += !edits.outputs[point].empty();
            n += run.plan->acts_on_heads(il) + !edits.biases.empty();
        }
    }
    return n;
}

// The last layer keeps only the tokens whose logits are wanted.
std::int64_t edit_table::row_of(const ggml_tensor* output, int i_token) const {
    return output->ne[1] == n_tokens ? i_token : output_of[zu(i_token)];
}

ggml_tensor* make_output_edit(ggml_context* tensors, ggml_tensor* output, edit_op& op) {
    return make_node(tensors, output, run_output_edit, op);
}

void edit_heads(const edit_op& op, ggml_tensor* outputs, int stream, int first, int end) {
    for (const auto& run : op.table->runs) {
        if (run.i_stream != stream || !run.plan->acts_on_heads(op.il)) continue;
        const head_outputs of_run{op, outputs, run};
        const auto& edits = *run.plan->find(op.il);
        const int run_end = run.i_query + run.n_tokens;
        for (int i = std::max(first, run.i_query); i < std::min(end, run_end); ++i)
            edit_heads_of(edits, of_run, i - run.i_query);
        if (first < run_end && run_end <= end)
            op.table->n_done.fetch_add(1, std::memory_order_relaxed);
    }
}

ggml_tensor* make_head_edit(ggml_context* tensors, const attention_site& site, edit_op& op) {
    op.il = site.il;
    op.site = site;
    return make_node(tensors, site.output, run_head_edit, op);
}

ggml_tensor* make_mask_edit(ggml_context* tensors, attention_site& site, bool by_head,
                            edit_op& op) {
    ggml_tensor* mask = site.mask;
    site.heads_per_mask = by_head ? 1 : 0;
    op.il = site.il;
    op.site = site;
    ggml_tensor* const node =
        ggml_custom_4d(tensors, mask->type, mask->ne[0], mask->ne[1], by_head ? site.n_head : 1,
                       mask->ne[3], &mask, 1, run_mask_edit, GGML_N_TASKS_MAX, &op);
    ggml_format_name(node, "kqview_mask-%d", site.il);
    site.mask_operand() = node;
    site.mask = node;
    site.mask_strides = {node->nb[1], by_head ? node->nb[2] : 0,
                         node->ne[3] == 1 ? 0 : node->nb[3]};
    return node;
}

void edit_mask(ggml_tensor* mask, const edit_table& table) {
    const bool is_host = ggml_backend_buffer_is_host(mask->buffer);
    std::vector<std::byte> copy(is_host ? 0 : mask->nb[1]);
    for (const auto& run : table.runs) {
        if (run.plan->biases.empty()) continue;
        for (int i = 0; i < run.n_tokens; ++i) {
            const auto offset = zu(mask->ne[3] == 1 ? 0 : run.i_stream) * mask->nb[3] +
                                zu(run.i_query + i) * mask->nb[1];
            auto* row = static_cast<std::byte*>(mask->data) + offset;
            if (!is_host) {
                ggml_backend_tensor_get(mask, copy.data(), offset, copy.size());
                row = copy.data();
            }
            add_biases(run.plan->biases, run.position + i, -1, 1.0f, row, mask);
            if (!is_host) ggml_backend_tensor_set(mask, copy.data(), offset, copy.size());
        }
    }
}

}  // namespace kqview
