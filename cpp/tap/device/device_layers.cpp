#include "tap/device/device_layers.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>

#include "base/error.h"
#include "base/log.h"
#include "tap/device/row_kernels.h"
#include "tap/device/row_work.h"
#include "tap/device/side_graph.h"

namespace kqview {

namespace {

constexpr std::size_t prompt_budget_bytes = std::size_t{256} << 20;  // of a step's prompt rows
constexpr std::size_t slack_bytes = 4096;                            // a result's alignment
constexpr std::size_t n_tensors_of_layer = 4;                        // shared masks and views

// Of one stream's keys, if ggml-cuda may convert them to multiply them.
std::size_t key_bytes_of(const attention_site& site) {
    const auto* const keys = site.keys();
    constexpr std::int64_t n_wide_head = 64;
    const bool is_read_as_it_is =
        !ggml_is_quantized(keys->type) && (keys->ne[0] % n_wide_head == 0);
    if (is_read_as_it_is) return 0;
    return static_cast<std::size_t>(keys->ne[0] * keys->ne[1] * keys->ne[2]) * sizeof(float);
}

// Whether a kernel can read what this attention reads.
bool can_read(const attention_site& site, const row_kernels* kernels) {
    if (!kernels || !site.flash || site.gathered || site.n_extra_cells > 0) return false;
    if (site.has_made_mask || site.heads_per_mask > 0) return false;
    const auto* const k = site.k;
    const auto* const keys = k->view_src ? k->view_src : k;
    constexpr std::size_t alignment = 16;  // of loads; blocks of quantised keys need less
    const bool is_aligned =
        ggml_is_quantized(k->type) || (k->nb[1] % alignment == 0 && k->nb[2] % alignment == 0);
    return keys->buffer && (!site.sinks || site.sinks->buffer) && is_aligned &&
           k->nb[0] == ggml_type_size(k->type) && site.q->type == GGML_TYPE_F32 &&
           kernels->can_read(k->type, static_cast<int>(k->ne[0]), site.n_head, site.n_head_kv);
}

// Tests on nodes outside any graph whether a device can select heads of this site and reduce them.
bool can_reduce(const attention_site& site, ggml_backend_dev_t device) {
    constexpr std::size_t n_tensors = 2 * device_node_builder::n_tensors_max;
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors(
        ggml_init({n_tensors * ggml_tensor_overhead() + 1, nullptr, true}), ggml_free);
    device_node_builder probe(tensors.get(), device, nullptr, true);
    device_want want;
    want.kind = row_kind::probs;
    want.type = row_type::f16;
    want.heads = {0};
    try {
        for (const auto reduce : {row_reduction::mean_heads, row_reduction::max_heads}) {
            want.reduce = reduce;
            probe.rows_of(site, want, 1);
        }
        return true;
    } catch (const error&) {
        return false;
    }
}

}  // namespace

void device_path::note_free() {
    std::size_t free_bytes = 0, total_bytes = 0;
    ggml_backend_dev_memory(way.device(), &free_bytes, &total_bytes);
    n_free = total_bytes > 0 ? std::optional(free_bytes) : std::nullopt;
}

void device_path::note_taken() {
    const auto before = n_free;
    note_free();
    if (!before || !n_free || *n_free >= *before) return;
    n_taken = std::min(n_taken + *before - *n_free, n_accepted);
}

ggml_backend_dev_t device_layers::device() const {
    const auto async = std::find_if(paths_.begin(), paths_.end(),
                                    [](const auto& one) { return one->way.is_async(); });
    if (async != paths_.end()) return (*async)->way.device();
    return paths_.empty() ? nullptr : paths_.front()->way.device();
}

device_path& device_layers::path_to(ggml_backend_dev_t device) {
    for (const auto& one : paths_) {
        if (one->way.device() == device) return *one;
    }
    auto& added = *paths_.emplace_back(std::make_unique<device_path>(device, *counters_));
    if (added.way.is_async() && options_.place != rows_place::in_graph) {
        added.way.take(make_row_kernels(device));
        added.is_beside =
            options_.place == rows_place::beside || added.way.kernels() || is_cuda(device);
    }
    if (options_.place == rows_place::beside && !added.way.is_async()) {
        const auto line =
            text_of("device_rows=\"beside\" has no effect on ", ggml_backend_dev_name(device),
                    ", which cannot copy while it computes: its rows are computed in "
                    "the step's graph\n");
        log_ring::instance().write(log_level::warning, line.c_str());
    }
    return added;
}

void device_layers::learn(const attention_site& site) {
    const auto* const keys = site.keys();
    const auto device = device_of(keys);
    if (!device) {
        has_host_layers_ = true;
        return;
    }
    const bool is_cached = (keys->view_src ? keys->view_src : keys)->buffer != nullptr;
    layers_[site.il] = {&path_to(device),
                        static_cast<std::size_t>(site.n_head),
                        static_cast<std::size_t>(site.n_cells),
                        is_cached ? 1 : site.n_queries(),
                        can_reduce(site, device),
                        static_cast<std::size_t>(keys->ne[0]) *
                            static_cast<std::size_t>(site.n_head) * sizeof(float),
                        side_graph::can_compute(site),
                        can_read(site, path_to(device).way.kernels()),
                        {keys->type, static_cast<int>(keys->ne[0]), site.n_head, site.n_head_kv},
                        options_.has_window || site.max_bias > 0.0f,
                        site.mask ? input_of(site.mask) : nullptr,
                        key_bytes_of(site)};
}

void device_layers::leave_to_nodes(int il) {
    if (holds(il)) layers_.at(il).can_be_by_kernel = false;
}

void device_layers::learn(const hidden_site& site) {
    if (const auto device = device_of(site.output)) {
        hidden_[site.il] = {&path_to(device), static_cast<std::size_t>(site.output->ne[0])};
    }
}

// Bytes of one query's results in the device's buffer.
std::size_t device_layers::bytes_of_row(const graph_plan& plan, int il) const {
    const auto& one = layers_.at(il);
    std::size_t n_bytes = 0;
    for (const auto& want : plan.device_wants(il)) {
        // A joined layer needs its part of a stack, and its own result if it is the only layer with
        // its mask.
        const auto n_head = want.reduce == row_reduction::none ? one.n_head
                            : want.joins_layers()              ? 2
                                                               : 1;
        n_bytes += n_head * want.n_values(one.n_cells) * want.element_bytes();
    }
    return n_bytes;
}

// Bytes of one query in llama.cpp's compute buffer, which layers reuse one after the other.
std::size_t device_layers::work_bytes_of_row(const graph_plan& plan, int il) const {
    const auto& one = layers_.at(il);
    return plan.device_wants(il).empty() ? 0 : one.n_head * one.n_cells * sizeof(float);
}

// Not with windows, whose masks only llama.cpp knows, nor with a prompt's rows, whose queries would
// be as large as rows. Without streams nothing runs beside anything. All layers of a device or
// none.
bool device_layers::goes_beside(const graph_plan& plan, const device_path& on) const {
    if (!on.is_beside || options_.has_window || plan.wants_prompt() || plan.edits_mask())
        return false;
    return std::all_of(layers_.begin(), layers_.end(), [&](const auto& entry) {
        const auto& [il, one] = entry;
        if (one.on != &on || plan.device_wants(il).empty()) return true;
        return one.can_be_beside && plan.edits_scores(il) == score_edit::none;
    });
}

// All that is handed out must be finished there: rows over layers that are all on this device.
bool device_layers::goes_by_kernel(const graph_plan& plan, const device_path& on) const {
    if (!on.is_beside || !on.way.kernels() || plan.wants_prompt()) return false;
    const bool has_all_layers = paths_.size() == 1 && !has_host_layers_;
    return std::all_of(layers_.begin(), layers_.end(), [&](const auto& entry) {
        const auto& [il, one] = entry;
        const auto& wants = plan.device_wants(il);
        if (one.on != &on || wants.empty()) return true;
        return one.can_be_by_kernel && plan.edits_scores(il) != score_edit::by_head &&
               std::ranges::all_of(wants, [&](const auto& want) {
                   return !want.is_long && (!want.joins_layers() || has_all_layers);
               });
    });
}

bool device_layers::saves_mask(const graph_plan& plan, int il) const {
    return layers_.at(il).is_masked || plan.edits_mask() ||
           plan.edits_scores(il) != score_edit::none;
}

// Of the rows of all slots that capture.
std::size_t device_layers::kernel_bytes(const graph_plan& plan, const device_path& on) const {
    row_work::need of_slot;
    for (const auto& [il, one] : layers_) {
        if (one.on != &on) continue;
        const auto& wants = plan.device_wants(il);
        if (wants.empty()) continue;
        of_slot.n_rows += one.n_head;
        of_slot.n_columns = std::max(of_slot.n_columns, one.n_cells);
        for (const auto& want : wants) {
            of_slot.has_half |= want.type == row_type::f16;
            if (want.reduce != row_reduction::none && of_slot.n_layers < layers_.size())
                ++of_slot.n_layers;
        }
    }
    return n_rows_reserved(plan) * row_work::bytes_for(of_slot);
}

void device_layers::prove_kernels(const graph_plan& plan) {
    for (auto& [il, one] : layers_) {
        auto* const kernels = one.on->way.kernels();
        if (!one.can_be_by_kernel || plan.device_wants(il).empty()) continue;
        const auto known = one.on->proven.try_emplace(one.shape, false);
        if (known.second)
            known.first->second = agrees_with_nodes(*kernels, one.on->way.device(), one.shape);
        one.can_be_by_kernel = known.first->second;
    }
}

int device_layers::n_prompt_rows(const graph_plan& plan) const {
    std::size_t n_row_bytes = 0;
    std::size_t n_work_bytes = 0;
    int n_least = 1;
    for (const auto& [il, one] : layers_) {
        n_row_bytes += bytes_of_row(plan, il);
        n_work_bytes = std::max(n_work_bytes, work_bytes_of_row(plan, il));
        n_least = std::max(n_least, one.n_queries_least);
    }
    for (const auto& [il, one] : hidden_) {
        if (plan.wants_hidden(il)) n_row_bytes += one.n_embd * sizeof(float);
    }
    if (!plan.wants_prompt() || n_row_bytes == 0) return std::numeric_limits<int>::max();
    const auto n_room =
        std::min<std::size_t>(prompt_budget_bytes / std::max(n_row_bytes, n_work_bytes),
                              static_cast<std::size_t>(options_.n_chunk));
    return std::max(n_least, static_cast<int>(n_room));
}

// Rows of a layer in one step: one for each slot that captures, or those of a prompt.
std::size_t device_layers::n_rows_reserved(const graph_plan& plan) const {
    const int n_prompt = plan.wants_prompt() ? n_prompt_rows(plan) : 0;
    const bool is_limited = n_prompt < std::numeric_limits<int>::max();
    return static_cast<std::size_t>(std::max(plan.slots().count, is_limited ? n_prompt : 0));
}

transfer::sizes device_layers::sizes_of(const graph_plan& plan, const device_path& on) const {
    const auto n_rows = n_rows_reserved(plan);
    const auto n_slots = static_cast<std::size_t>(options_.n_slots);
    const bool is_by_kernel = goes_by_kernel(plan, on);
    const bool is_beside = is_by_kernel || goes_beside(plan, on);
    transfer::sizes sizes;
    std::set<const ggml_tensor*> masks;
    for (const auto& [il, one] : layers_) {
        if (one.on != &on || plan.device_wants(il).empty()) continue;
        if (!is_by_kernel) {
            (is_beside ? sizes.n_beside : sizes.n_results) +=
                bytes_of_row(plan, il) * n_rows + 2 * plan.device_wants(il).size() * slack_bytes;
        }
        if (!is_beside) continue;
        // Queries are saved, and masks made or saved, for all slots of a step: both are small.
        sizes.n_queries += one.query_bytes * n_slots + slack_bytes;
        const auto mask_bytes = one.n_cells * n_slots * sizeof(float) + slack_bytes;
        if (!is_by_kernel) {
            sizes.n_beside += mask_bytes;
        } else if (saves_mask(plan, il) && masks.insert(one.mask).second) {
            sizes.n_queries += mask_bytes;
        }
    }
    if (is_by_kernel) sizes.n_beside += kernel_bytes(plan, on);
    sizes.n_results += sizes.n_queries;
    sizes.n_beside += sizes.n_queries;
    for (const auto& [il, one] : hidden_) {
        if (one.on != &on || !plan.wants_hidden(il)) continue;
        sizes.n_results += std::max(n_slots, n_rows) * one.n_embd * sizeof(float) + slack_bytes;
    }
    return sizes;
}

std::size_t device_layers::product_bytes_of(const graph_plan& plan, const device_path& on) const {
    if (goes_by_kernel(plan, on)) return 0;
    const auto n_rows = n_rows_reserved(plan);
    const auto n_streams = static_cast<std::size_t>(plan.slots().count);
    std::size_t n_bytes = 0;
    for (const auto& [il, one] : layers_) {
        if (one.on != &on || plan.device_wants(il).empty()) continue;
        n_bytes = std::max(n_bytes, n_streams * one.key_bytes +
                                        n_rows * (one.query_bytes + work_bytes_of_row(plan, il)));
    }
    return n_bytes;
}

std::size_t device_layers::n_tensors_max(const graph_plan& plan) const {
    std::size_t n = 2 * hidden_.size();
    for (const auto& [il, one] : layers_) {
        n += n_tensors_of_layer;
        // Its own rows, or its part of joined rows with their stack and the node that joins them.
        n += plan.device_wants(il).size() * (2 * device_node_builder::n_tensors_max + 1);
    }
    return n;
}

node_constants::wanted device_layers::constants_of(const graph_plan& plan,
                                                   const device_path& on) const {
    node_constants::wanted all;
    for (const auto& [il, layer] : layers_) {
        if (layer.on != &on) continue;
        for (const auto& want : plan.device_wants(il)) {
            if (!want.heads.empty()) all.lists.insert(want.heads);
            if (want.spans.empty()) continue;
            auto& n_cells = all.matrices[want.spans];
            n_cells = std::max(n_cells, layer.n_cells);
        }
    }
    return all;
}

}  // namespace kqview
