#include "tap/plan.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/error.h"

namespace kqview {

namespace {

std::string join(std::span<const attention_layer> layers) {
    if (layers.empty()) return "none";
    std::string text;
    for (const auto& layer : layers) text += (text.empty() ? "" : ", ") + std::to_string(layer.il);
    return text;
}

std::vector<int> all_heads(int n_head) {
    std::vector<int> heads(static_cast<std::size_t>(n_head));
    std::iota(heads.begin(), heads.end(), 0);
    return heads;
}

}  // namespace

capture_plan::capture_plan(row_kind kind, row_type type,
                           const std::optional<std::vector<int>>& layers,
                           const std::optional<std::vector<int>>& heads,
                           std::span<const attention_layer> available)
    : kind_(kind), type_(type) {
    if (available.empty()) {
        throw error(errc::invalid_capture,
                    "capture: this model has no layer whose attention can be captured; "
                    "leave capture out");
    }
    const auto find_available = [&](int il) {
        return std::find_if(available.begin(), available.end(),
                            [il](const attention_layer& layer) { return layer.il == il; });
    };
    std::vector<int> wanted;
    if (layers) {
        wanted = *layers;
    } else {
        for (const auto& layer : available) wanted.push_back(layer.il);
    }
    if (wanted.empty() || (heads && heads->empty())) {
        throw error(errc::invalid_capture,
                    "capture: no layers or no heads are named; leave the option out for all");
    }
    for (const int il : wanted) {
        const auto layer = find_available(il);
        if (layer == available.end()) {
            throw error(errc::invalid_capture,
                        "capture: layer " + std::to_string(il) +
                            " has no attention here, layers with attention are " + join(available));
        }
        layer_rows rows{il, n_rows_, heads ? *heads : all_heads(layer->n_head)};
        for (const int head : rows.heads) {
            if (head >= 0 && head < layer->n_head) continue;
            throw error(errc::invalid_capture, "capture: head " + std::to_string(head) +
                                                   " of layer " + std::to_string(il) +
                                                   ", it has heads 0.." +
                                                   std::to_string(layer->n_head - 1));
        }
        n_rows_ += static_cast<int>(rows.heads.size());
        is_uniform_ =
            is_uniform_ && (layers_.empty() || layers_[0].heads.size() == rows.heads.size());
        const auto i = static_cast<std::size_t>(il);
        if (index_of_layer_.size() <= i) index_of_layer_.resize(i + 1, -1);
        if (index_of_layer_[i] >= 0) {
            throw error(errc::invalid_capture,
                        "capture: layer " + std::to_string(il) + " is named twice; name it once");
        }
        index_of_layer_[i] = static_cast<int>(layers_.size());
        layers_.push_back(std::move(rows));
    }
}

const capture_plan::layer_rows* capture_plan::find(int il) const {
    const auto i = static_cast<std::size_t>(il);
    if (i >= index_of_layer_.size() || index_of_layer_[i] < 0) return nullptr;
    return &layers_[static_cast<std::size_t>(index_of_layer_[i])];
}

void graph_plan::add(const capture_plan& plan) {
    for (const auto& rows : plan.layers()) {
        const auto i = static_cast<std::size_t>(rows.il);
        if (kinds_by_layer_.size() <= i) kinds_by_layer_.resize(i + 1, 0);
        kinds_by_layer_[i] |= static_cast<std::uint8_t>(1u << static_cast<unsigned>(plan.kind()));
    }
}

bool graph_plan::wants(int il, row_kind kind) const {
    const auto i = static_cast<std::size_t>(il);
    return i < kinds_by_layer_.size() &&
           (kinds_by_layer_[i] >> static_cast<unsigned>(kind) & 1u) != 0;
}

}  // namespace kqview
