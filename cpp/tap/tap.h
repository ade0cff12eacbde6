// The tap of one context: adds row nodes to the graphs llama.cpp builds and steers what they write.
// Owner:   the runner, which also owns the context; one tap per context.
// Threads: the engine thread (and the constructor's thread before that thread starts).
// How:     llama.cpp's four calls into ggml's scheduler are renamed to ours (end of tap.cpp). They
//          get a scheduler only, so the tap that is meant is the thread's current one, set by a
//          scope.
// Never:   computes a graph that was built for another plan than the wanted one.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tap/device/device_tap.h"
#include "tap/host/row_op.h"
#include "tap/plan.h"
#include "tap/step_result.h"

namespace kqview {

class tap {
public:
    tap(int n_threads, int n_slots, int n_chunk);
    ~tap();
    tap(const tap&) = delete;
    tap& operator=(const tap&) = delete;

    // Makes this tap the thread's current one while it lives. Needed around every llama.cpp call
    // that builds, reserves or runs a graph.
    class scope {
    public:
        explicit scope(tap& current) noexcept;
        ~scope();
        scope(const scope&) = delete;
        scope& operator=(const scope&) = delete;

    private:
        tap* previous_;
    };
    static tap* current() noexcept;

    // What can be captured; known once llama.cpp reserved its first graph.
    const capture_source& source() const { return source_; }

    // Sets what the graphs must provide from now on. True when that changed: the caller then drops
    // llama.cpp's graphs (context::reserve) before the next decode. Raises out_of_memory where a
    // device has no room for the rows; nothing is wanted then.
    bool want(const graph_plan& plan);

    // The first device that rows come from, or null where all are computed on the CPU.
    ggml_backend_dev_t device() const { return devices_.device(); }

    // Queries of a prompt whose rows one step can provide.
    int n_prompt_rows() const { return devices_.n_prompt_rows(); }

    // The targets of the next decode; valid until end_step.
    void begin_step(std::vector<row_target> targets);

    // Sends the rows of devices off and forgets the targets. Raises internal when a row that was
    // asked for was not written: a buffer with old content must never be handed out.
    step_result end_step();
    void abandon_step() noexcept;

    // What the last step computed is known to be there.
    void note_computed() { devices_.note_computed(); }

    std::shared_ptr<copy_counters> copies() const { return devices_.counters(); }

    // Blocks until the rows of a step, and of all before, are in their blocks. Raises decode.
    void await(transfer_id id) { devices_.await(id); }

    // Called by the hooks. `prepare` adds the nodes; false: see take_failure.
    bool prepare(ggml_cgraph* graph);
    bool may_compute(const ggml_cgraph* graph);
    void starts_compute(ggml_backend_sched_t sched, const ggml_cgraph* graph);
    // Why a hook refused, empty when none did.
    std::string take_failure();

    // Nodes added to the graph that was prepared last; 0 when nothing is captured.
    int n_nodes_added() const { return n_nodes_added_; }
    std::uint64_t n_graphs_built() const { return n_graphs_built_; }

private:
    struct marked_graph;

    struct sites;

    void discover(const sites& found);
    bool add_nodes(ggml_cgraph* graph, const sites& found, marked_graph& mark);

    graph_plan wanted_;
    std::uint64_t generation_ = 0;  // of `wanted_`
    capture_source source_;
    bool is_discovered_ = false;
    // llama.cpp keeps a handful of graphs and reuses their addresses; an entry is replaced then.
    std::unordered_map<const ggml_cgraph*, std::unique_ptr<marked_graph>> graphs_;
    row_table table_;
    device_tap devices_;
    marked_graph* running_ = nullptr;  // the graph of the step, with rows on devices
    std::string failure_;
    int n_nodes_added_ = 0;
    std::uint64_t n_graphs_built_ = 0;
};

}  // namespace kqview
