// Rows of layers whose keys are not in host memory: stock ggml nodes that compute them where the
// keys are. A device leaves the rows of the last queries of each stream, head by head, padded to
// the graph's cells; tap/device/transfer.h brings them to the host.
// Threads: the one that builds the graph (the engine thread, or the constructor's).
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "tap/graph.h"
#include "tap/plan.h"

namespace kqview {

// How many heads of a layer a device reduces.
int n_heads_reduced(const device_want& want, const attention_site& site);

// The device that holds these keys, or their weights where no cache keeps them; null: host memory.
ggml_backend_dev_t device_of(const ggml_tensor* keys);

// What one node leaves on its device, in memory as ne=[n_cells, n_rows, n_head, n_stream],
// contiguous; n_head is 1 where heads were reduced.
struct device_rows {
    std::vector<int> layers;  // one, or those that were joined here
    device_want want;
    ggml_tensor* tensor = nullptr;
    int n_queries = 0;  // of a stream in the graph; the rows are of the last ones
    std::size_t n_cells = 0;
    std::size_t n_rows = 0;
    std::size_t n_head = 0;
    int n_heads_reduced = 0;  // of all `layers` together
};

// Layers that are joined to one row each query: they share their mask and how many heads count.
// Their rows are computed at neighbouring places of `stack` and reduced when the last one is there.
struct joined_layers {
    device_want want;
    const ggml_tensor* mask = nullptr;
    int n_heads = 0;                           // that each of them reduces
    std::vector<const attention_site*> sites;  // in the graph's order
    // F32 ne=[n_cells * n_rows * n_stream, n_layers]; memory, computed by no node.
    ggml_tensor* stack = nullptr;
    // The newest part of the stack. Each names the one before as a source that it does not read,
    // and so does what joins them: no backend may change their order then.
    ggml_tensor* last_part = nullptr;
    int n_rows = 0;
};

// Lists of heads in the memory of one device, for nodes that pick heads before they reduce them.
// Owner:   device_tap. Threads: the engine thread (and the constructor's thread before that thread
//          starts).
class head_lists {
public:
    explicit head_lists(ggml_backend_dev_t device) : device_(device) {}

    // Keeps these lists, each for `n_streams` streams, and no others: graphs that read one of the
    // others may not run any more. Raises out_of_memory.
    void keep(std::set<std::vector<int>> lists, int n_streams);

    // I32 ne=[n_heads, n_streams], the same list for each stream; null where it is not kept.
    ggml_tensor* find(const std::vector<int>& heads) const;

private:
    ggml_backend_dev_t device_;
    std::set<std::vector<int>> lists_;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors_{nullptr, ggml_free};
    std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer_{
        nullptr, ggml_backend_buffer_free};
    std::vector<ggml_tensor*> found_;  // in the order of lists_
};

// Builds the nodes of one graph on one device. A node that the device cannot compute is never added
// to a graph: ggml would abort, or carry all keys to the host at every step.
class device_node_builder {
public:
    // `lists` must have the heads that are picked; null: only to ask what the device can compute.
    device_node_builder(ggml_context* tensors, ggml_backend_dev_t device, const head_lists* lists)
        : tensors_(tensors), device_(device), lists_(lists) {}

    // The rows of the last `n_rows` queries. Null tensor: see failure().
    device_rows rows_of(const attention_site& site, const device_want& want, int n_rows);

    // One layer's part of a stack, a tensor that belongs there; null: see failure(). And, when all
    // parts are made, the joined row.
    ggml_tensor* part_of(joined_layers& joined, const attention_site& site);
    device_rows join(const joined_layers& joined);

    // The last `n_rows` rows of a layer's output, ne=[n_embd, n_rows].
    ggml_tensor* hidden_of(const hidden_site& site, int n_rows);

    // The nodes made since the last call, in the order they need.
    std::vector<ggml_tensor*> take_nodes();
    const std::string& failure() const { return failure_; }

    // Tensors that each of the calls above makes at most.
    static constexpr int n_tensors_max = 20;

private:
    ggml_tensor* add(ggml_tensor* node);
    ggml_tensor* contiguous(ggml_tensor* node);
    ggml_tensor* last_queries(ggml_tensor* all, int n_rows);
    ggml_tensor* mask_of(const attention_site& site, int n_rows);
    ggml_tensor* product_of(const attention_site& site, int n_rows);
    ggml_tensor* scores_of(const attention_site& site, int n_rows);
    ggml_tensor* probs_of(const attention_site& site, int n_rows);
    ggml_tensor* values_of(const attention_site& site, row_kind kind, int n_rows);
    ggml_tensor* reduced(ggml_tensor* values, const device_want& want);
    ggml_tensor* pooled(ggml_tensor* rows, std::int64_t n, row_reduction reduce);
    ggml_tensor* masked(ggml_tensor* values, const attention_site& site, row_kind kind, int n_rows,
                        bool is_reduced);
    bool check(const attention_site& site, row_kind kind);

    ggml_context* tensors_;
    ggml_backend_dev_t device_;
    const head_lists* lists_;
    std::vector<ggml_tensor*> nodes_;
    std::unordered_map<const ggml_tensor*, ggml_tensor*>
        masks_;  // F32 and contiguous, by llama.cpp's
    std::string failure_;
};

}  // namespace kqview
