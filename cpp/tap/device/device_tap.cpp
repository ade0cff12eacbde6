#include "tap/device/device_tap.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include "base/error.h"
#include "tap/device/device_copies.h"
#include "tap/device/device_nodes.h"
#include "tap/device/row_step.h"
#include "tap/device/row_work.h"
#include "tap/device/side_graph.h"

namespace kqview {

namespace {

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
