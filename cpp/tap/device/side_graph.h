// Computes a step's rows beside the next step. The step's own graph only saves its queries; when it
// has been started, the queries are copied, and on the copy stream a graph of its own computes rows
// from them and from the keys in the cache. The step after it may run meanwhile: it adds keys
// behind those that the rows are about, and changes none of them. Before anything that does, the
// caller waits (device_tap::settle).
// Owner:   the device_part of a graph.
// Threads: the engine thread.
#pragma once

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tap/device/device_arena.h"
#include "tap/graph.h"
#include "tap/step_result.h"

namespace kqview {

class side_graph {
public:
    // `arena` has the copies of the queries at its front, at the offsets of the saved ones.
    // `counters` get the memory that is not in the arena, for as long as this graph lives.
    side_graph(ggml_backend_dev_t device, device_arena& arena, std::size_t n_tensors,
               std::shared_ptr<copy_counters> counters);
    ~side_graph();

    ggml_context* tensors() const { return tensors_.get(); }
    device_arena& arena() const { return arena_; }

    // Whether rows of a step with this attention can be computed later: its keys stay where they
    // are.
    static bool can_compute(const attention_site& site);

    // The same attention of the queries saved at `offset`, one a stream, for nodes of this graph.
    // `saved`: the tensor there; `is_copy`: it has just those queries, not llama.cpp's own layout.
    // Null keys: no room for its mask.
    attention_site site_of(const attention_site& site, const ggml_tensor* saved, std::size_t offset,
                           bool is_copy, bool needs_mask);

    void add(const std::vector<ggml_tensor*>& nodes);
    // Allocates what is not placed. False: the device has no room.
    bool allocate();

    // What the masks of the next run show: `n_visible` cells of a stream.
    struct stream_view {
        int i_stream;
        int n_visible;
    };
    // Queues the graph, with its masks, on `stream`. `parity` alternates: the masks of the run
    // before may still be read. Raises decode.
    void run(ggml_backend_t stream, std::span<const stream_view> streams, std::size_t parity);

private:
    struct mask {
        ggml_tensor* tensor;  // F32 ne=[n_cells, 1, 1, n_stream]
        std::array<std::vector<float>, 2> values;
    };

    device_arena& arena_;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors_;
    ggml_cgraph* graph_;
    std::unique_ptr<ggml_gallocr, decltype(&ggml_gallocr_free)> memory_;
    std::map<std::pair<int, int>, mask> masks_;  // by cells and streams
    const std::shared_ptr<copy_counters> counters_;
    std::size_t allocated_bytes_ = 0;
};

}  // namespace kqview
