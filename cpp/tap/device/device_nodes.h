// Rows of layers whose keys are not in host memory: stock ggml nodes compute them where the keys
// are. The result on the device has the rows of the last queries of each stream, head by head,
// padded to the graph's cells; tap/device/transfer.h copies them to the host.
// Threads: the thread that builds the graph (the engine thread, or the constructor's).
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tap/graph.h"
#include "tap/plan.h"

namespace kqview {

// Number of heads of a layer that a device reduces.
int n_heads_reduced(const device_want& want, const attention_site& site);

bool is_cuda(ggml_backend_dev_t device);

// The device that holds these keys, or their weights if no cache stores them; null: host memory.
ggml_backend_dev_t device_of(const ggml_tensor* keys);

// The result of one node on its device, laid out as ne=[n_values, n_rows, n_head, n_stream],
// contiguous; a value is that of a cell, or the sum over a span; n_head is 1 after a reduction over
// heads.
struct device_rows {
    std::vector<int> layers;  // one layer, or the layers joined here
    device_want want;
    ggml_tensor* tensor = nullptr;
    int n_queries = 0;         // per stream in the graph; the rows belong to the last ones
    slot_range streams{0, 1};  // of the graph
    std::size_t n_values = 0;
    std::size_t n_rows = 0;
    std::size_t n_head = 0;
    int n_heads_reduced = 0;  // over all `layers` together
};

// Layers that are joined to one row per query. They share their mask and the number of heads to
// reduce. Their rows are computed into adjacent parts of `stack` and reduced once the last part is
// there.
struct joined_layers {
    device_want want;
    const ggml_tensor* mask = nullptr;
    int n_heads = 0;                           // reduced in each layer
    std::vector<const attention_site*> sites;  // in graph order
    // F32 ne=[n_cells * n_rows * n_stream, n_layers]; only memory, no node computes it.
    ggml_tensor* stack = nullptr;
    // The newest part of the stack. Each part, and the node that joins them, names the previous
    // part as a source that it does not read; this stops every backend from reordering them.
    ggml_tensor* last_part = nullptr;
    int n_rows = 0;
};

// Constants in one device's memory that nodes read: lists of heads, which are selected before they
// are reduced, and matrices that sum a row over spans.
// Owner:   device_tap.
// Threads: the engine thread (and the constructor's thread before that thread starts).
class node_constants {
public:
    using heads = std::vector<int>;
    using spans = std::vector<column_range>;

    struct wanted {
        std::set<heads> lists;
        std::map<spans, std::size_t> matrices;  // and the cells of the longest row that each sums

        bool operator==(const wanted&) const = default;
    };

    explicit node_constants(ggml_backend_dev_t device) : device_(device) {}

    // Keeps these, the lists each repeated for `n_streams` streams, and frees all others: graphs
    // that read one of those must not run again. Raises out_of_memory.
    void keep(wanted all, int n_streams);

    // I32 ne=[n_heads, n_streams], the same list for each stream; null if the list is not kept.
    ggml_tensor* find(const heads& wanted) const;
    // F32 ne=[n_cells, n_spans], 1 where a cell is in the span, else 0; null if it is not kept.
    ggml_tensor* find(const spans& wanted) const;

private:
    ggml_backend_dev_t device_;
    wanted kept_;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors_{nullptr, ggml_free};
    std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer_{
        nullptr, ggml_backend_buffer_free};
    std::vector<ggml_tensor*> found_;  // in the order of the lists, then of the matrices
};

// Builds the nodes of one graph on one device. Raises unsupported_model instead of adding a node
// that the device cannot compute: ggml would abort, or copy all keys to the host in every step.
class device_node_builder {
public:
    // `constants` must contain every selection of heads and all spans; null: only to check what the
    // device supports. `has_window`: a query may not see all tokens before it.
    device_node_builder(ggml_context* tensors, ggml_backend_dev_t device,
                        const node_constants* constants, bool has_window)
        : tensors_(tensors), device_(device), constants_(constants), has_window_(has_window) {}

    // The streams whose rows the following calls make; at first all.
    void of_streams(const slot_range& streams) { streams_ = streams; }

    // The rows of the last `n_rows` queries.
    device_rows rows_of(const attention_site& site, const device_want& want, int n_rows);

    // part_of: one layer's part of the stack, which the caller places there. join: the joined row,
    // once all parts are made.
    ggml_tensor* part_of(joined_layers& joined, const attention_site& site);
    device_rows join(const joined_layers& joined);

    // A copy of the last query of each stream, ne=[n_embd_head, 1, n_head, n_stream].
    ggml_tensor* last_query_of(const attention_site& site);

    // A copy of the mask of the last query of each stream, in its own type.
    ggml_tensor* last_mask_of(const attention_site& site);

    // The last `n_rows` rows of a layer's output, ne=[n_embd, n_rows].
    ggml_tensor* hidden_of(const hidden_site& site, int n_rows);

    // The nodes made since the last call, in the order in which they must run.
    std::vector<ggml_tensor*> take_nodes();

    // The most tensors that one of the calls above creates.
    static constexpr int n_tensors_max = 20;

private:
    ggml_tensor* add(ggml_tensor* node);
    ggml_tensor* contiguous(ggml_tensor* node);
    slot_range streams_in(const ggml_tensor* all) const;
    ggml_tensor* queries(ggml_tensor* all, int first, int n_rows, const slot_range& streams);
    ggml_tensor* last_queries(ggml_tensor* all, int n_rows);
    ggml_tensor* mask_of(const attention_site& site, int n_rows);
    ggml_tensor* softmax_mask_of(const attention_site& site, int n_rows);
    ggml_tensor* product_of(const attention_site& site, int n_rows);
    ggml_tensor* product_by_blocks(const attention_site& site);
    ggml_tensor* scores_of(const attention_site& site, int n_rows);
    ggml_tensor* values_of(const attention_site& site, row_kind kind, int n_rows);
    ggml_tensor* reduced(ggml_tensor* values, const device_want& want);
    ggml_tensor* summed(ggml_tensor* probs, const std::vector<column_range>& spans);
    ggml_tensor* pooled(ggml_tensor* rows, std::int64_t n, row_reduction reduce);
    ggml_tensor* masked(ggml_tensor* values, const attention_site& site, row_kind kind, int n_rows,
                        bool is_reduced);

    ggml_context* tensors_;
    ggml_backend_dev_t device_;
    const node_constants* constants_;
    bool has_window_;
    slot_range streams_{0, std::numeric_limits<int>::max()};
    std::vector<ggml_tensor*> nodes_;
    // F32 and contiguous, by llama.cpp's mask and the number of rows.
    std::map<std::pair<const ggml_tensor*, int>, ggml_tensor*> masks_;
    std::unordered_map<const ggml_tensor*, ggml_tensor*> narrowed_masks_;  // llama.cpp's own type
};

}  // namespace kqview
