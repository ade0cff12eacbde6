// What to capture: the rows that one request asks for, their memory layout, and the union of all
// plans that a graph must serve. Pure values; no ggml, no threads.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <vector>

namespace kqview {

// Where in a layer values of its tokens can be edited.
enum class edit_point : std::uint8_t {
    residual,       // the output of the layer
    attention_out,  // what its attention adds to the residual stream
    mlp_out,        // what its feed-forward part adds
};
constexpr std::array edit_points{edit_point::residual, edit_point::attention_out,
                                 edit_point::mlp_out};
constexpr const char* name_of(edit_point point) {
    constexpr std::array names{"residual", "attention_out", "mlp_out"};
    return names[static_cast<std::size_t>(point)];
}

template <typename Value>
class by_point {
public:
    Value& operator[](edit_point point) { return values_[static_cast<std::size_t>(point)]; }
    const Value& operator[](edit_point point) const {
        return values_[static_cast<std::size_t>(point)];
    }
    bool operator==(const by_point&) const = default;

private:
    std::array<Value, edit_points.size()> values_{};
};

// A layer of the model that has attention, as found in llama.cpp's own graph.
struct attention_layer {
    int il;
    int n_head;
    int n_head_kv;
    float scale;                // what llama.cpp multiplies K·Q with before the softmax
    bool is_on_device = false;  // keys are not in host memory: the device computes the rows
    bool is_reducible = false;  // and that device can reduce them
    bool has_sinks = false;     // part of the softmax goes to no token: rows add up to less than 1
    bool edits_heads = false;   // what its heads give out can be scaled
    bool edits_scores = false;  // biases can be added to its scores
    bool has_alibi = false;     // its mask is multiplied by a slope of each head

    bool operator==(const attention_layer&) const = default;
};

// What a model has to capture; found in the first graph that llama.cpp reserves.
struct capture_source {
    std::vector<attention_layer> attention;  // ascending
    std::vector<int> hidden_layers;          // layers whose output is in the graph, ascending
    int n_embd = 0;                          // of a hidden state
    bool has_device_hidden = false;          // some of these layers are on a device
    // Layers that functions of the host can edit there.
    by_point<std::vector<int>> edited_layers{};
    std::vector<int> edited_on_device{};  // layers to whose output nodes of a device can add
};

enum class row_kind : std::uint8_t {
    logits,  // K·Q, before scale, mask and softmax
    scores,  // what enters the softmax
    probs,   // what leaves it
};

enum class row_type : std::uint8_t { f32, f16 };

constexpr float largest_f16 = 65504.0f;  // the largest finite float16

enum class row_reduction : std::uint8_t {
    none,
    mean_heads,  // over the heads of a layer
    max_heads,
    mean,  // over layers and heads
    max,
};

constexpr bool is_mean(row_reduction reduce) {
    return reduce == row_reduction::mean || reduce == row_reduction::mean_heads;
}

// What a row holds for a column that its query does not see.
constexpr float unseen_value(row_kind kind) {
    return kind == row_kind::probs ? 0.0f : -std::numeric_limits<float>::infinity();
}

// Columns [start, stop) of a row, as far as the row has them.
struct column_range {
    static constexpr int no_stop = std::numeric_limits<int>::max();  // grows with the context

    int start = 0;
    int stop = no_stop;

    auto operator<=>(const column_range&) const = default;
};

// Ranges cut where any of them begins or ends, so that a row's columns are read once, however much
// the ranges overlap.
struct cut_ranges {
    struct part {
        std::size_t first, last;  // segments [first, last)
    };
    // Columns [begin, end) of a tile, all of one segment.
    struct piece {
        int tile, begin, end;
        std::size_t segment;
    };

    std::vector<int> cuts;       // ascending; segment i has the columns [cuts[i], cuts[i + 1])
    std::vector<part> of_range;  // the segments of each range, in the order of the ranges

    explicit cut_ranges(const std::vector<column_range>& ranges);

    std::size_t n_segments() const { return cuts.empty() ? 0 : cuts.size() - 1; }
    // The segments that belong to a range, up to n_columns, cut where a tile ends as well.
    std::vector<piece> pieces(int n_columns, int n_of_tile) const;
};

constexpr std::size_t bytes_of(row_type type) { return type == row_type::f32 ? 4 : 2; }

constexpr int max_kernel_top_k = 1024;  // values that a kernel of ours finds in a row of a device

// The form in which a graph leaves a layer's rows on their device. The remaining work, such as
// finding the k largest values, is done on the host after the rows arrive. (The host's kernel
// produces every form of row itself.)
struct device_want {
    row_kind kind = row_kind::logits;
    row_type type = row_type::f32;
    row_reduction reduce = row_reduction::none;  // none: one row per head
    std::vector<int> heads;           // heads to reduce, ascending; empty: all heads of the layer
    std::vector<int> layers;          // layers reduced to one row by mean or max, ascending
    std::vector<column_range> spans;  // their sums instead of whole rows; only with reduce none
    bool is_long = false;             // more values than a kernel of ours finds

    // Not <=>: before LLVM 17, and so in Xcode 15, vectors have none.
    auto all() const { return std::tie(kind, type, reduce, heads, layers, spans, is_long); }
    bool operator<(const device_want& other) const { return all() < other.all(); }
    bool operator==(const device_want&) const = default;
    // True for one row over several layers. A reduction over layers runs either on one device or on
    // the host.
    bool joins_layers() const { return !layers.empty(); }
    std::size_t element_bytes() const { return bytes_of(type); }
    // Values that a row of `n_cells` cells leaves.
    std::size_t n_values(std::size_t n_cells) const {
        return spans.empty() ? n_cells : spans.size();
    }
};

struct capture_options {
    row_kind kind = row_kind::logits;
    row_type type = row_type::f32;
    std::optional<std::vector<int>> layers;  // none = all
    std::optional<std::vector<int>> heads;   // none = all
    row_reduction reduce = row_reduction::none;
    int top_k = 0;                    // keep the k largest of each row; 0 = whole rows
    std::vector<column_range> spans;  // sums over these columns instead of rows; for probs
    std::vector<int> hidden;          // layers whose output is captured too
    // Size of the vocabulary if the logits of the model's output are captured too; 0: they are not.
    int n_vocab = 0;
};

// Where the parts of `n_queries` captured queries of `n_columns` columns lie in their block. Values
// come first: (row, query, value). A row belongs to one head, or to the heads reduced into it.
struct row_layout {
    int n_queries = 1;
    int n_columns = 0;
    int n_values = 0;  // of a row: n_columns, or fewer with top_k, or one for each span
    std::size_t positions_offset = 0;  // int32 (row, query, value), with top_k
    std::size_t hidden_offset = 0;     // (layer, query, n_embd), in the type of the rows
    bool has_logits = false;
    std::size_t logits_offset = 0;  // float32 (n_vocab), one query only; the engine loop writes it
    std::size_t size_bytes = 0;
};

// The rows of one captured token, with layers and heads in the requested order. Immutable; shared
// by the request, its targets and its tokens.
class capture_plan {
public:
    struct layer_rows {
        int il;
        int index;                             // in layers()
        int first_row;                         // row index across all layers, before reduction
        std::vector<int> heads;                // in the requested order
        std::optional<device_want> on_device;  // none: computed by the host's kernel

        // Number of rows that a device transfers for this layer alone.
        std::size_t n_rows_brought() const;
    };

    // Raises invalid_capture for layers, heads or hidden layers that the model does not have.
    capture_plan(const capture_options& options, const capture_source& source);

    row_kind kind() const { return options_.kind; }
    row_type type() const { return options_.type; }
    row_reduction reduce() const { return options_.reduce; }
    bool reduces_layers() const {
        return reduce() == row_reduction::mean || reduce() == row_reduction::max;
    }
    int top_k() const { return options_.top_k; }
    const cut_ranges& spans() const { return spans_; }
    // True if a row keeps all its columns, as they are.
    bool keeps_columns() const { return top_k() == 0 && options_.spans.empty(); }
    // True if a row becomes sums over spans, and nothing else.
    bool is_sums() const { return !options_.spans.empty() && reduce() == row_reduction::none; }
    // Whether rows are what the kernel computes, without a conversion or reduction.
    bool is_plain() const {
        return type() == row_type::f32 && keeps_columns() && reduce() == row_reduction::none;
    }
    const std::vector<int>& hidden() const { return options_.hidden; }
    // Whether a hidden state is there only for tokens whose logits are asked for: llama.cpp leaves
    // the others out of the last layer.
    bool needs_outputs() const { return needs_outputs_; }
    std::size_t hidden_bytes() const {  // of one layer and query
        return static_cast<std::size_t>(n_embd_) * element_bytes();
    }
    int n_vocab() const { return options_.n_vocab; }
    int n_embd() const { return n_embd_; }
    const std::vector<layer_rows>& layers() const { return layers_; }
    const layer_rows* find(int il) const;
    bool has_device_rows() const { return has_device_rows_; }
    bool has_device_hidden() const { return has_device_hidden_; }
    // True if a layer's rows arrive from their device in their final form; otherwise the host
    // finishes them.
    bool is_direct(const layer_rows& rows) const;
    // Index of a layer in hidden(); -1 if it is not captured.
    int find_hidden(int il) const;

    int n_heads_total() const { return n_heads_total_; }  // rows before reduction
    int n_rows() const;                                   // rows handed out
    // True if every layer keeps the same number of heads, so that the rows form one array.
    bool is_uniform() const { return is_uniform_; }
    std::size_t element_bytes() const { return bytes_of(type()); }

    // `with_logits`: for single queries only; the rows of a prompt have none.
    row_layout layout(int n_columns, int n_queries = 1, bool with_logits = true) const;

private:
    void add_layer(int il, const attention_layer& found);
    void plan_devices(const capture_source& source);

    capture_options options_;
    cut_ranges spans_;
    std::vector<layer_rows> layers_;   // in the requested order
    std::vector<int> index_of_layer_;  // index into layers_; -1 if nothing is captured
    int n_heads_total_ = 0;
    int n_embd_ = 0;
    bool is_uniform_ = true;
    bool has_device_rows_ = false;
    bool has_device_hidden_ = false;
    bool needs_outputs_ = false;
};

// Adjacent slots, or streams of a graph.
struct slot_range {
    int first = 0;
    int count = 0;

    int end() const { return first + count; }
    bool covers(const slot_range& other) const {
        return other.count == 0 || (first <= other.first && other.end() <= end());
    }
    bool operator==(const slot_range&) const = default;
};
// The smallest range that covers both.
slot_range span_of(const slot_range& a, const slot_range& b);
slot_range common_of(const slot_range& a, const slot_range& b);

struct edit_plan;  // tap/edits.h

// Whether a layer reads a mask of its own, and whether each of its heads does.
enum class score_edit : std::uint8_t { none, all_heads, by_head };

// The nodes a graph needs: for each layer, what to read from it and what to change in it. If empty,
// the graph gets no nodes.
class graph_plan {
public:
    // `with_prompt`: rows of several prompt queries are wanted. The host's kernel finds those
    // queries and the slots at run time; for a device they are part of the graph.
    void add(const capture_plan& plan, bool with_prompt = false, int slot = 0);
    void add(const edit_plan& edits);
    // Whether graphs of both have the same nodes, apart from the slots that these read.
    bool has_nodes_of(const graph_plan& other) const {
        return wanted_by_layer_ == other.wanted_by_layer_ && wants_prompt_ == other.wants_prompt_ &&
               saves_mask() == other.saves_mask();
    }
    // The slots whose rows devices compute: from the first to the last that captures.
    const slot_range& slots() const { return slots_; }
    void widen(const slot_range& more) { slots_ = span_of(slots_, more); }
    bool wants(int il, row_kind kind) const;
    const std::set<device_want>& device_wants(int il) const { return of(il).on_device; }
    bool wants_hidden(int il) const { return of(il).hidden; }
    bool edits(int il, edit_point point) const { return of(il).edits[point]; }
    bool edits_heads(int il) const { return of(il).edits_heads; }
    bool sets_heads(int il) const { return of(il).sets_heads; }
    bool records_heads(int il) const { return of(il).records_heads; }
    score_edit edits_scores(int il) const { return of(il).edits_scores; }
    bool wants_prompt() const { return wants_prompt_; }
    // Whether scores of all layers are edited, by way of the mask, which needs no node.
    bool edits_mask() const { return edits_mask_; }
    bool is_empty() const { return wanted_by_layer_.empty(); }
    bool operator==(const graph_plan&) const = default;

private:
    struct layer {
        std::set<row_kind> host_kinds;
        bool hidden = false;
        by_point<bool> edits{};
        bool edits_heads = false;    // in any of these ways
        bool sets_heads = false;     // values in place of theirs
        bool records_heads = false;  // keeps what they give out
        score_edit edits_scores = score_edit::none;
        std::set<device_want> on_device;
        bool operator==(const layer&) const = default;
    };
    const layer& of(int il) const;
    // What is computed beside a step from what its graph saves needs the mask as well.
    bool saves_mask() const { return edits_mask_ && slots_.count > 0; }

    std::map<int, layer> wanted_by_layer_;
    bool wants_prompt_ = false;
    bool edits_mask_ = false;
    slot_range slots_;
};

}  // namespace kqview
