#include "tap/device/edit_nodes.h"

#include <ggml-backend.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>
#include "tap/plan.h"

namespace kqview {

namespace {

std::size_t zu(std::int64_t n) { return static_cast<std::size_t>(n); }

ggml_tensor* new_input(ggml_context* tensors, const ggml_tensor* like, std::int64_t n_row, int il) {
    auto* const input =
        ggml_new_tensor_4d(tensors, GGML_TYPE_F32, n_row, like->ne[1], like->ne[2], like->ne[3]);
    ggml_format_name(input, "kqview_edit_input-%d", il);
    ggml_set_input(input);
    return input;
}

void upload(const std::vector<float>& values, ggml_tensor* to) {
    if (to) ggml_backend_tensor_set(to, values.data(), 0, values.size() * sizeof(float));
}

}  // namespace

device_edit::device_edit(ggml_cgraph* graph, ggml_context* tensors, hidden_site& site,
                         std::vector<placed_node>& placed)
    : il_(site.il), of_heads_(false), output_(site.output) {
    values_ = new_input(tensors, output_, output_->ne[0], il_);
    add(graph, tensors, site.output, placed);
}

device_edit::device_edit(ggml_cgraph* graph, ggml_context* tensors, attention_site& site, bool sets,
                         std::vector<placed_node>& placed)
    : il_(site.il), of_heads_(true), is_flash_(site.flash != nullptr), output_(site.output) {
    if (sets) values_ = new_input(tensors, output_, output_->ne[0], il_);
    add(graph, tensors, site.output, placed);
}

void device_edit::add(ggml_cgraph* graph, ggml_context* tensors, ggml_tensor*& output,
                      std::vector<placed_node>& placed) {
    factors_ = new_input(tensors, output_, 1, il_);
    auto* const anchor = output;
    output = ggml_mul(tensors, anchor, factors_);
    ggml_format_name(output, "kqview_edit-%d", il_);
    placed.push_back({anchor, output});
    if (values_) {
        output = ggml_add(tensors, output, values_);
        ggml_format_name(output, "kqview_edited-%d", il_);
        placed.push_back({anchor, output});
    }
    replace_for_readers(graph, anchor, output);
}

// What edits make of x is x * factor + value.
void device_edit::fill_rows(const edited_run& run, const edit_table& table, operands& to) const {
    const auto n_embd = zu(output_->ne[0]);
    for (int i = 0; i < run.n_tokens; ++i) {
        const auto row = table.row_of(output_, run.i_token + i);
        if (row < 0) continue;
        auto* const values = to.values.data() + zu(row) * n_embd;
        for (const auto& edit : run.plan->find(il_)->outputs[edit_point::residual]) {
            const auto* const given = edit.at(run.position + i, n_embd);
            if (!given) continue;
            if (edit.replaces) {
                to.factors[zu(row)] = 0.0f;
                std::fill_n(values, n_embd, 0.0f);
            }
            for (std::size_t j = 0; j < n_embd; ++j) values[j] += given[j];
        }
    }
}

void device_edit::fill_heads(const edited_run& run, operands& to) const {
    const auto n_value = zu(output_->ne[0]);
    for (int i = 0; i < run.n_tokens; ++i) {
        const auto row_of = [&](int head) {
            const int query = run.i_query + i;
            const auto [fast, slow] = is_flash_ ? std::pair(head, query) : std::pair(query, head);
            return (zu(run.i_stream) * zu(output_->ne[2]) + zu(slow)) * zu(output_->ne[1]) +
                   zu(fast);
        };
        const auto& edits = *run.plan->find(il_);
        for (const auto& one : edits.set_heads) {
            const auto* const given = one.at(run.position + i, n_value);
            if (!given) continue;
            to.factors[row_of(one.head)] = 0.0f;
            std::copy_n(given, n_value, to.values.data() + row_of(one.head) * n_value);
        }
        for (const auto& one : edits.heads) {
            to.factors[row_of(one.head)] *= one.factor;
            if (!values_) continue;
            auto* const values = to.values.data() + row_of(one.head) * n_value;
            for (std::size_t j = 0; j < n_value; ++j) values[j] *= one.factor;
        }
    }
}

void device_edit::fill(edit_table& table) const {
    operands to{std::vector<float>(zu(ggml_nelements(factors_)), 1.0f),
                std::vector<float>(values_ ? zu(ggml_nelements(values_)) : 0, 0.0f)};
    for (const auto& run : table.runs) {
        const auto* const edits = run.plan->find(il_);
        if (!edits) continue;
        if (of_heads_ ? !edits->acts_on_heads() : edits->outputs[edit_point::residual].empty())
            continue;
        if (of_heads_) {
            fill_heads(run, to);
        } else {
            // end_step reports what was not edited
            const auto n_rows = output_->ne[1];
            if (n_rows != table.n_tokens && n_rows != table.n_outputs) continue;
            fill_rows(run, table, to);
        }
        table.n_done.fetch_add(1, std::memory_order_relaxed);
    }
    upload(to.factors, factors_);
    upload(to.values, values_);
}

}  // namespace kqview
