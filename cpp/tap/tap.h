// The tap of one context: adds row nodes to the graphs that llama.cpp builds, and sets up what
// those nodes write in each step.
// Owner:   the runner, which also owns the context; one tap per context.
// Threads: the engine thread (and the constructor's thread before that thread starts).
// How:     vendor/llama.cmake renames four of llama.cpp's calls into ggml's scheduler; the
//          functions at the end of tap.cpp take their place. They receive only a scheduler, so the
//          tap they serve is the thread's current one, set by a tap::scope.
// Never:   computes a graph that was built for a plan other than the wanted one.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "llama/devices.h"
#include "tap/device/device_tap.h"
#include "tap/graph.h"
#include "tap/host/attend_op.h"
#include "tap/host/edit_op.h"
#include "tap/host/row_op.h"
#include "tap/host/row_sink.h"
#include "tap/plan.h"
#include "tap/step_result.h"

namespace kqview {

struct tap_options {
    int n_threads = 1;
    int n_slots = 1;
    int n_chunk = 1;          // most tokens of a step
    bool attends = false;     // the CPU's attention of few queries is ours, not llama.cpp's
    bool has_window = false;  // a query may not see all tokens before it
    rows_place device_rows = rows_place::automatic;
};

class tap {
public:
    explicit tap(const tap_options& options);
    ~tap();

    // Makes this tap the thread's current one for the lifetime of the scope. Required around every
    // llama.cpp call that builds, reserves or runs a graph.
    class scope;
    static tap* current() noexcept;

    // Layers whose caches are rings of so many cells, and what tells the position of each cell of a
    // slot's, -1 for none, while a step runs. Call before the first step.
    using ring_reader = std::function<void(slot_id slot, std::span<std::int32_t> positions)>;
    void read_rings(std::vector<int> layers, std::size_t n_cells, int n_slots, ring_reader read);

    // What can be captured; known once llama.cpp has reserved its first graph.
    const capture_source& source() const { return source_; }

    // Whether the graphs provide all that `plan` asks for, with no other nodes.
    bool serves(const graph_plan& plan) const;
    // Sets what the graphs must provide from here on; slots whose rows they provide already stay
    // where the nodes are the same, so that texts may take turns in them. Memory of devices that
    // the earlier graphs write to is freed, so no step may be running (context::synchronize), and
    // llama.cpp's graphs must be dropped before the next decode (context::reserve). Raises
    // out_of_memory if a device has no room for the rows; nothing is wanted afterwards.
    void want(const graph_plan& plan);
    const graph_plan& wanted() const { return wanted_; }
    // The part for layers whose keys are on a device.
    device_tap& devices() { return devices_; }
    const device_tap& devices() const { return devices_; }

    // The targets of the next decode, valid until end_step, its tokens, of adjacent slots, and
    // whether anybody reads their logits.
    void begin_step(std::vector<row_target> targets, std::span<const step_token> tokens,
                    bool reads_logits);

    // Starts the transfer of device rows and drops the targets. Raises internal if a requested row
    // was not written, or an edit not made: a buffer with stale content must never be handed out.
    step_result end_step();
    void abandon_step() noexcept;

    // Called by the hooks. `prepare` adds the nodes; if it returns false, see take_failure.
    bool prepare(ggml_cgraph* graph);
    bool may_compute(const ggml_cgraph* graph);
    // Has the CPU compute what functions of the host change there.
    void keep_on_host(ggml_backend_sched_t sched, const ggml_cgraph* graph) const;
    void starts_compute(ggml_backend_sched_t sched, const ggml_cgraph* graph);
    // Why a hook refused; none if none did.
    std::optional<error> take_failure();

    // Number of nodes added to the last prepared graph; 0 when nothing is captured.
    int n_nodes_added() const { return n_nodes_added_; }
    std::uint64_t n_graphs_built() const { return n_graphs_built_; }
    // The most layers of a graph so far whose attention is ours.
    int n_attended() const { return n_attended_; }

private:
    struct marked_graph;

    struct sites;

    void discover(const sites& found);
    bool attends(const attention_site& site) const;
    bool wants_ring(int il) const;
    void add_nodes(ggml_cgraph* graph, sites& found, marked_graph& mark);
    void add_edits(ggml_cgraph* graph, sites& found, marked_graph& mark,
                   std::vector<placed_node>& placed);
    edit_op& new_edit(marked_graph& mark, int il);
    void attend_instead(const sites& found, marked_graph& mark);

    graph_plan wanted_;
    int first_slot_ = -1;           // of the step; -1: between steps
    bool reads_logits_ = true;      // of the step
    std::uint64_t generation_ = 0;  // of `wanted_`
    capture_source source_;
    bool is_discovered_ = false;
    row_table table_;
    attend_memory attend_memory_;
    edit_table edits_;
    std::vector<int> ring_layers_;
    ring_reader read_ring_;
    const bool attends_;
    device_tap devices_;
    // llama.cpp keeps a few graphs and reuses their addresses; the entry is replaced when it does.
    std::unordered_map<const ggml_cgraph*, std::unique_ptr<marked_graph>> graphs_;
    marked_graph* running_ = nullptr;  // graph of this step, if it has device rows
    std::optional<error> failure_;
    int n_nodes_added_ = 0;
    std::uint64_t n_graphs_built_ = 0;
    int n_attended_ = 0;
};

class tap::scope {
public:
    explicit scope(tap& current) noexcept;
    ~scope();
    scope(const scope&) = delete;
    scope& operator=(const scope&) = delete;

private:
    tap* previous_;
};

}  // namespace kqview
