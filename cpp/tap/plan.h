// What to capture: the rows one request asked for, and the union that a graph must provide.
// Pure values; no ggml, no threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kqview {

// A layer of the model that has attention, as found in llama.cpp's own graph.
struct attention_layer {
    int il;
    int n_head;
    int n_head_kv;
    float scale;  // what llama.cpp multiplies K·Q with before the softmax

    bool operator==(const attention_layer&) const = default;
};

enum class row_kind : std::uint8_t {
    logits,  // K·Q, before scale, mask and softmax
    scores,  // what enters the softmax
    probs,   // what leaves it
};

enum class row_type : std::uint8_t { f32, f16 };

// The rows of one captured token: a row is one head of one layer, n_columns values, C-contiguous,
// in the order of layers and heads that was asked for. Immutable; shared by the request, its targets and its tokens.
class capture_plan {
public:
    struct layer_rows {
        int il;
        int first_row;
        std::vector<int> heads;  // in the order asked for
    };

    // Raises invalid_capture for layers without attention or heads that a layer does not have.
    // No `layers` (or `heads`) means all.
    capture_plan(row_kind kind, row_type type, const std::optional<std::vector<int>>& layers,
                 const std::optional<std::vector<int>>& heads,
                 std::span<const attention_layer> available);

    row_kind kind() const { return kind_; }
    row_type type() const { return type_; }
    const std::vector<layer_rows>& layers() const { return layers_; }
    const layer_rows* find(int il) const;

    int n_rows() const { return n_rows_; }
    // True when every layer keeps the same number of heads, so that rows form one array.
    bool is_uniform() const { return is_uniform_; }
    std::size_t element_bytes() const { return type_ == row_type::f32 ? 4 : 2; }
    std::size_t bytes(std::size_t n_columns) const {
        return static_cast<std::size_t>(n_rows_) * n_columns * element_bytes();
    }

private:
    row_kind kind_;
    row_type type_;
    std::vector<layer_rows> layers_;   // in the order asked for
    std::vector<int> index_of_layer_;  // into layers_, -1 where nothing is captured
    int n_rows_ = 0;
    bool is_uniform_ = true;
};

// The nodes a graph needs: per layer, which kinds are read from it. Empty means no node at all.
class graph_plan {
public:
    void add(const capture_plan& plan);
    bool wants(int il, row_kind kind) const;
    bool is_empty() const { return kinds_by_layer_.empty(); }
    bool operator==(const graph_plan&) const = default;

private:
    std::vector<std::uint8_t> kinds_by_layer_;  // bit per row_kind, index il
};

}  // namespace kqview
