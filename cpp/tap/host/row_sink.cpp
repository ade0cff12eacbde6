#include "tap/host/row_sink.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "tap/host/vectors.h"

namespace kqview {

namespace {

using namespace vectors;

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// The finite float16 nearest to `value`; masked values stay -inf.
float within_f16(float value) {
    if (value == minus_infinity) return value;
    const float low = value < -largest_f16 ? -largest_f16 : value;
    return low > largest_f16 ? largest_f16 : low;
}

using ranked = std::pair<float, std::int32_t>;  // value, column

// Larger values first, and the earlier column among equals.
bool ranks_before(const ranked& a, const ranked& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
}

constexpr int n_of_block = 32;
static_assert(n_of_block % lanes == 0);

// NaN is never the largest.
float largest_of_block(const float* block, int n) {
    vec most = spread(minus_infinity);
    int c = 0;
    for (; c + lanes <= n; c += lanes) {
        const vec x = load(block + c);
        most = x > most ? x : most;
    }
    float largest = largest_of(most);
    for (; c < n; ++c) largest = block[c] > largest ? block[c] : largest;
    return largest;
}

// The k <= n_columns largest values of a row, best first, into `best`. None of them is below the
// k-th largest of the maxima of blocks of columns; few others are not.
void select_top(const float* row, int n_columns, std::size_t k, std::vector<float>& maxima,
                std::vector<ranked>& best) {
    best.clear();
    maxima.clear();
    for (int c = 0; c < n_columns; c += n_of_block)
        maxima.push_back(largest_of_block(row + c, std::min(n_of_block, n_columns - c)));
    const auto n_blocks = maxima.size();
    float least = minus_infinity;
    if (n_blocks >= k) {
        maxima.resize(2 * n_blocks);
        const auto copies =
            std::copy_n(maxima.begin(), n_blocks, maxima.begin() + n_blocks) - n_blocks;
        const auto kth = copies + (k - 1);
        std::nth_element(copies, kth, maxima.end(), std::greater<>());
        least = *kth;
    }
    for (std::size_t i = 0; i < n_blocks; ++i) {
        if (maxima[i] < least) continue;
        const int first = static_cast<int>(i) * n_of_block;
        for (int c = first; c < std::min(first + n_of_block, n_columns); ++c)
            if (!(row[c] < least)) best.emplace_back(row[c], c);
    }
    // By a heap, which stays within its bounds even where a value is NaN.
    std::partial_sort(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(k), best.end(),
                      ranks_before);
}

// In double, so that a span of thousands of columns loses nothing.
double sum_of(const float* row, int n_columns) {
    constexpr int n_lanes = 8;
    double lanes[n_lanes] = {};
    int c = 0;
    for (; c + n_lanes <= n_columns; c += n_lanes) {
        for (int i = 0; i < n_lanes; ++i) lanes[i] += static_cast<double>(row[c + i]);
    }
    for (; c < n_columns; ++c) lanes[0] += static_cast<double>(row[c]);
    return std::accumulate(lanes, lanes + n_lanes, 0.0);
}

}  // namespace

void write_f16(const float* values, std::size_t n, ggml_fp16_t* to) {
    constexpr std::size_t n_at_once = 256;
    float part[n_at_once];
    for (std::size_t first = 0; first < n; first += n_at_once) {
        const auto n_part = std::min(n - first, n_at_once);
        for (std::size_t i = 0; i < n_part; ++i) part[i] = within_f16(values[first + i]);
        ggml_fp32_to_fp16_row(part, to + first, static_cast<std::int64_t>(n_part));
    }
}

void row_table::prepare_reductions() {
    while (reductions.size() < targets.size()) reductions.emplace_back();
    for (std::size_t i = 0; i < targets.size(); ++i) {
        const auto& plan = *targets[i].plan;
        if (plan.reduce() == row_reduction::none) continue;
        auto& shared = reductions[i];
        const auto n_columns = static_cast<std::size_t>(targets[i].layout.n_columns);
        const auto n_queries = static_cast<std::size_t>(targets[i].layout.n_queries);
        shared.n_arrived.store(0, std::memory_order_relaxed);
        if (n_queries == 1) shared.partials.resize(scratch.size() * n_columns);
        if (plan.reduces_layers()) {
            shared.totals.resize(n_queries * n_columns);
            shared.n_layers_added.assign(n_queries, 0);
        }
    }
}

row_sink::row_sink(row_table& table, std::size_t i_target, const capture_plan::layer_rows& rows,
                   int ith)
    : table_(table),
      target_(table.targets[i_target]),
      shared_(table.reductions[i_target]),
      plan_(*target_.plan),
      rows_(rows),
      scratch_(table.scratch[static_cast<std::size_t>(ith)]),
      is_first_target_(i_target == 0),
      ith_(ith) {
    if (plan_.is_plain()) return;
    const auto n_lanes = static_cast<std::size_t>(max_heads_at_once + 1);  // the last: sums
    if (scratch_.rows.size() < n_columns() * n_lanes) scratch_.rows.resize(n_columns() * n_lanes);
}

void row_sink::begin_query(int i_query) {
    i_query_ = i_query;
    n_summed_ = 0;
    if (!is_reduced()) return;
    sum_ = target_.layout.n_queries == 1
               ? shared_.partials.data() + static_cast<std::size_t>(ith_) * n_columns()
               : scratch_.rows.data() + max_heads_at_once * n_columns();
}

std::size_t row_sink::index_of(int i_row) const {
    const auto& layout = target_.layout;
    return (static_cast<std::size_t>(i_row) * static_cast<std::size_t>(layout.n_queries) +
            static_cast<std::size_t>(i_query_)) *
           static_cast<std::size_t>(layout.n_values);
}

float* row_sink::place(int i_head, int i_lane) {
    if (!plan_.is_plain())
        return scratch_.rows.data() + static_cast<std::size_t>(i_lane) * n_columns();
    return reinterpret_cast<float*>(target_.data) + index_of(rows_.first_row + i_head);
}

void row_sink::finish(int i_head, const float* row) {
    if (is_reduced()) {
        if (n_summed_++ == 0) {
            std::memcpy(sum_, row, n_columns() * sizeof(float));
        } else {
            add(sum_, row);
        }
        return;
    }
    if (plan_.is_plain()) return count(reinterpret_cast<const std::byte*>(row));
    write(rows_.first_row + i_head, row);
}

void row_sink::finish_sums(int i_head, std::span<const double> segments) {
    write_sums(rows_.first_row + i_head, segments);
}

void row_sink::end_query(int nth) {
    if (!is_reduced()) return;
    if (target_.layout.n_queries > 1 || nth == 1) return finish_layer(sum_);
    // The last thread to arrive adds up all partial results; a thread's share may be empty.
    const int n_arrived = shared_.n_arrived.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (n_arrived < nth) return;
    shared_.n_arrived.store(0, std::memory_order_relaxed);
    const auto n_heads = static_cast<int>(rows_.heads.size());
    float* const first = shared_.partials.data();
    bool is_filled = false;
    for (int i = 0; i < nth; ++i) {
        if (n_heads * i / nth == n_heads * (i + 1) / nth) continue;
        const float* const part = first + static_cast<std::size_t>(i) * n_columns();
        if (is_filled) {
            add(first, part);
        } else if (part != first) {
            std::memcpy(first, part, n_columns() * sizeof(float));
        }
        is_filled = true;
    }
    finish_layer(first);
}

// `row` holds the sum or the maximum over the heads of this layer.
void row_sink::finish_layer(float* row) {
    if (!plan_.reduces_layers()) {
        if (is_mean(plan_.reduce())) scale(row, 1.0f / static_cast<float>(rows_.heads.size()));
        return write(rows_.index, row);
    }
    finish_layers(row, 1);
}

void row_sink::finish_layers(const float* row, int n_layers) {
    const auto i = static_cast<std::size_t>(i_query_);
    float* const total = shared_.totals.data() + i * n_columns();
    if (shared_.n_layers_added[i] == 0) {
        std::memcpy(total, row, n_columns() * sizeof(float));
    } else {
        add(total, row);
    }
    shared_.n_layers_added[i] += n_layers;
    if (shared_.n_layers_added[i] < static_cast<int>(plan_.layers().size())) return;
    if (is_mean(plan_.reduce())) scale(total, 1.0f / static_cast<float>(plan_.n_heads_total()));
    write(0, total);
}

void row_sink::add(float* sum, const float* row) const {
    const auto n = n_columns();
    if (is_mean(plan_.reduce())) {
        for (std::size_t c = 0; c < n; ++c) sum[c] += row[c];
    } else {
        for (std::size_t c = 0; c < n; ++c) sum[c] = std::max(sum[c], row[c]);
    }
}

void row_sink::scale(float* row, float factor) const {
    for (std::size_t c = 0; c < n_columns(); ++c) row[c] *= factor;
}

void row_sink::write(int i_row, const float* row) {
    if (plan_.top_k() > 0) return write_top(i_row, row);
    if (!plan_.keeps_columns()) return write_sums(i_row, segments_of(row));
    std::byte* const to = target_.data + index_of(i_row) * plan_.element_bytes();
    if (plan_.type() == row_type::f32) {
        std::memcpy(to, row, n_columns() * sizeof(float));
    } else {
        write_f16(row, n_columns(), reinterpret_cast<ggml_fp16_t*>(to));
    }
    count(to);
}

void row_sink::write_top(int i_row, const float* row) {
    const auto n_values = static_cast<std::size_t>(target_.layout.n_values);
    select_top(row, target_.layout.n_columns, n_values, scratch_.maxima, scratch_.best);
    std::byte* const to = target_.data + index_of(i_row) * plan_.element_bytes();
    auto* const positions =
        reinterpret_cast<std::int32_t*>(target_.data + target_.layout.positions_offset) +
        index_of(i_row);
    for (std::size_t i = 0; i < n_values; ++i) {
        const auto [value, column] = scratch_.best[i];
        if (plan_.type() == row_type::f32) {
            reinterpret_cast<float*>(to)[i] = value;
        } else {
            reinterpret_cast<ggml_fp16_t*>(to)[i] = ggml_fp32_to_fp16(within_f16(value));
        }
        positions[i] = column;
    }
    count(to);
}

std::span<const double> row_sink::segments_of(const float* row) {
    const auto& cuts = plan_.spans().cuts;
    const int n_columns = target_.layout.n_columns;
    auto& sums = scratch_.segments;
    sums.clear();
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        const int start = std::min(cuts[i], n_columns);
        sums.push_back(sum_of(row + start, std::min(cuts[i + 1], n_columns) - start));
    }
    return sums;
}

void row_sink::write_sums(int i_row, std::span<const double> segments) {
    const auto& spans = plan_.spans().of_range;
    std::byte* const to = target_.data + index_of(i_row) * plan_.element_bytes();
    for (std::size_t i = 0; i < spans.size(); ++i) {
        const auto part = segments.subspan(spans[i].first, spans[i].last - spans[i].first);
        const auto sum = static_cast<float>(std::accumulate(part.begin(), part.end(), 0.0));
        if (plan_.type() == row_type::f32) {
            reinterpret_cast<float*>(to)[i] = sum;
        } else {
            reinterpret_cast<ggml_fp16_t*>(to)[i] = ggml_fp32_to_fp16(sum);
        }
    }
    count(to);
}

void row_sink::count(const std::byte* to) {
    if (is_first_target_ && to == target_.data)
        table_.first_write.store(to, std::memory_order_relaxed);
    table_.n_rows_written.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace kqview
