#include "tap/edits.h"

#include "base/error.h"

namespace kqview {

namespace {

std::string list_of(const std::vector<int>& layers) {
    if (layers.empty()) return "none";
    std::string text;
    for (const int il : layers) text += text_of(text.empty() ? "" : ", ", il);
    return text;
}

void check_layer(const char* what, int il, const std::vector<int>& known) {
    if (std::ranges::find(known, il) != known.end()) return;
    throw error(errc::unsupported_model, "edits: ", what, " of layer ", il,
                " cannot be edited here; layers where they can: ", list_of(known));
}

}  // namespace

std::optional<error> edit_plan::failure() const {
    for (const auto& [il, edits] : layers) {
        for (const auto point : edit_points) {
            for (const auto& one : edits.outputs[point]) {
                const auto why = one.hook ? one.hook->channel->failure() : std::nullopt;
                if (why) return error(errc::request, "edits: a hook ", *why);
            }
        }
    }
    return {};
}

edit_plan plan_for(const capture_source& source, edit_plan plan) {
    std::vector<int> with_heads, with_kept_heads, with_scores, with_own_scores;
    for (const auto& layer : source.attention) {
        if (layer.edits_heads) with_heads.push_back(layer.il);
        if (layer.edits_heads && !layer.is_on_device) with_kept_heads.push_back(layer.il);
        if (layer.edits_scores) with_scores.push_back(layer.il);
        if (layer.edits_scores && !layer.is_on_device) with_own_scores.push_back(layer.il);
    }
    if (!plan.biases.empty()) {
        for (const auto& layer : source.attention) check_layer("scores", layer.il, with_scores);
    }
    const bool has_alibi =
        std::ranges::any_of(source.attention, [](const auto& layer) { return layer.has_alibi; });
    if (has_alibi && !plan.biases.empty()) {
        for (const auto& layer : source.attention) {
            auto& biases = plan.layers[layer.il].biases;
            biases.insert(biases.end(), plan.biases.begin(), plan.biases.end());
        }
        plan.biases.clear();
    }
    for (const auto& [il, edits] : plan.layers) {
        for (const auto point : edit_points) {
            if (edits.outputs[point].empty()) continue;
            auto known = source.edited_layers[point];
            const bool has_hook = edits.has_hook(point);
            if (point == edit_point::residual && !has_hook) {
                known.insert(known.end(), source.edited_on_device.begin(),
                             source.edited_on_device.end());
                std::ranges::sort(known);
            }
            const auto* const what = point == edit_point::residual ? "the output" : name_of(point);
            check_layer(text_of(what, has_hook ? " by a hook" : "").c_str(), il, known);
        }
        if (plan.acts_on_heads(il)) check_layer("heads", il, with_heads);
        if (plan.records_heads(il)) check_layer("kept heads", il, with_kept_heads);
        if (!edits.biases.empty()) check_layer("scores", il, with_own_scores);
    }
    return plan;
}

}  // namespace kqview
