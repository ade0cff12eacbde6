#include "tap/tap.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <string>
#include <utility>

#include "base/error.h"
#include "tap/device/device_copies.h"
#include "tap/device/device_nodes.h"
#include "tap/device/edit_nodes.h"
#include "tap/graph.h"

namespace kqview {

namespace {
thread_local tap* current_tap = nullptr;

// Whether biases may be added to the mask that a layer reads: an input, whose columns are cells in
// order of position.
bool can_bias(const attention_site& site) {
    return site.mask && !site.has_made_mask && !site.gathered && site.n_extra_cells == 0;
}

constexpr std::array all_kinds{row_kind::logits, row_kind::scores, row_kind::probs};

// Layers share masks.
void add_once(std::vector<ggml_tensor*>& masks, ggml_tensor* mask) {
    if (std::ranges::find(masks, mask) == masks.end()) masks.push_back(mask);
}

bool is_on_cpu(ggml_backend_sched_t sched, ggml_tensor* node) {
    auto* const backend = ggml_backend_sched_get_tensor_backend(sched, node);
    return backend &&
           ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

// On devices, for rows of slots that captured before.
constexpr std::size_t spare_bytes = std::size_t{256} << 20;
}  // namespace

// The nodes added to one graph, and the plan they serve. Owns the added tensors' metadata.
struct tap::marked_graph {
    std::uint64_t generation = 0;
    bool is_ours = false;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors{nullptr, ggml_free};
    std::vector<std::unique_ptr<row_op>> ops;
    std::vector<std::unique_ptr<attend_op>> attends;
    std::vector<std::unique_ptr<edit_op>> edits;
    std::vector<ggml_tensor*> edited;  // by functions of the host, in place
    std::vector<device_edit> device_edits;
    std::vector<ggml_tensor*> masks;  // inputs
    ggml_tensor* head = nullptr;      // that of the logits
    device_part devices;
};

// Attention and hidden-state sites found in a graph.
struct tap::sites {
    attention_sites attention;
    std::vector<hidden_site> hidden;

    // What a layer has there; null if it has nothing.
    ggml_tensor* at(edit_point point, const hidden_site& layer) const {
        if (point == edit_point::residual) return layer.output;
        if (point == edit_point::mlp_out) return mlp_addend(layer);
        const auto site = std::ranges::find(attention.sites, layer.il, &attention_site::il);
        return site == attention.sites.end() ? nullptr : attention_addend(layer, *site);
    }
};

tap::tap(const tap_options& options)
    : attends_(options.attends),
      devices_({options.n_slots, options.n_chunk, options.has_window, options.device_rows}) {
    table_.scratch.resize(static_cast<std::size_t>(options.n_threads));
}

tap::~tap() = default;

tap::scope::scope(tap& current) noexcept : previous_(std::exchange(current_tap, &current)) {}
tap::scope::~scope() { current_tap = previous_; }
tap* tap::current() noexcept { return current_tap; }

bool tap::serves(const graph_plan& plan) const {
    return plan.has_nodes_of(wanted_) && wanted_.slots().covers(plan.slots());
}

void tap::want(const graph_plan& plan) {
    auto next = plan;
    if (plan.has_nodes_of(wanted_)) {
        next.widen(wanted_.slots());
        if (devices_.bytes_for(next) > devices_.bytes_for(plan) + spare_bytes) next = plan;
    }
    wanted_ = {};
    ++generation_;
    running_ = nullptr;
    devices_.reserve(next);
    wanted_ = next;
}

void tap::begin_step(std::vector<row_target> targets, std::span<const step_token> tokens,
                     bool reads_logits) {
    first_slot_ = tokens.front().slot;
    reads_logits_ = reads_logits;
    edits_.begin(tokens);
    table_.targets = std::move(targets);
    table_.prepare_reductions();
    const int n_streams = tokens.back().slot - tokens.front().slot + 1;
    if (attends_)
        attend_memory_.prepare(table_, n_streams, static_cast<int>(tokens.size()) / n_streams);
    running_ = nullptr;
    table_.n_rows_written.store(0, std::memory_order_relaxed);
    table_.first_write.store(nullptr, std::memory_order_relaxed);
}

step_result tap::end_step() {
    first_slot_ = -1;
    step_result result;
    if (running_ && !table_.targets.empty()) {
        try {
            result.transfer = devices_.start(table_, running_->devices);
        } catch (...) {
            table_.targets.clear();
            throw;
        }
    }
    int n_expected = 0;
    for (const auto& target : table_.targets) {
        const auto n_states = static_cast<int>(target.plan->hidden().size());
        n_expected += (target.plan->n_rows() + n_states) * target.layout.n_queries;
    }
    table_.targets.clear();
    const int n_written = table_.n_rows_written.load(std::memory_order_relaxed);
    if (n_written != n_expected) {
        throw error(errc::internal, n_written, " attention rows were written, ", n_expected,
                    " were due");
    }
    const int n_edited = edits_.n_done.load(std::memory_order_relaxed), n_due = edits_.n_due();
    edits_.end();
    if (n_edited != n_due) {
        throw error(errc::internal, n_edited, " edits were made, ", n_due, " were due");
    }
    result.written_at = table_.first_write.load(std::memory_order_relaxed);
    return result;
}

void tap::abandon_step() noexcept {
    table_.targets.clear();
    edits_.end();
    first_slot_ = -1;
}

bool tap::prepare(ggml_cgraph* graph) {
    ++n_graphs_built_;
    n_nodes_added_ = 0;
    sites found{find_attention(graph), find_hidden(graph)};
    for (auto& site : found.attention.sites) {
        site.is_ring = std::ranges::binary_search(ring_layers_, site.il);
    }
    if (!is_discovered_) discover(found);
    auto& mark = graphs_[graph];
    mark = std::make_unique<marked_graph>();
    mark->generation = generation_;
    mark->head = find_head(graph);
    mark->is_ours = !found.attention.sites.empty() || !found.hidden.empty();
    for (const auto& site : found.attention.sites) {
        if (can_bias(site)) add_once(mark->masks, input_of(site.mask));
    }
    try {
        if (!wanted_.is_empty()) add_nodes(graph, found, *mark);
    } catch (const error& why) {  // must not cross llama.cpp
        failure_ = why;
        return false;
    }
    attend_instead(found, *mark);
    return true;
}

void tap::read_rings(std::vector<int> layers, std::size_t n_cells, int n_slots, ring_reader read) {
    table_.ring_columns.assign(static_cast<std::size_t>(n_slots),
                               std::vector<std::int32_t>(n_cells, -1));
    ring_layers_ = std::move(layers);
    for (const int il : ring_layers_) devices_.layers().leave_to_nodes(il);
    read_ring_ = std::move(read);
}

bool tap::wants_ring(int il) const {
    return std::ranges::binary_search(ring_layers_, il) &&
           std::ranges::any_of(all_kinds, [&](row_kind kind) { return wanted_.wants(il, kind); });
}

// The kernel writes rows in the order of the cells.
bool tap::attends(const attention_site& site) const {
    return attends_ && !devices_.layers().holds(site.il) && can_attend(site) &&
           !wants_ring(site.il);
}

void tap::attend_instead(const sites& found, marked_graph& mark) {
    for (const auto& site : found.attention.sites) {
        if (!attends(site)) continue;
        auto& op =
            mark.attends.emplace_back(std::make_unique<attend_op>(site, table_, attend_memory_));
        if (wanted_.edits_heads(site.il) && !wanted_.records_heads(site.il)) {
            auto& edit = new_edit(mark, site.il);
            edit.site = site;
            op->edits = &edit;
        }
        replace_flash(*op, static_cast<int>(table_.scratch.size()));
    }
    n_attended_ = std::max(n_attended_, static_cast<int>(mark.attends.size()));
}

void tap::discover(const sites& found) {
    is_discovered_ = true;
    for (const auto& site : found.attention.sites) {
        devices_.layers().learn(site);
        source_.attention.push_back({site.il, site.n_head, site.n_head_kv, site.scale,
                                     devices_.layers().holds(site.il),
                                     devices_.layers().reduces(site.il), site.sinks != nullptr,
                                     site.output != nullptr, can_bias(site), site.max_bias > 0.0f});
    }
    for (const auto& site : found.hidden) {
        devices_.layers().learn(site);
        source_.n_embd = static_cast<int>(site.output->ne[0]);
        source_.hidden_layers.push_back(site.il);
        const bool is_on_device = devices_.layers().holds_hidden(site.il);
        source_.has_device_hidden |= is_on_device;
        if (is_on_device) source_.edited_on_device.push_back(site.il);
        for (const auto point : edit_points) {
            const auto* const output = is_on_device ? nullptr : found.at(point, site);
            if (output && !device_of(output)) source_.edited_layers[point].push_back(site.il);
        }
    }
}

void tap::add_nodes(ggml_cgraph* graph, sites& found, marked_graph& mark) {
    for (const int il : found.attention.ambiguous) {
        for (const auto kind : all_kinds) {
            if (wanted_.wants(il, kind)) {
                refuse_capture("two attention nodes claim layer ", il);
            }
        }
    }
    auto n_nodes_max = found.attention.sites.size() * 5 + found.hidden.size() * 2;
    n_nodes_max += found.hidden.size() * (edit_points.size() - 1);
    if (!devices_.layers().paths().empty()) {
        const auto n_edits_max = found.attention.sites.size() + found.hidden.size();
        n_nodes_max +=
            devices_.layers().n_tensors_max(wanted_) + n_edits_max * device_edit::n_tensors_max;
    }
    mark.tensors.reset(ggml_init({n_nodes_max * ggml_tensor_overhead() + 1, nullptr, true}));
    std::vector<placed_node> placed;
    const auto new_op = [&]() -> row_op& {
        mark.ops.push_back(std::make_unique<row_op>());
        mark.ops.back()->table = &table_;
        return *mark.ops.back();
    };
    // Before the nodes that read: what is captured is what was edited.
    add_edits(graph, found, mark, placed);
    for (const auto& site : found.attention.sites) {
        if (devices_.layers().holds(site.il) || attends(site)) continue;
        for (const auto kind : all_kinds) {
            if (!wanted_.wants(site.il, kind)) continue;
            placed.push_back(
                {site.node_of(kind), make_row_node(mark.tensors.get(), site, kind, new_op())});
            if (site.flash) break;  // one node serves all kinds
        }
    }
    for (const auto& site : found.hidden) {
        if (!wanted_.wants_hidden(site.il) || devices_.layers().holds_hidden(site.il)) continue;
        placed.push_back({site.output, make_hidden_node(mark.tensors.get(), site, new_op())});
    }
    devices_.add(found.attention, found.hidden, wanted_, first_slot_, mark.tensors.get(), placed,
                 mark.devices);
    if (!insert_nodes(graph, placed)) {
        refuse_capture("the graph has no room for ", placed.size(),
                       " more nodes; capture fewer layers");
    }
    n_nodes_added_ = static_cast<int>(placed.size());
}

void tap::add_edits(ggml_cgraph* graph, sites& found, marked_graph& mark,
                    std::vector<placed_node>& placed) {
    auto* const tensors = mark.tensors.get();
    for (auto& site : found.attention.sites) {
        const auto edit = wanted_.edits_scores(site.il);
        if (edit == score_edit::none || !can_bias(site)) continue;
        auto* const before = site.flash ? site.flash->src[0] : site.softmax->src[0];
        const bool by_head = edit == score_edit::by_head || site.max_bias > 0.0f;
        placed.push_back({before, make_mask_edit(tensors, site, by_head, new_edit(mark, site.il))});
    }
    for (auto& site : found.attention.sites) {
        if (!wanted_.edits_heads(site.il) || !site.output) continue;
        if (devices_.layers().holds(site.il)) {
            mark.device_edits.emplace_back(graph, tensors, site, wanted_.sets_heads(site.il),
                                           placed);
        } else if (!attends(site) || wanted_.records_heads(site.il)) {
            placed.push_back({site.output, make_head_edit(tensors, site, new_edit(mark, site.il))});
            mark.edited.push_back(site.output);
        }
    }
    for (auto& layer : found.hidden) {
        for (const auto point : edit_points) {
            auto* const output = wanted_.edits(layer.il, point) ? found.at(point, layer) : nullptr;
            if (!output) continue;
            if (devices_.layers().holds_hidden(layer.il)) {
                mark.device_edits.emplace_back(graph, tensors, layer, placed);
                continue;
            }
            auto& op = new_edit(mark, layer.il);
            op.point = point;
            placed.push_back({output, make_output_edit(tensors, output, op)});
            mark.edited.push_back(output);
        }
    }
}

edit_op& tap::new_edit(marked_graph& mark, int il) {
    auto& op = *mark.edits.emplace_back(std::make_unique<edit_op>());
    op.table = &edits_;
    op.il = il;
    return op;
}

void tap::keep_on_host(ggml_backend_sched_t sched, const ggml_cgraph* graph) const {
    const auto mark = graphs_.find(graph);
    if (mark == graphs_.end() || ggml_backend_sched_get_n_backends(sched) == 1) return;
    auto* const cpu =
        ggml_backend_sched_get_backend(sched, ggml_backend_sched_get_n_backends(sched) - 1);
    for (auto* const tensor : mark->second->edited)
        ggml_backend_sched_set_tensor_backend(sched, tensor, cpu);
}

bool tap::may_compute(const ggml_cgraph* graph) {
    const auto mark = graphs_.find(graph);
    if (mark == graphs_.end() || !mark->second->is_ours) return true;  // not a graph of ours
    if (mark->second->generation == generation_) return true;
    failure_ = error(errc::unsupported_model,
                     "capture: a graph of an older capture plan was about to run");
    return false;
}

void tap::starts_compute(ggml_backend_sched_t sched, const ggml_cgraph* graph) {
    const auto mark = graphs_.find(graph);
    if (mark == graphs_.end()) return;
    for (const auto& op : mark->second->attends) op->begin();
    // The last layer's output and embeddings come only with logits, which may be most of the work.
    if (auto* const head = mark->second->head; head && is_on_cpu(sched, head))
        head->op = reads_logits_ ? GGML_OP_MUL_MAT : GGML_OP_NONE;
    // Only now does llama.cpp know in which cells the step's tokens are.
    if (std::ranges::any_of(ring_layers_, [this](int il) { return wants_ring(il); })) {
        for (const auto& target : table_.targets) {
            read_ring_(first_slot_ + target.i_stream,
                       table_.ring_columns[static_cast<std::size_t>(target.i_stream)]);
        }
    }
    for (auto* const mask : mark->second->masks) edit_mask(mask, edits_);
    for (const auto& edit : mark->second->device_edits) edit.fill(edits_);
    if (mark->second->devices.shares.empty()) return;
    running_ = mark->second.get();
    device_tap::find_backends(sched, running_->devices);
}

std::optional<error> tap::take_failure() { return std::exchange(failure_, std::nullopt); }

}  // namespace kqview

// The replacements for llama.cpp's four calls into ggml's scheduler, renamed by vendor/llama.cmake.
// Each serves the thread's current tap, if there is one, and calls the real function: compile this
// file without the renaming definitions.
extern "C" {

bool kqview_sched_alloc_graph(ggml_backend_sched_t sched, ggml_cgraph* graph) {
    auto* const tap = kqview::tap::current();
    if (tap && !tap->prepare(graph)) return false;
    if (tap) tap->keep_on_host(sched, graph);
    return ggml_backend_sched_alloc_graph(sched, graph);
}

bool kqview_sched_reserve(ggml_backend_sched_t sched, ggml_cgraph* graph) {
    auto* const tap = kqview::tap::current();
    if (tap && !tap->prepare(graph)) return false;
    if (tap) tap->keep_on_host(sched, graph);
    return ggml_backend_sched_reserve(sched, graph);
}

void kqview_sched_reserve_size(ggml_backend_sched_t sched, ggml_cgraph* graph, size_t* sizes) {
    auto* const tap = kqview::tap::current();
    if (tap) tap->prepare(graph);
    ggml_backend_sched_reserve_size(sched, graph, sizes);
}

ggml_status kqview_sched_graph_compute_async(ggml_backend_sched_t sched, ggml_cgraph* graph) {
    auto* const tap = kqview::tap::current();
    if (tap && !tap->may_compute(graph)) return GGML_STATUS_FAILED;
    if (tap) tap->starts_compute(sched, graph);
    return ggml_backend_sched_graph_compute_async(sched, graph);
}
}
