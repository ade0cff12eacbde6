// What a request changes in the model while it runs: values added to the residual stream or put in
// its place, factors of the outputs of heads, biases of attention scores. Pure values; no ggml, no
// threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "tap/hook_channel.h"
#include "tap/plan.h"

namespace kqview {

// Stands for one edit wherever its values are not needed: cells of a cache remember the keys of the
// edits that they were computed with. An edit acts on tokens from position `first` on.
struct edit_key {
    std::string hash;
    std::size_t first = 0;
    bool operator==(const edit_key&) const = default;
};
using edit_keys = std::vector<edit_key>;  // in the order in which they act
inline const edit_keys no_edits;

// Of what a layer has at an edit_point.
struct output_edit {
    bool replaces = false;       // else `values` are added
    std::vector<int> positions;  // of tokens, ascending; empty: every token
    // F32 ne=[n_embd, n]: one for each of `positions`, or one for all. Layers may share them.
    std::shared_ptr<const std::vector<float>> values;
    std::shared_ptr<const hook_lease> hook{};  // it decides instead of `values`

    // Which of the vectors is for a token; null: none.
    const float* at(int position, std::size_t n_embd) const {
        if (positions.empty()) return values->data();
        const auto found = std::ranges::lower_bound(positions, position);
        if (found == positions.end() || *found != position) return nullptr;
        const bool is_one = values->size() == n_embd;
        const auto i = is_one ? 0 : static_cast<std::size_t>(found - positions.begin());
        return values->data() + i * n_embd;
    }
};

// Put in place of what a head gives out.
struct head_values {
    int head;
    std::vector<int> positions;                        // of tokens, ascending
    std::shared_ptr<const std::vector<float>> values;  // F32 ne=[n_value, n], one for each

    const float* at(int position, std::size_t n_value) const {
        const auto found = std::ranges::lower_bound(positions, position);
        if (found == positions.end() || *found != position) return nullptr;
        const auto i = static_cast<std::size_t>(found - positions.begin());
        return (i + 1) * n_value > values->size() ? nullptr : values->data() + i * n_value;
    }
};

// What the heads of some layers gave out, as a request ran. The engine's compute threads write it,
// until that request has ended.
struct head_record {
    struct layer {
        int n_head = 0;
        int n_value = 0;
        std::vector<float> values{};  // F32 ne=[n_value, n_head, n_tokens]
    };
    std::map<int, layer> layers;
};

struct head_factor {
    int head;
    float factor;
};

// Added to the scores of these queries for these keys, before the softmax. -inf hides a key, but
// never a token's own.
struct score_bias {
    column_range queries;
    std::vector<column_range> keys;
    float bias = 0.0f;
    std::vector<int> heads{};  // empty: all
};

struct layer_edits {
    by_point<std::vector<output_edit>> outputs;
    std::vector<head_values> set_heads;
    std::vector<head_factor> heads;
    std::vector<score_bias> biases;

    bool has_hook(edit_point point) const {
        return std::ranges::any_of(outputs[point],
                                   [](const auto& one) { return one.hook != nullptr; });
    }
    bool has_hook() const {
        return std::ranges::any_of(edit_points, [this](auto point) { return has_hook(point); });
    }
    bool acts_on_heads() const { return !heads.empty() || !set_heads.empty(); }
};

// All edits of a request. Immutable once it is submitted; shared by the request and its steps.
struct edit_plan {
    edit_keys keys;
    std::map<int, layer_edits> layers;
    std::vector<score_bias> biases;       // of every layer with attention
    std::shared_ptr<head_record> record;  // of the heads as they are after the edits; or null

    // Why a hook did not do its part; empty if all did.
    std::optional<error> failure() const;
    // Whether somebody is told of each token that is evaluated.
    bool is_watched() const {
        return record ||
               std::ranges::any_of(layers, [](const auto& one) { return one.second.has_hook(); });
    }
    bool records_heads(int il) const { return record && record->layers.contains(il); }
    // Whether anything happens at the outputs of a layer's heads.
    bool acts_on_heads(int il) const {
        const auto* const edits = find(il);
        return (edits && edits->acts_on_heads()) || records_heads(il);
    }

    const layer_edits* find(int il) const {
        const auto found = layers.find(il);
        return found == layers.end() ? nullptr : &found->second;
    }
};

// The plan as a model carries it out: where heads multiply the mask by slopes of their own, a bias
// of every layer is one of each. Raises unsupported_model for a layer that cannot be edited in this
// way, with the layers that can.
edit_plan plan_for(const capture_source& source, edit_plan plan);

}  // namespace kqview
