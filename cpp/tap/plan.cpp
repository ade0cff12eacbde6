#include "tap/plan.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"
#include "tap/edits.h"

namespace kqview {

namespace {

std::string join(std::span<const int> layers) {
    if (layers.empty()) return "none";
    std::string text;
    for (const int il : layers) text += text_of(text.empty() ? "" : ", ", il);
    return text;
}

std::vector<int> all_heads(int n_head) {
    std::vector<int> heads(static_cast<std::size_t>(n_head));
    std::iota(heads.begin(), heads.end(), 0);
    return heads;
}

std::size_t aligned(std::size_t n_bytes) { return (n_bytes + 63) / 64 * 64; }

void check_hidden(const capture_options& options, const capture_source& source) {
    for (const int il : options.hidden) {
        const auto& known = source.hidden_layers;
        if (std::find(known.begin(), known.end(), il) != known.end()) continue;
        throw error(errc::invalid_capture, "hidden: layer ", il,
                    " has no hidden state here, layers that have one are ", join(known));
    }
}

}  // namespace

cut_ranges::cut_ranges(const std::vector<column_range>& ranges) {
    for (const auto& one : ranges) cuts.insert(cuts.end(), {one.start, one.stop});
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    const auto place = [this](int column) {
        return static_cast<std::size_t>(std::lower_bound(cuts.begin(), cuts.end(), column) -
                                        cuts.begin());
    };
    for (const auto& one : ranges) of_range.push_back({place(one.start), place(one.stop)});
}

std::vector<cut_ranges::piece> cut_ranges::pieces(int n_columns, int n_of_tile) const {
    std::vector<bool> is_used(n_segments());
    for (const auto& [first, last] : of_range)
        for (auto i = first; i < last; ++i) is_used[i] = true;
    std::vector<piece> found;
    for (std::size_t i = 0; i < is_used.size(); ++i) {
        if (!is_used[i]) continue;
        const int stop = std::min(cuts[i + 1], n_columns);
        for (int start = cuts[i]; start < stop;) {
            const int tile = start / n_of_tile, first = tile * n_of_tile;
            const int end = std::min(stop, first + n_of_tile);
            found.push_back({tile, start - first, end - first, i});
            start = end;
        }
    }
    return found;
}

capture_plan::capture_plan(const capture_options& options, const capture_source& source)
    : options_(options), spans_(options.spans), n_embd_(source.n_embd) {
    std::vector<int> available;
    for (const auto& layer : source.attention) available.push_back(layer.il);
    check_hidden(options, source);
    has_device_hidden_ = source.has_device_hidden && !hidden().empty();
    needs_outputs_ = !hidden().empty() && find_hidden(source.hidden_layers.back()) >= 0;
    const bool has_output = !options.hidden.empty() || options.n_vocab > 0;
    if (options.layers && options.layers->empty() && has_output) return;
    if (available.empty()) {
        throw error(errc::invalid_capture,
                    "this model has no layer whose attention can be captured; leave capture out");
    }
    const auto& wanted = options.layers ? *options.layers : available;
    if (wanted.empty() || (options.heads && options.heads->empty())) {
        throw error(errc::invalid_capture,
                    "layers or heads is an empty list; leave it out for all of them");
    }
    for (const int il : wanted) {
        const auto found = std::find(available.begin(), available.end(), il);
        if (found == available.end()) {
            throw error(errc::invalid_capture, "layer ", il,
                        " has no attention here, layers with attention are ", join(available));
        }
        add_layer(il, source.attention[static_cast<std::size_t>(found - available.begin())]);
    }
    if (has_device_rows_) plan_devices(source);
}

void capture_plan::add_layer(int il, const attention_layer& found) {
    const auto i = static_cast<std::size_t>(il);
    if (index_of_layer_.size() <= i) index_of_layer_.resize(i + 1, -1);
    if (index_of_layer_[i] >= 0) {
        throw error(errc::invalid_capture, "layer ", il,
                    " is listed twice in layers; list it once");
    }
    layer_rows rows{il, static_cast<int>(layers_.size()), n_heads_total_,
                    options_.heads ? *options_.heads : all_heads(found.n_head), std::nullopt};
    has_device_rows_ = has_device_rows_ || found.is_on_device;
    for (const int head : rows.heads) {
        if (head >= 0 && head < found.n_head) continue;
        throw error(errc::invalid_capture, "layer ", il, " has no head ", head,
                    ", its heads are 0..", found.n_head - 1);
    }
    n_heads_total_ += static_cast<int>(rows.heads.size());
    is_uniform_ = is_uniform_ && (layers_.empty() || layers_[0].heads.size() == rows.heads.size());
    index_of_layer_[i] = rows.index;
    layers_.push_back(std::move(rows));
}

// Decides the form in which each layer's device leaves its rows. The host finds the k largest
// values, after any reduction: ggml_top_k does not order equal values, and on CUDA it launches its
// kernels row by row. The host also sums the spans of reduced rows, which are few.
void capture_plan::plan_devices(const capture_source& source) {
    std::vector<int> joined;  // layers on devices that can reduce them
    bool can_all_reduce = true;
    for (auto& rows : layers_) {
        const auto& found = *std::find_if(source.attention.begin(), source.attention.end(),
                                          [&](const auto& one) { return one.il == rows.il; });
        if (!found.is_on_device) continue;
        auto& want = rows.on_device.emplace();
        want.kind = kind();
        want.is_long = top_k() > max_kernel_top_k;
        if (reduce() == row_reduction::none) {
            want.spans = options_.spans;
            continue;
        }
        can_all_reduce = can_all_reduce && found.is_reducible;
        if (!found.is_reducible) continue;
        want.reduce = is_mean(reduce()) ? row_reduction::mean_heads : row_reduction::max_heads;
        want.heads = rows.heads;
        std::sort(want.heads.begin(), want.heads.end());
        if (want.heads == all_heads(found.n_head)) want.heads.clear();
        joined.push_back(rows.il);
    }
    std::sort(joined.begin(), joined.end());
    for (auto& rows : layers_) {
        if (!rows.on_device || !can_all_reduce) continue;
        if (reduces_layers()) {
            rows.on_device->reduce = reduce();
            rows.on_device->layers = joined;
        } else if (keeps_columns() || !rows.on_device->spans.empty()) {
            rows.on_device->type = type();
        }
    }
}

std::size_t capture_plan::layer_rows::n_rows_brought() const {
    if (!on_device || on_device->joins_layers()) return 0;
    return on_device->reduce == row_reduction::none ? heads.size() : 1;
}

bool capture_plan::is_direct(const layer_rows& rows) const {
    if (reduces_layers()) return false;
    if (!keeps_columns() && rows.on_device->spans.empty()) return false;
    return reduce() == row_reduction::none ||
           (rows.on_device->reduce == reduce() && rows.on_device->type == type());
}

const capture_plan::layer_rows* capture_plan::find(int il) const {
    const auto i = static_cast<std::size_t>(il);
    if (i >= index_of_layer_.size() || index_of_layer_[i] < 0) return nullptr;
    return &layers_[static_cast<std::size_t>(index_of_layer_[i])];
}

int capture_plan::find_hidden(int il) const {
    const auto found = std::find(hidden().begin(), hidden().end(), il);
    return found == hidden().end() ? -1 : static_cast<int>(found - hidden().begin());
}

int capture_plan::n_rows() const {
    if (reduce() == row_reduction::none) return n_heads_total_;
    return reduces_layers() ? std::min(1, n_heads_total_) : static_cast<int>(layers_.size());
}

row_layout capture_plan::layout(int n_columns, int n_queries, bool with_logits) const {
    row_layout where;
    where.n_queries = n_queries;
    where.n_columns = n_columns;
    where.n_values = !options_.spans.empty() ? static_cast<int>(options_.spans.size())
                     : top_k() > 0           ? std::min(top_k(), n_columns)
                                             : n_columns;
    const auto n_values = static_cast<std::size_t>(n_rows()) * static_cast<std::size_t>(n_queries) *
                          static_cast<std::size_t>(where.n_values);
    where.size_bytes = n_values * element_bytes();
    if (top_k() > 0) {
        where.positions_offset = aligned(where.size_bytes);
        where.size_bytes = where.positions_offset + n_values * sizeof(std::int32_t);
    }
    if (!hidden().empty()) {
        where.hidden_offset = aligned(where.size_bytes);
        where.size_bytes = where.hidden_offset +
                           hidden().size() * static_cast<std::size_t>(n_queries) * hidden_bytes();
    }
    if (with_logits && n_vocab() > 0) {
        where.has_logits = true;
        where.logits_offset = aligned(where.size_bytes);
        where.size_bytes =
            where.logits_offset + static_cast<std::size_t>(n_vocab()) * sizeof(float);
    }
    return where;
}

slot_range span_of(const slot_range& a, const slot_range& b) {
    if (a.count == 0 || b.count == 0) return a.count == 0 ? b : a;
    const int first = std::min(a.first, b.first);
    return {first, std::max(a.end(), b.end()) - first};
}

slot_range common_of(const slot_range& a, const slot_range& b) {
    const int first = std::max(a.first, b.first);
    return {first, std::max(0, std::min(a.end(), b.end()) - first)};
}

void graph_plan::add(const capture_plan& plan, bool with_prompt, int slot) {
    for (const auto& rows : plan.layers()) {
        auto& one = wanted_by_layer_[rows.il];
        if (!rows.on_device) {
            one.host_kinds.insert(plan.kind());
            continue;
        }
        one.on_device.insert(*rows.on_device);
    }
    for (const int il : plan.hidden()) wanted_by_layer_[il].hidden = true;
    const bool is_on_device = plan.has_device_rows() || plan.has_device_hidden();
    wants_prompt_ = wants_prompt_ || (with_prompt && is_on_device);
    if (plan.has_device_rows()) widen({slot, 1});
}

void graph_plan::add(const edit_plan& edits) {
    edits_mask_ = edits_mask_ || !edits.biases.empty();
    for (const auto& [il, of_layer] : edits.layers) {
        auto& one = wanted_by_layer_[il];
        for (const auto point : edit_points) one.edits[point] |= !of_layer.outputs[point].empty();
        one.edits_heads |= edits.acts_on_heads(il);
        one.sets_heads |= !of_layer.set_heads.empty();
        one.records_heads |= edits.records_heads(il);
        for (const auto& bias : of_layer.biases) {
            const auto needed = bias.heads.empty() ? score_edit::all_heads : score_edit::by_head;
            one.edits_scores = std::max(one.edits_scores, needed);
        }
    }
}

bool graph_plan::wants(int il, row_kind kind) const {
    const auto& one = of(il);
    return one.host_kinds.contains(kind) ||
           std::any_of(one.on_device.begin(), one.on_device.end(),
                       [kind](const device_want& want) { return want.kind == kind; });
}

const graph_plan::layer& graph_plan::of(int il) const {
    static const layer nothing;
    const auto found = wanted_by_layer_.find(il);
    return found == wanted_by_layer_.end() ? nothing : found->second;
}

}  // namespace kqview
