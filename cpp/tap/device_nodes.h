// Rows of layers whose keys are not in host memory: stock ggml nodes that compute them where the keys are.
// A device leaves the rows of the last queries of each stream, head by head, padded to the graph's cells;
// tap/transfer.h brings them to the host.
// Threads: the one that builds the graph (the engine thread, or the constructor's).
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "tap/graph.h"
#include "tap/plan.h"

namespace kqview {

// The device that holds these keys, or their weights where no cache keeps them; null: host memory.
ggml_backend_dev_t device_of(const ggml_tensor* keys);

// What one node leaves on its device: ne=[n_cells, n_rows, n_head, n_stream], contiguous.
struct device_rows {
    int il = 0;
    row_kind kind = row_kind::logits;
    row_form form = row_form::device_f32;
    ggml_tensor* tensor = nullptr;
    int n_queries = 0;  // of a stream in the graph; the rows are of the last ones
};

// Builds the nodes of one graph on one device. A node that the device cannot compute is never added to a
// graph: ggml would abort, or carry all keys to the host at every step.
class device_node_builder {
public:
    device_node_builder(ggml_context* tensors, ggml_backend_dev_t device)
        : tensors_(tensors), device_(device) {}

    // The rows of the last `n_rows` queries. Null tensor: see failure().
    device_rows rows_of(const attention_site& site, row_kind kind, row_form form, int n_rows);

    // The last `n_rows` rows of a layer's output, ne=[n_embd, n_rows].
    ggml_tensor* hidden_of(const hidden_site& site, int n_rows);

    // The nodes made since the last call, in the order they need.
    std::vector<ggml_tensor*> take_nodes();
    const std::string& failure() const { return failure_; }

    // Tensors that rows_of makes at most.
    static constexpr int n_tensors_max = 16;

private:
    ggml_tensor* add(ggml_tensor* node);
    ggml_tensor* contiguous(ggml_tensor* node);
    ggml_tensor* last_queries(ggml_tensor* all, int n_rows);
    ggml_tensor* mask_of(const attention_site& site, int n_rows);
    ggml_tensor* product_of(const attention_site& site, int n_rows);
    ggml_tensor* scores_of(const attention_site& site, int n_rows, bool with_mask);
    ggml_tensor* probs_of(const attention_site& site, int n_rows);
    bool check(const attention_site& site, row_kind kind);

    ggml_context* tensors_;
    ggml_backend_dev_t device_;
    std::vector<ggml_tensor*> nodes_;
    std::unordered_map<const ggml_tensor*, ggml_tensor*>
        masks_;  // F32 and contiguous, by llama.cpp's
    std::string failure_;
};

}  // namespace kqview
