// The tap's part for layers whose keys are on a device: the nodes a graph gets there, the memory
// their results need, and the copies of the rows into the blocks.
// Owner:   the tap.
// Threads: the engine thread (and the constructor's thread before that thread starts).
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <exception>
#include <limits>
#include <vector>

#include "tap/device/device_copies.h"
#include "tap/device/device_layers.h"
#include "tap/device/transfer.h"
#include "tap/graph.h"
#include "tap/host/row_sink.h"
#include "tap/plan.h"
#include "tap/step_result.h"

namespace kqview {

class device_tap {
public:
    explicit device_tap(const device_layers::options& wanted) : layers_(wanted) {}

    device_layers& layers() { return layers_; }
    const device_layers& layers() const { return layers_; }

    // Allocates the result buffers for graphs of `plan`. Raises out_of_memory. Waits for transfers
    // in flight; no step may be running.
    void reserve(const graph_plan& plan);
    // Raises out_of_memory if a device has no room for what backends take themselves while they
    // compute the rows of `plan`: without, they end the process or lose the device. Call when all
    // else is allocated.
    void check_room(const graph_plan& plan);

    // The most prompt queries whose rows one step can provide.
    int n_prompt_rows() const { return n_prompt_rows_; }

    // Bytes that devices would hold for the rows of `plan`, all copies of them included.
    std::size_t bytes_for(const graph_plan& plan) const;

    // Creates the nodes that `plan` wants for a graph's sites, of those of its slots that are in
    // the graph. `first_slot`: that of the step; -1: the graph is only reserved. Raises
    // unsupported_model if a node is impossible, and out_of_memory.
    void add(const attention_sites& attention, const std::vector<hidden_site>& states,
             const graph_plan& plan, int first_slot, ggml_context* tensors,
             std::vector<placed_node>& placed, device_part& part);
    // Call when a graph is about to run: finds the backend that computes each result.
    static void find_backends(ggml_backend_sched_t sched, device_part& part);

    // Starts the transfer of the rows that the targets want. Returns the id to await, or 0 if
    // everything is there. Raises decode.
    transfer_id start(row_table& table, const device_part& part);
    // The compute of the last step is known to have ended.
    void note_computed();
    // Blocks until the rows of a step, and of all earlier ones, are in their blocks. Raises decode.
    void await(transfer_id id);
    // Blocks until nothing that was started is in flight; `await` still raises what failed. Call
    // before keys change in another way than by being appended: rows may be computed from them.
    void settle() noexcept;

private:
    std::exception_ptr await_all(transfer_id id);

    device_layers layers_;
    int n_prompt_rows_ = std::numeric_limits<int>::max();
    transfer_id n_transfers_ = 0;
};

}  // namespace kqview
