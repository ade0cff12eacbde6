// What a row_step means, in double and in plain loops: the fake device's row kernels, and what the
// real ones are to be like. Of keys it knows float32 and float16.
#pragma once

#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "tap/device/row_step.h"

namespace kqview::testing {

using values = std::vector<double>;

inline double element_of(const std::byte* from, std::size_t i, bool is_half) {
    if (is_half) return ggml_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t*>(from)[i]);
    return reinterpret_cast<const float*>(from)[i];
}

inline void put(std::byte* to, std::size_t i, double x, bool is_half) {
    if (!is_half) {
        reinterpret_cast<float*>(to)[i] = static_cast<float>(x);
        return;
    }
    constexpr double largest = 65504.0;
    if (std::isfinite(x)) x = std::clamp(x, -largest, largest);
    reinterpret_cast<ggml_fp16_t*>(to)[i] = ggml_fp32_to_fp16(static_cast<float>(x));
}

inline double slope_of(const row_layer& layer, int head) {
    if (layer.max_bias <= 0.0f) return 1.0;
    const int n = 1 << static_cast<int>(std::floor(std::log2(layer.n_head)));
    const double base = std::exp2(-(head < n ? layer.max_bias : layer.max_bias / 2.0) / n);
    return std::pow(base, head < n ? head + 1 : 2 * (head - n) + 1);
}

inline values row_of(const row_step& step, const row_form& form, const row_job& job,
                     const row_layer& layer, int head, const std::byte* saved) {
    constexpr double hidden = -std::numeric_limits<double>::infinity();
    const int kv = head / (layer.n_head / layer.n_head_kv);
    const auto stream = static_cast<std::uint64_t>(job.stream);
    const auto* const query = reinterpret_cast<const float*>(
        saved + layer.query + static_cast<std::uint64_t>(head) * layer.query_head_stride +
        stream * layer.query_stream_stride);
    values row(static_cast<std::size_t>(job.n_columns), hidden);
    for (int c = 0; c < std::min(job.n_columns, layer.n_cells); ++c) {
        const auto* const key = layer.keys + stream * layer.key_stream_stride +
                                static_cast<std::uint64_t>(kv) * layer.key_head_stride +
                                static_cast<std::uint64_t>(c) * layer.key_cell_stride;
        double x = 0.0, bias = 0.0;
        for (int d = 0; d < layer.n_dim; ++d)
            x += query[d] *
                 element_of(key, static_cast<std::size_t>(d), step.key_type == GGML_TYPE_F16);
        if (layer.mask != row_layer::nothing) {
            const auto* const mask = saved + layer.mask + stream * layer.mask_stream_stride;
            bias = element_of(mask, static_cast<std::size_t>(c), layer.mask_is_half != 0);
        }
        if (form.kind != row_form::logits) {
            x *= layer.scale;
            if (layer.softcap != 0.0f) x = layer.softcap * std::tanh(x / layer.softcap);
            x += slope_of(layer, head) * bias;
        }
        row[static_cast<std::size_t>(c)] = bias == hidden ? hidden : x;
    }
    if (form.kind != row_form::probs) return row;
    double most = *std::ranges::max_element(row), sum = 0.0;
    if (layer.sinks) most = std::max<double>(most, layer.sinks[head]);
    for (auto& x : row) sum += x = most == hidden ? 0.0 : std::exp(x - most);
    if (layer.sinks) sum += std::exp(layer.sinks[head] - most);
    for (auto& x : row) x = sum > 0.0 ? x / sum : 0.0;
    return row;
}

inline std::vector<values> reduced(std::vector<values> rows, const row_step& step,
                                   const row_form& form, const row_job& job) {
    if (form.reduce == row_form::none) return rows;
    std::vector<values> groups;
    for (int g = 0; g < job.n_groups; ++g) {
        const auto* const ends = step.numbers.data() + job.first_group + g;
        auto& total = groups.emplace_back(rows[static_cast<std::size_t>(ends[0])]);
        for (int r = ends[0] + 1; r < ends[1]; ++r) {
            for (std::size_t i = 0; i < total.size(); ++i) {
                const double x = rows[static_cast<std::size_t>(r)][i];
                total[i] = form.reduce == row_form::mean ? total[i] + x : std::max(total[i], x);
            }
        }
        if (form.reduce == row_form::mean)
            for (auto& x : total) x /= ends[1] - ends[0];
    }
    return groups;
}

inline void compute_rows(const row_step& step, const std::byte* saved, std::byte* memory) {
    for (const auto& launch : step.launches) {
        const auto& form = launch.form;
        const bool is_half = form.is_half != 0;
        for (auto j = launch.first_job; j < launch.first_job + launch.n_jobs; ++j) {
            const auto& job = step.jobs[j];
            std::vector<values> rows(static_cast<std::size_t>(job.n_rows));
            for (int i = job.first_item; i < job.first_item + job.n_items; ++i) {
                const auto& item = step.items[static_cast<std::size_t>(i)];
                for (int h = 0; h < item.n_heads; ++h) {
                    const int row = step.numbers[static_cast<std::size_t>(item.rows + h)];
                    if (row < 0) continue;
                    rows[static_cast<std::size_t>(row)] =
                        row_of(step, form, job, step.layers[static_cast<std::size_t>(item.layer)],
                               item.first_head + h, saved);
                }
            }
            rows = reduced(std::move(rows), step, form, job);
            auto* const out = job.block_out ? job.block_out : memory + job.out;
            auto* const positions = reinterpret_cast<std::int32_t*>(
                job.block_positions ? job.block_positions : memory + job.positions);
            std::size_t at = 0;
            for (const auto& row : rows) {
                const auto column_of = [&](std::int64_t cut) {
                    return std::min(static_cast<std::size_t>(cut), row.size());
                };
                std::vector<std::int32_t> order(row.size());
                std::iota(order.begin(), order.end(), 0);
                // As they are handed out: values that float32 cannot tell apart are equal.
                const auto value = [&](std::int32_t i) {
                    return static_cast<float>(row[static_cast<std::size_t>(i)]);
                };
                if (form.finish == row_form::top)
                    std::ranges::stable_sort(order,
                                             [&](int a, int b) { return value(a) > value(b); });
                for (int i = 0; i < job.n_values; ++i, ++at) {
                    double x = 0.0;
                    const auto index = static_cast<std::size_t>(i);
                    if (form.finish == row_form::whole) x = row[index];
                    if (form.finish == row_form::top) {
                        positions[at] = order[index];
                        x = row[static_cast<std::size_t>(order[index])];
                    }
                    if (form.finish == row_form::sums) {
                        const auto* const cuts = step.numbers.data() + job.first_cut;
                        const auto* const span = cuts + job.n_cuts + 2 * i;
                        if (span[0] < span[1]) {
                            x = std::accumulate(
                                row.begin() + static_cast<std::ptrdiff_t>(column_of(cuts[span[0]])),
                                row.begin() + static_cast<std::ptrdiff_t>(column_of(cuts[span[1]])),
                                0.0);
                        }
                    }
                    put(out, at, x, is_half);
                }
            }
        }
    }
    for (const auto& one : step.copies) std::memcpy(one.to, memory + one.from, one.n_bytes);
}

}  // namespace kqview::testing
