#include "tap/device/side_graph.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/error.h"

namespace kqview {

side_graph::side_graph(ggml_backend_dev_t device, device_arena& arena, std::size_t n_tensors,
                       std::shared_ptr<copy_counters> counters)
    : arena_(arena),
      tensors_(ggml_init({n_tensors * ggml_tensor_overhead() +
                              ggml_graph_overhead_custom(2 * n_tensors, false),
                          nullptr, true}),
               ggml_free),
      graph_(ggml_new_graph_custom(tensors_.get(), 2 * n_tensors, false)),
      memory_(ggml_gallocr_new(ggml_backend_dev_buffer_type(device)), ggml_gallocr_free),
      counters_(std::move(counters)) {}

side_graph::~side_graph() { counters_->reserved_bytes -= allocated_bytes_; }

bool side_graph::can_compute(const attention_site& site) {
    // The masks here have no ALiBi, and show all that a token may see.
    if (!site.flash || site.gathered || site.n_extra_cells > 0) return false;
    if (site.max_bias != 0.0f || site.has_made_mask) return false;
    const auto* const keys = site.k->view_src ? site.k->view_src : site.k;
    return keys->buffer && (!site.sinks || site.sinks->buffer);
}

attention_site side_graph::site_of(const attention_site& site, const ggml_tensor* saved,
                                   std::size_t offset, bool is_copy, bool needs_mask) {
    auto beside = site;
    beside.n_step_queries = site.n_queries();
    auto* const context = tensors_.get();
    auto* const copy = ggml_new_tensor_4d(context, saved->type, saved->ne[0], saved->ne[1],
                                          saved->ne[2], saved->ne[3]);
    bool has_room = arena_.place_at(offset, copy);
    const auto* const q = site.q;
    beside.q = is_copy ? copy
                       : ggml_view_4d(context, copy, q->ne[0], q->ne[1], q->ne[2], q->ne[3],
                                      q->nb[1], q->nb[2], q->nb[3], q->view_src ? q->view_offs : 0);
    auto* const k = site.k;
    beside.k = ggml_view_4d(context, k->view_src ? k->view_src : k, k->ne[0], k->ne[1], k->ne[2],
                            k->ne[3], k->nb[1], k->nb[2], k->nb[3], k->view_src ? k->view_offs : 0);
    beside.mask = nullptr;
    if (needs_mask && site.mask) {
        auto& known = masks_[{static_cast<int>(site.k->ne[1]), site.n_stream}];
        if (!known.tensor) {
            known.tensor =
                ggml_new_tensor_4d(context, GGML_TYPE_F32, site.k->ne[1], 1, 1, site.n_stream);
            has_room = has_room && arena_.place(known.tensor);
        }
        beside.mask = known.tensor;
    }
    if (!has_room) beside.k = nullptr;
    return beside;
}

void side_graph::add(const std::vector<ggml_tensor*>& nodes) {
    for (auto* const node : nodes) ggml_build_forward_expand(graph_, node);
}

bool side_graph::allocate() {
    if (!ggml_gallocr_alloc_graph(memory_.get(), graph_)) return false;
    allocated_bytes_ = ggml_gallocr_get_buffer_size(memory_.get(), 0);
    counters_->reserved_bytes += allocated_bytes_;
    return true;
}

void side_graph::run(ggml_backend_t stream, std::span<const stream_view> streams,
                     std::size_t parity) {
    for (auto& [shape, one] : masks_) {
        const auto n_cells = static_cast<std::size_t>(shape.first);
        auto& values = one.values[parity];
        values.assign(n_cells * static_cast<std::size_t>(shape.second), 0.0f);
        for (const auto& seen : streams) {
            const auto first = std::min(static_cast<std::size_t>(seen.n_visible), n_cells);
            auto* const row = values.data() + static_cast<std::size_t>(seen.i_stream) * n_cells;
            std::fill(row + first, row + n_cells, -std::numeric_limits<float>::infinity());
        }
        ggml_backend_tensor_set_async(stream, one.tensor, values.data(), 0,
                                      values.size() * sizeof(float));
    }
    if (ggml_backend_graph_compute_async(stream, graph_) == GGML_STATUS_SUCCESS) return;
    throw error(errc::decode, "attention rows could not be computed beside their step");
}

}  // namespace kqview
