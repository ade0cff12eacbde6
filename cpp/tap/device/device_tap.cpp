#include "tap/device/device_tap.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "tap/device/device_copies.h"
#include "tap/device/row_kernels.h"
#include "tap/device/row_step.h"
#include "tap/device/row_work.h"
#include "tap/device/side_graph.h"

namespace kqview {

namespace {

constexpr std::size_t prompt_budget_bytes = std::size_t{256} << 20;  // of a step's prompt rows
constexpr std::size_t slack_bytes = 4096;                            // a result's alignment
constexpr std::size_t n_tensors_of_layer = 4;                        // shared masks and views

// Fails unless results of a graph were placed.
void require_room(bool is_placed, const transfer& way) {
    if (is_placed) return;
    refuse_capture("rows of this step do not fit into the memory reserved on ",
                   ggml_backend_dev_name(way.device()));
}

// Among the results of the graph.
void place_in_graph(device_part::share& share, ggml_tensor* result) {
    auto& way = *share.way;
    require_room(way.results().place(result), way);
    share.n_used = way.results().n_placed();
}

void place(device_part::share& share, ggml_tensor* result) {
    if (!share.beside) return place_in_graph(share, result);
    require_room(share.way->beside().place(result), *share.way);
}

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

// Builds the nodes of one graph, and of what is computed beside it: one builder for each, on each
// device.
struct builders {
    const device_layers& layers;
    const graph_plan& plan;
    int n_prompt_rows;  // for which there is room
    ggml_context* tensors;
    std::vector<placed_node>& placed;
    device_part& part;
    slot_range streams{};  // of the graph, whose rows are made
    std::map<std::pair<const device_path*, ggml_context*>, device_node_builder> made{};
    std::map<std::pair<const device_path*, const ggml_tensor*>, ggml_tensor*> masks{};

    device_part::share& share_of(device_path& on) const {
        for (auto& share : part.shares) {
            if (share.way == &on.way) return share;
        }
        on.way.begin_graph();
        part.shares.push_back({&on.way, {}, {}, 0});
        return part.shares.back();
    }
    ggml_context* context_of(const device_part::share& share) const {
        return share.beside ? share.beside->tensors() : tensors;
    }
    device_node_builder& of(device_path& on, ggml_context* context) {
        auto& builder = made.try_emplace({&on, context}, context, on.way.device(), &on.constants,
                                         layers.given().has_window)
                            .first->second;
        builder.of_streams(streams);
        return builder;
    }
    void put(device_node_builder& builder, device_part::share& share, ggml_tensor* anchor) {
        if (share.beside) {
            share.beside->add(builder.take_nodes());
        } else {
            put_in_graph(builder, anchor);
        }
    }
    void put_in_graph(device_node_builder& builder, ggml_tensor* anchor) {
        for (auto* const node : builder.take_nodes()) placed.push_back({anchor, node});
    }

    // The last queries of a site, among the results of the graph: llama.cpp's own tensor where that
    // has just these, else (false) a copy.
    std::pair<ggml_tensor*, bool> save(device_part::share& share, device_path& on,
                                       const attention_site& site) {
        auto* saved = site.q->view_src ? site.q->view_src : site.q;
        // Its memory decides where llama.cpp computes it.
        const bool is_whole = site.n_queries() == 1 && saved->op != GGML_OP_NONE && !saved->data &&
                              saved->type == GGML_TYPE_F32 && ggml_is_contiguous(saved) &&
                              ggml_nelements(saved) == ggml_nelements(site.q) &&
                              ggml_backend_dev_supports_op(on.way.device(), saved);
        auto& builder = of(on, tensors);
        if (!is_whole) saved = builder.last_query_of(site);
        place_in_graph(share, share.queries.emplace_back(saved));
        put_in_graph(builder, site.flash);
        return {saved, is_whole};
    }
    // Layers share masks.
    ggml_tensor* save_mask(device_part::share& share, device_path& on, const attention_site& site) {
        auto& known = masks[{&on, site.mask}];
        if (known) return known;
        auto& builder = of(on, tensors);
        known = builder.last_mask_of(site);
        place_in_graph(share, share.queries.emplace_back(known));
        put_in_graph(builder, site.flash);
        return known;
    }
};

// One row, the last query of each stream, or as many as there is room for if a prompt's rows are
// wanted.
int n_rows_in_graph(const builders& building, int n_queries) {
    if (!building.plan.wants_prompt()) return 1;
    const int n_room =
        std::max(building.plan.slots().count, building.n_prompt_rows) / building.streams.count;
    return std::max(1, std::min(n_queries, n_room));
}

void save_for_kernel(const attention_site& site, device_path& on, builders& building) {
    auto& share = building.share_of(on);
    if (!share.by_kernel) share.by_kernel = std::make_shared<row_work>(site.n_queries());
    const auto& results = on.way.results();
    const auto [saved, is_whole] = building.save(share, on, site);
    const auto* const q = is_whole ? site.q : saved;
    const auto* const k = site.k;
    row_layer layer{};
    layer.keys = static_cast<const std::byte*>((k->view_src ? k->view_src : k)->data) +
                 (k->view_src ? k->view_offs : 0);
    layer.key_cell_stride = k->nb[1];
    layer.key_head_stride = k->nb[2];
    layer.key_stream_stride = k->nb[3];
    layer.query = results.offset_of(saved) + (is_whole && q->view_src ? q->view_offs : 0);
    layer.query_head_stride = q->nb[2];
    layer.query_stream_stride = q->nb[3];
    layer.mask = row_layer::nothing;
    if (site.mask && building.layers.saves_mask(building.plan, site.il)) {
        const auto* const mask = building.save_mask(share, on, site);
        layer.mask = results.offset_of(mask);
        layer.mask_stream_stride = mask->ne[3] > 1 ? mask->nb[3] : 0;
        layer.mask_is_half = mask->type == GGML_TYPE_F16 ? 1 : 0;
    }
    layer.sinks = site.sinks ? static_cast<const float*>(site.sinks->data) : nullptr;
    layer.scale = site.scale;
    layer.softcap = site.softcap;
    layer.max_bias = site.max_bias;
    layer.n_dim = static_cast<std::int32_t>(k->ne[0]);
    layer.n_head = site.n_head;
    layer.n_head_kv = site.n_head_kv;
    layer.n_cells = static_cast<std::int32_t>(k->ne[1]);
    share.by_kernel->add(site.il, layer, k->type);
}

// Saves the query of each stream in the step's graph, where rows can be computed from it later, and
// replaces the site by one that does so.
void save_queries(std::vector<attention_site>& sites, builders& building) {
    for (auto& site : sites) {
        auto& on = building.layers.path_of(site.il);
        if (building.plan.device_wants(site.il).empty()) continue;
        if (building.layers.goes_by_kernel(building.plan, on)) {
            save_for_kernel(site, on, building);
            continue;
        }
        if (!building.layers.goes_beside(building.plan, on)) continue;
        auto& share = building.share_of(on);
        if (!share.beside) {
            share.beside = std::make_shared<side_graph>(
                on.way.device(), on.way.beside(),
                building.layers.n_tensors_max(building.plan) + 8 * sites.size(),
                building.layers.counters());
        }
        const auto [saved, is_whole] = building.save(share, on, site);
        const auto& wants = building.plan.device_wants(site.il);
        const bool needs_mask =
            std::ranges::find(wants, row_kind::probs, &device_want::kind) != wants.end();
        site = share.beside->site_of(site, saved, on.way.results().offset_of(saved), !is_whole,
                                     needs_mask);
        require_room(site.k != nullptr, on.way);
    }
}

void add_rows(const std::vector<attention_site>& sites, builders& building) {
    for (const auto& site : sites) {
        auto& on = building.layers.path_of(site.il);
        if (building.layers.goes_by_kernel(building.plan, on)) continue;
        for (const auto& want : building.plan.device_wants(site.il)) {
            if (want.joins_layers()) continue;
            auto& share = building.share_of(on);
            auto& builder = building.of(on, building.context_of(share));
            const int n_rows = n_rows_in_graph(building, site.n_queries());
            auto rows = builder.rows_of(site, want, n_rows);
            place(share, rows.tensor);
            share.rows.push_back(std::move(rows));
            building.put(builder, share, site.node_of(want.kind));
        }
    }
}

void add_group(device_path& on, joined_layers& joined, builders& building) {
    auto& share = building.share_of(on);
    auto& builder = building.of(on, building.context_of(share));
    auto& arena = share.beside ? on.way.beside() : on.way.results();
    std::sort(joined.sites.begin(), joined.sites.end(),
              [](const auto* a, const auto* b) { return a->position < b->position; });
    const auto& first = *joined.sites.front();
    joined.n_rows = n_rows_in_graph(building, first.n_queries());
    std::size_t part_bytes = 0;
    for (std::size_t i = 0; i < joined.sites.size(); ++i) {
        const auto& site = *joined.sites[i];
        auto* const part = builder.part_of(joined, site);
        if (i == 0) {
            part_bytes = ggml_nbytes(part);
            joined.stack =
                ggml_new_tensor_2d(building.context_of(share), GGML_TYPE_F32, ggml_nelements(part),
                                   static_cast<std::int64_t>(joined.sites.size()));
            require_room(arena.place_scratch(joined.stack), on.way);
        }
        if (ggml_nbytes(part) != part_bytes) {
            refuse_capture("layers that are joined differ in shape");
        }
        require_room(device_arena::place_in(joined.stack, i * part_bytes, part), on.way);
        building.put(builder, share, site.node_of(joined.want.kind));
    }
    auto rows = builder.join(joined);
    place(share, rows.tensor);
    share.rows.push_back(std::move(rows));
    building.put(builder, share, joined.sites.back()->node_of(joined.want.kind));
}

void add_joined(const std::vector<attention_site>& sites, builders& building) {
    std::vector<std::pair<device_path*, joined_layers>> groups;
    for (const auto& site : sites) {
        auto* const on = &building.layers.path_of(site.il);
        if (building.layers.goes_by_kernel(building.plan, *on)) continue;
        for (const auto& want : building.plan.device_wants(site.il)) {
            if (!want.joins_layers()) continue;
            const auto* const mask = want.kind == row_kind::probs ? nullptr : site.mask;
            const int n_heads = n_heads_reduced(want, site);
            auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& one) {
                const auto& first = *one.second.sites.front();
                return one.first == on && one.second.want == want && one.second.mask == mask &&
                       one.second.n_heads == n_heads && first.n_cells == site.n_cells;
            });
            if (group == groups.end()) {
                groups.push_back({on, {want, mask, n_heads, {}, nullptr, nullptr, 0}});
                group = std::prev(groups.end());
            }
            group->second.sites.push_back(&site);
        }
    }
    for (auto& [on, joined] : groups) add_group(*on, joined, building);
}

void add_hidden(const std::vector<hidden_site>& states, builders& building) {
    for (const auto& site : states) {
        if (!building.layers.holds_hidden(site.il) || !building.plan.wants_hidden(site.il))
            continue;
        auto& on = building.layers.path_of_hidden(site.il);
        auto& builder = building.of(on, building.tensors);
        auto& share = building.share_of(on);
        const auto n_tokens = static_cast<int>(site.output->ne[1]);
        const int n_room = building.plan.wants_prompt() ? building.n_prompt_rows : 0;
        const int n_rows = std::min(n_tokens, std::max(building.layers.given().n_slots, n_room));
        // Its memory decides where llama.cpp computes it, and no node is needed.
        auto* const output = site.output;
        const bool is_whole = n_rows == n_tokens && output->op != GGML_OP_NONE && !output->data &&
                              !output->view_src && output->type == GGML_TYPE_F32 &&
                              ggml_is_contiguous(output) &&
                              ggml_backend_dev_supports_op(on.way.device(), output);
        auto* const tensor = is_whole ? output : builder.hidden_of(site, n_rows);
        place_in_graph(share, tensor);
        share.states.push_back({site.il, tensor});
        building.put_in_graph(builder, site.output);
    }
}

// Converts a driver's failure into error.
[[noreturn]] void raise(const std::exception_ptr& failure) {
    try {
        std::rethrow_exception(failure);
    } catch (const error&) {
        throw;
    } catch (const std::exception& of_driver) {
        throw error(errc::decode,
                    "attention rows could not be copied from their device: ", of_driver.what());
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

std::size_t device_tap::bytes_for(const graph_plan& plan) const {
    std::size_t n_bytes = 0;
    for (const auto& path : layers_.paths()) {
        n_bytes += path->way.bytes_for(layers_.sizes_of(plan, *path));
    }
    return n_bytes;
}

void device_tap::reserve(const graph_plan& plan) {
    // What is computed beside a step may still read the constants, and write to its buffers.
    for (const auto& path : layers_.paths()) {
        path->way.settle();
        path->note_taken();
    }
    layers_.prove_kernels(plan);
    n_prompt_rows_ = layers_.n_prompt_rows(plan);
    for (const auto& path : layers_.paths()) path->way.reserve(layers_.sizes_of(plan, *path));
    for (const auto& path : layers_.paths()) {
        path->constants.keep(layers_.constants_of(plan, *path), layers_.given().n_slots);
    }
    for (const auto& path : layers_.paths()) path->note_free();
}

void device_tap::check_room(const graph_plan& plan) {
    for (const auto& path : layers_.paths()) {
        const auto wanted = layers_.product_bytes_of(plan, *path);
        path->note_free();
        if (!path->n_free || *path->n_free + path->n_taken >= wanted) {
            path->n_accepted = std::max(path->n_accepted, wanted);
            continue;
        }
        throw error(errc::out_of_memory, "computing attention rows on ",
                    ggml_backend_dev_name(path->way.device()), " may take ",
                    size_text(wanted - path->n_taken), ", ", size_text(*path->n_free),
                    " are free; capture in fewer slots at a time or fewer rows of a prompt, or "
                    "lower n_ctx, n_slots or n_gpu_layers");
    }
}

void device_tap::add(const attention_sites& attention, const std::vector<hidden_site>& states,
                     const graph_plan& plan, int first_slot, ggml_context* tensors,
                     std::vector<placed_node>& placed, device_part& part) {
    builders building{layers_, plan, n_prompt_rows_, tensors, placed, part};
    std::vector<attention_site> sites;
    for (const auto& site : attention.sites) {
        if (!layers_.holds(site.il)) continue;
        // Streams of a graph are adjacent slots. One that is reserved has all, or stands for any.
        const int first = first_slot >= 0      ? first_slot
                          : site.n_stream == 1 ? plan.slots().first
                                               : 0;
        const auto slots = common_of({first, site.n_stream}, plan.slots());
        if (slots.count == 0) continue;
        building.streams = {slots.first - first, slots.count};
        sites.push_back(site);
    }
    save_queries(sites, building);
    add_rows(sites, building);
    add_joined(sites, building);
    add_hidden(states, building);
    for (auto& share : part.shares) {
        if (!share.beside || share.beside->allocate()) continue;
        throw error(errc::out_of_memory, ggml_backend_dev_name(share.way->device()),
                    " has no memory left to compute rows beside a step; capture fewer layers, or "
                    "lower n_ctx, n_slots or n_gpu_layers");
    }
}

void device_tap::find_backends(ggml_backend_sched_t sched, device_part& part) {
    for (auto& share : part.shares) {
        share.backend = ggml_backend_sched_get_tensor_backend(
            sched, const_cast<ggml_tensor*>(share.first_result()));
    }
}

transfer_id device_tap::start(row_table& table, const device_part& part) {
    const auto id = ++n_transfers_;
    bool is_on_its_way = false;
    device_copies copies(table, part);  // copies in flight may write to it
    try {
        for (const auto& share : part.shares) {
            const auto wanted = copies.of(share);
            work_beside work{share.beside, {}, copies.step_of(share)};
            if (wanted.empty() && work.by_kernel.jobs.empty()) continue;
            for (const auto& target : table.targets) {
                work.streams.push_back({target.i_stream, target.layout.n_columns});
            }
            is_on_its_way |= share.way->start(share.backend, id, share.n_used, wanted, work);
        }
        if (copies.has_work_left()) {
            if (is_on_its_way) await(id);
            copies.finish();
            return 0;
        }
    } catch (...) {
        const auto failure = std::current_exception();
        await_all(id);  // the others write to blocks that go back to their pool
        raise(failure);
    }
    return is_on_its_way ? id : 0;
}

void device_tap::note_computed() {
    for (const auto& one : layers_.paths()) one->way.note_computed();
}

void device_tap::settle() noexcept {
    for (const auto& one : layers_.paths()) {
        if (one->is_beside) one->way.settle();  // copies of staged rows read no keys
    }
}

void device_tap::await(transfer_id id) {
    if (id == 0) return;
    if (const auto failure = await_all(id)) raise(failure);
}

// Waits for every device, whatever becomes of one; the first failure, or null.
std::exception_ptr device_tap::await_all(transfer_id id) {
    std::exception_ptr failure;
    for (const auto& one : layers_.paths()) {
        try {
            one->way.await(id);
        } catch (...) {
            if (!failure) failure = std::current_exception();
        }
    }
    return failure;
}

}  // namespace kqview
