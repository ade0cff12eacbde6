// The layers whose keys are on devices, as the largest graph shows them: where there the rows of a
// plan are computed, and what they take.
// Owner:   the device tap.
// Threads: the engine thread (and the constructor's thread before that thread starts).
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "llama/devices.h"
#include "tap/device/device_nodes.h"
#include "tap/device/row_proof.h"
#include "tap/device/transfer.h"
#include "tap/graph.h"
#include "tap/plan.h"
#include "tap/step_result.h"

namespace kqview {

// One device's transfer to the host, and the constants that its nodes read.
struct device_path {
    explicit device_path(ggml_backend_dev_t device, copy_counters& counters)
        : way(device, counters), constants(device) {}
    transfer way;
    node_constants constants;
    // Bytes free on the device when its buffers last changed; none if it does not tell.
    std::optional<std::size_t> n_free;
    bool is_beside = false;              // rows are computed beside the next step, where they can
    std::map<row_shape, bool> proven{};  // kernels give what nodes give
    // Bytes that went between such changes: the backend keeps them for products. Others may
    // have taken them, so never more than the products of any accepted plan need.
    std::size_t n_taken = 0;
    std::size_t n_accepted = 0;

    void note_free();
    void note_taken();
};

class device_layers {
public:
    // A step has one token of each slot, or at most `n_chunk` tokens of one slot's prompt.
    struct options {
        int n_slots = 1;
        int n_chunk = 1;          // most tokens of a step
        bool has_window = false;  // a query may not see all tokens before it
        rows_place place = rows_place::automatic;
    };
    explicit device_layers(const options& wanted) : options_(wanted) {}

    // Records a site of the largest graph; called before anything is captured.
    void learn(const attention_site& site);
    void learn(const hidden_site& site);
    // Rows of this layer are not computed by a kernel, whose columns are cells in their order.
    void leave_to_nodes(int il);
    // Where a kernel gives other values than ggml's nodes on the device at hand, they compute rows.
    void prove_kernels(const graph_plan& plan);

    const options& given() const { return options_; }
    const std::shared_ptr<copy_counters>& counters() const { return counters_; }
    const std::vector<std::unique_ptr<device_path>>& paths() const { return paths_; }
    // The first device that produces rows, of those that copy while they compute if there are any;
    // or null.
    ggml_backend_dev_t device() const;
    bool holds(int il) const { return layers_.contains(il); }
    bool holds_hidden(int il) const { return hidden_.contains(il); }
    // Where those are that it holds.
    device_path& path_of(int il) const { return *layers_.at(il).on; }
    device_path& path_of_hidden(int il) const { return *hidden_.at(il).on; }
    // True if a layer's device can reduce its rows; checked with the site given to `learn`.
    bool reduces(int il) const { return holds(il) && layers_.at(il).is_reducible; }

    // Whether a graph's rows of these layers are computed from saved queries; see side_graph.
    bool goes_beside(const graph_plan& plan, const device_path& on) const;
    // Whether a kernel of ours does that.
    bool goes_by_kernel(const graph_plan& plan, const device_path& on) const;
    bool saves_mask(const graph_plan& plan, int il) const;

    // The most prompt queries of one step whose rows fit; no limit if none are wanted.
    int n_prompt_rows(const graph_plan& plan) const;
    // Bytes on one device.
    transfer::sizes sizes_of(const graph_plan& plan, const device_path& on) const;
    // Bytes that the products of one layer may take from the backend's own memory: keys made F32,
    // queries and results, each once. An upper bound for ggml-cuda: many kernels take less.
    std::size_t product_bytes_of(const graph_plan& plan, const device_path& on) const;
    // Upper bound of the tensors that device_tap::add creates.
    std::size_t n_tensors_max(const graph_plan& plan) const;
    // What nodes on one device read.
    node_constants::wanted constants_of(const graph_plan& plan, const device_path& on) const;

private:
    struct layer {
        device_path* on;
        std::size_t n_head;
        std::size_t n_cells;
        int n_queries_least;  // without a cache, a step has the whole prompt
        bool is_reducible;
        std::size_t query_bytes;  // of one token
        bool can_be_beside;       // see side_graph::can_compute
        bool can_be_by_kernel;    // see row_kernels
        row_shape shape;
        bool is_masked;           // by more than how many columns there are
        const ggml_tensor* mask;  // tells masks apart; not to be read
        std::size_t key_bytes;    // of one stream, made F32 for its products; 0 = read as they are
    };
    struct hidden_layer {
        device_path* on;
        std::size_t n_embd;
    };

    device_path& path_to(ggml_backend_dev_t device);
    std::size_t bytes_of_row(const graph_plan& plan, int il) const;
    std::size_t work_bytes_of_row(const graph_plan& plan, int il) const;
    std::size_t n_rows_reserved(const graph_plan& plan) const;
    std::size_t kernel_bytes(const graph_plan& plan, const device_path& on) const;

    const options options_;
    const std::shared_ptr<copy_counters> counters_ = std::make_shared<copy_counters>();
    std::vector<std::unique_ptr<device_path>> paths_;
    std::unordered_map<int, layer> layers_;
    std::unordered_map<int, hidden_layer> hidden_;
    bool has_host_layers_ = false;
};

}  // namespace kqview
