#include "tap/device/row_work.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/error.h"

namespace kqview {

namespace {

static_assert(max_top_k == max_kernel_top_k);

constexpr std::size_t alignment = 256;

std::size_t aligned(std::size_t n_bytes) {
    return (n_bytes + alignment - 1) / alignment * alignment;
}

std::size_t n_tiles_of(std::size_t n_columns) {
    return (n_columns + row_tile - 1) / static_cast<std::size_t>(row_tile);
}

row_form form_of(const capture_plan& plan) {
    row_form form;
    form.kind = plan.kind() == row_kind::logits   ? row_form::logits
                : plan.kind() == row_kind::scores ? row_form::scores
                                                  : row_form::probs;
    form.reduce = plan.reduce() == row_reduction::none ? row_form::none
                  : is_mean(plan.reduce())             ? row_form::mean
                                                       : row_form::max;
    form.finish = plan.top_k() > 0        ? row_form::top
                  : !plan.keeps_columns() ? row_form::sums
                                          : row_form::whole;
    form.is_half = plan.type() == row_type::f16 ? 1 : 0;
    return form;
}

}  // namespace

void row_work::add(int il, const row_layer& layer, int key_type) {
    index_of_[il] = static_cast<std::int32_t>(layers_.size());
    layers_.push_back(layer);
    key_type_ = key_type;
}

std::size_t row_work::bytes_for(const need& wanted) {
    const auto n_values = wanted.n_rows * wanted.n_columns;
    const auto n_top = wanted.n_rows * std::min<std::size_t>(max_top_k, wanted.n_columns);
    return aligned(n_values * sizeof(float)) +
           aligned(wanted.n_rows * n_tiles_of(wanted.n_columns) * 2 * sizeof(float)) +
           aligned(wanted.n_rows * 2 * sizeof(float)) +
           2 * aligned(wanted.n_layers * wanted.n_columns * sizeof(float)) +
           (wanted.has_half ? aligned(n_values * bytes_of(row_type::f16)) : 0) +
           2 * aligned(n_top * sizeof(float));
}

row_step row_work::step_of(std::span<const row_target> targets,
                           const std::function<bool(const void*)>& reaches) {
    row_step step;
    step.key_type = key_type_;
    step.layers = layers_;
    std::vector<std::pair<const row_target*, const plan_rows*>> wanted;
    std::vector<row_form> forms;
    for (const auto& target : targets) {
        const auto& rows = rows_of(target.plan);
        if (rows.job.n_rows == 0) continue;
        wanted.emplace_back(&target, &rows);
        if (std::ranges::find(forms, rows.form) == forms.end()) forms.push_back(rows.form);
    }
    for (const auto& form : forms) {  // jobs of one form are adjacent
        row_step::launch launch{form, step.jobs.size(), 0};
        for (const auto& [target, rows] : wanted) {
            if (rows->form == form) add_job(*target, *rows, reaches, step);
        }
        launch.n_jobs = step.jobs.size() - launch.first_job;
        step.launches.push_back(launch);
    }
    return step;
}

const row_work::plan_rows& row_work::rows_of(const std::shared_ptr<const capture_plan>& plan) {
    const auto found = std::ranges::find(known_, plan, &plan_rows::plan);
    if (found != known_.end()) return *found;
    constexpr std::size_t n_most = 256;  // more than a step has
    if (known_.size() == n_most) known_.pop_front();
    auto& rows = known_.emplace_back(plan_rows{plan, form_of(*plan), {}, {}, {}, {}});
    auto& job = rows.job;
    std::vector<std::int32_t> ends{0};
    for (const auto& of_layer : plan->layers()) {
        if (!of_layer.on_device || !holds(of_layer.il)) continue;
        add_items(of_layer, job.n_rows, rows);
        job.n_rows += static_cast<std::int32_t>(of_layer.heads.size());
        ends.push_back(job.n_rows);
        if (rows.form.reduce != row_form::none) {
            rows.places.push_back(static_cast<std::size_t>(of_layer.index));
            continue;
        }
        for (std::size_t i = 0; i < of_layer.heads.size(); ++i)
            rows.places.push_back(static_cast<std::size_t>(of_layer.first_row) + i);
    }
    job.n_items = static_cast<std::int32_t>(rows.items.size());
    if (plan->reduces_layers()) {
        rows.places = {0};
        ends = {0, job.n_rows};
    }
    auto& numbers = rows.numbers;
    if (rows.form.reduce != row_form::none) {
        job.first_group = static_cast<std::int32_t>(numbers.size());
        job.n_groups = static_cast<std::int32_t>(ends.size()) - 1;
        numbers.insert(numbers.end(), ends.begin(), ends.end());
    }
    const auto& [cuts, spans] = plan->spans();
    if (cuts.size() > max_row_cuts) throw error(errc::internal, "too many spans");
    job.first_cut = static_cast<std::int32_t>(numbers.size());
    job.n_cuts = static_cast<std::int32_t>(cuts.size());
    job.n_spans = static_cast<std::int32_t>(spans.size());
    numbers.insert(numbers.end(), cuts.begin(), cuts.end());
    for (const auto& one : spans) {
        numbers.push_back(static_cast<std::int32_t>(one.first));
        numbers.push_back(static_cast<std::int32_t>(one.last));
    }
    return rows;
}

void row_work::add_job(const row_target& target, const plan_rows& rows,
                       const std::function<bool(const void*)>& reaches, row_step& step) const {
    const auto& plan = *target.plan;
    const auto& layout = target.layout;
    const auto& form = rows.form;
    const auto& places = rows.places;
    if (layout.n_queries != 1 || target.i_query != n_queries_ - 1) {
        throw error(errc::internal, "the rows of a query are not in its step's graph");
    }
    auto job = rows.job;
    job.stream = target.i_stream;
    job.n_columns = layout.n_columns;
    job.n_tiles = static_cast<std::int32_t>(n_tiles_of(static_cast<std::size_t>(job.n_columns)));
    job.n_values = layout.n_values;
    const auto base = static_cast<std::int32_t>(step.numbers.size());
    job.first_item = static_cast<std::int32_t>(step.items.size());
    job.first_group += base;
    job.first_cut += base;
    step.numbers.insert(step.numbers.end(), rows.numbers.begin(), rows.numbers.end());
    step.items.insert(step.items.end(), rows.items.begin(), rows.items.end());
    for (auto i = static_cast<std::size_t>(job.first_item); i < step.items.size(); ++i)
        step.items[i].rows += base;

    const auto take = [&](std::size_t n_bytes) {
        const auto at = step.n_bytes;
        step.n_bytes += aligned(n_bytes);
        return at;
    };
    const auto n_rows = static_cast<std::size_t>(job.n_rows);
    const auto n_columns = static_cast<std::size_t>(job.n_columns);
    if (form.needs_values()) job.values = take(n_rows * n_columns * sizeof(float));
    if (form.kind == row_form::probs) {
        job.parts = take(n_rows * static_cast<std::size_t>(job.n_tiles) * 2 * sizeof(float));
        job.joined = take(n_rows * 2 * sizeof(float));
    }
    if (form.reduce != row_form::none && form.finish != row_form::whole) {
        job.reduced = take(static_cast<std::size_t>(job.n_groups) * n_columns * sizeof(float));
    }
    const auto row_bytes = static_cast<std::size_t>(layout.n_values) * plan.element_bytes();
    const auto position_bytes = static_cast<std::size_t>(layout.n_values) * sizeof(std::int32_t);
    auto* const positions = target.data + layout.positions_offset;
    const bool has_positions = form.finish == row_form::top;
    const bool is_small = form.finish != row_form::whole || form.reduce != row_form::none;
    const bool is_one_run =
        places.back() - places.front() + 1 == places.size() && std::ranges::is_sorted(places);
    if (is_small && is_one_run && reaches(target.data)) {
        job.block_out = target.data + places.front() * row_bytes;
        if (has_positions) job.block_positions = positions + places.front() * position_bytes;
    } else {
        const bool is_in_place = form.kind == row_form::probs && !is_small && form.is_half == 0;
        job.out = is_in_place ? job.values : take(places.size() * row_bytes);
        if (has_positions) job.positions = take(places.size() * position_bytes);
        for (std::size_t i = 0; i < places.size();) {
            auto last = i + 1;
            while (last < places.size() && places[last] == places[last - 1] + 1) ++last;
            step.copies.push_back({job.out + i * row_bytes, target.data + places[i] * row_bytes,
                                   (last - i) * row_bytes});
            if (has_positions) {
                step.copies.push_back({job.positions + i * position_bytes,
                                       positions + places[i] * position_bytes,
                                       (last - i) * position_bytes});
            }
            i = last;
        }
    }
    step.jobs.push_back(job);
}

// Heads that share a KV head, as far as they are wanted.
void row_work::add_items(const capture_plan::layer_rows& wanted, std::int32_t first_row,
                         plan_rows& to) const {
    const auto index = index_of_.at(wanted.il);
    const auto& layer = layers_[static_cast<std::size_t>(index)];
    std::vector<std::int32_t> row_of(static_cast<std::size_t>(layer.n_head), -1);
    for (std::size_t i = 0; i < wanted.heads.size(); ++i) {
        const auto head = static_cast<std::size_t>(wanted.heads[i]);
        const auto row = first_row + static_cast<std::int32_t>(i);
        if (row_of[head] >= 0) {
            add_item(index, head, std::span(&row, 1), to);  // listed once more
        } else {
            row_of[head] = row;
        }
    }
    const int n_group = layer.n_head / layer.n_head_kv;
    const int n_at_once = heads_at_once(std::ranges::max(layers_, {}, &row_layer::n_dim).n_dim);
    for (int kv = 0; kv < layer.n_head_kv; ++kv) {
        for (int first = kv * n_group; first < (kv + 1) * n_group; first += n_at_once) {
            const auto begin = row_of.begin() + first;
            const auto end = row_of.begin() + std::min(first + n_at_once, (kv + 1) * n_group);
            const auto is_wanted = [](std::int32_t row) { return row >= 0; };
            const auto from = std::find_if(begin, end, is_wanted);
            if (from == end) continue;
            auto last = end;
            while (!is_wanted(*(last - 1))) --last;
            add_item(index, static_cast<std::size_t>(from - row_of.begin()), {from, last}, to);
        }
    }
}

void row_work::add_item(std::int32_t layer, std::size_t first_head,
                        std::span<const std::int32_t> rows, plan_rows& to) {
    to.items.push_back({layer, static_cast<std::int32_t>(first_head),
                        static_cast<std::int32_t>(rows.size()),
                        static_cast<std::int32_t>(to.numbers.size())});
    to.numbers.insert(to.numbers.end(), rows.begin(), rows.end());
}

}  // namespace kqview
