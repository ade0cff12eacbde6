#include "tap/graph.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace kqview {

namespace {

// The layer of a tensor that llama.cpp named "<stem>-<il>".
std::optional<int> layer_of(const ggml_tensor* tensor, std::string_view stem) {
    const std::string_view name = tensor->name;
    if (name.size() < stem.size() + 2 || name.substr(0, stem.size()) != stem ||
        name[stem.size()] != '-') {
        return std::nullopt;
    }
    const auto digits = name.substr(stem.size() + 1);
    int il = 0;
    const auto [end, failure] = std::from_chars(digits.begin(), digits.end(), il);
    if (failure != std::errc{} || end != digits.end()) return std::nullopt;
    return il;
}

float op_param_f32(const ggml_tensor* tensor, int i) {
    float value;
    std::memcpy(&value, reinterpret_cast<const char*>(tensor->op_params) + i * 4, sizeof value);
    return value;
}

// `kqv_out` is a reshape of the flash attention node, or of what MLA multiplies it with.
ggml_tensor* flash_behind(ggml_tensor* output) {
    ggml_tensor* node = output;
    for (int i = 0; i < 12 && node; ++i) {
        switch (node->op) {
            case GGML_OP_FLASH_ATTN_EXT: return node;
            case GGML_OP_RESHAPE:
            case GGML_OP_VIEW:
            case GGML_OP_PERMUTE:
            case GGML_OP_TRANSPOSE:
            case GGML_OP_CONT:
            case GGML_OP_CPY: node = node->src[0]; break;
            case GGML_OP_MUL_MAT: node = node->src[1]; break;
            default: return nullptr;
        }
    }
    return nullptr;
}

// With an F32 cache llama.cpp casts K to F16 for flash attention; the rows are of the cache itself.
ggml_tensor* keys_behind(ggml_tensor* k) {
    return k->op == GGML_OP_CPY && k->src[0] && k->src[0]->type == GGML_TYPE_F32 &&
                   ggml_are_same_shape(k, k->src[0])
               ? k->src[0]
               : k;
}

// From what enters the softmax back through scale, tanh and bias to the product itself.
ggml_tensor* product_behind(ggml_tensor* node) {
    for (int i = 0; i < 8 && node; ++i) {
        switch (node->op) {
            case GGML_OP_MUL_MAT: return node;
            case GGML_OP_SCALE:
            case GGML_OP_UNARY:
            case GGML_OP_ADD: node = node->src[0]; break;
            default: return nullptr;
        }
    }
    return nullptr;
}

std::optional<attention_site> site_of_flash(ggml_tensor* flash, int il) {
    attention_site site;
    site.il = il;
    site.flash = flash;
    site.q = flash->src[0];
    site.k = keys_behind(flash->src[1]);
    site.mask = flash->src[3];
    site.sinks = flash->src[4];
    site.scale = op_param_f32(flash, 0);
    site.max_bias = op_param_f32(flash, 1);
    site.softcap = op_param_f32(flash, 2);
    site.n_head = static_cast<int>(site.q->ne[2]);
    site.n_head_kv = static_cast<int>(site.k->ne[2]);
    const bool is_known = site.q->type == GGML_TYPE_F32 && site.q->nb[0] == sizeof(float) &&
                          site.q->ne[0] == site.k->ne[0] && site.n_head % site.n_head_kv == 0 &&
                          site.k->nb[0] == ggml_type_size(site.k->type);
    return is_known ? std::optional(site) : std::nullopt;
}

std::optional<attention_site> site_of_softmax(ggml_tensor* softmax, int il) {
    attention_site site;
    site.il = il;
    site.softmax = softmax;
    site.kq = product_behind(softmax->src[0]);
    if (!site.kq || !ggml_are_same_shape(site.kq, softmax)) return std::nullopt;
    site.mask = softmax->src[1];
    site.sinks = softmax->src[2];
    site.scale = op_param_f32(softmax, 0);
    site.max_bias = op_param_f32(softmax, 1);
    site.n_head = static_cast<int>(softmax->ne[2]);
    site.n_head_kv = static_cast<int>(site.kq->src[0]->ne[2]);
    return site;
}

}  // namespace

attention_sites find_attention(ggml_cgraph* graph) {
    std::vector<attention_site> found;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor* const node = ggml_graph_node(graph, i);
        std::optional<attention_site> site;
        if (node->op == GGML_OP_SOFT_MAX) {
            if (const auto il = layer_of(node, "kq_soft_max")) site = site_of_softmax(node, *il);
        } else if (const auto il = layer_of(node, "kqv_out")) {
            if (auto* const flash = flash_behind(node)) site = site_of_flash(flash, *il);
        }
        if (site) found.push_back(*site);
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const auto& a, const auto& b) { return a.il < b.il; });
    attention_sites result;
    for (std::size_t i = 0; i < found.size();) {
        auto end = i + 1;
        while (end < found.size() && found[end].il == found[i].il) ++end;
        if (end == i + 1) {
            result.sites.push_back(found[i]);
        } else {
            result.ambiguous.push_back(found[i].il);
        }
        i = end;
    }
    return result;
}

std::vector<hidden_site> find_hidden(ggml_cgraph* graph) {
    std::map<int, ggml_tensor*> found;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor* const node = ggml_graph_node(graph, i);
        const auto il = layer_of(node, "l_out");
        const bool is_matrix = node->type == GGML_TYPE_F32 && node->nb[0] == sizeof(float) &&
                               node->ne[2] == 1 && node->ne[3] == 1;
        if (il && is_matrix) found[*il] = node;
    }
    std::vector<hidden_site> sites;
    for (const auto& [il, output] : found) sites.push_back({il, output});
    return sites;
}

bool insert_nodes(ggml_cgraph* graph, const std::vector<placed_node>& placed) {
    const int n_before = ggml_graph_n_nodes(graph);
    // The scheduler's tables hold nodes and leafs together and are as large as the graph's capacity.
    std::unordered_set<const ggml_tensor*> leafs;
    for (int i = 0; i < n_before; ++i) {
        for (const auto* source : ggml_graph_node(graph, i)->src) {
            if (source && source->op == GGML_OP_NONE) leafs.insert(source);
        }
    }
    const auto n_needed = static_cast<std::size_t>(n_before) + leafs.size() + placed.size();
    if (n_needed > static_cast<std::size_t>(ggml_graph_size(graph))) return false;

    std::unordered_multimap<const ggml_tensor*, ggml_tensor*> behind;
    for (const auto& [anchor, node] : placed) {
        ggml_build_forward_expand(graph, node);
        behind.emplace(anchor, node);
    }
    // ggml appended the nodes at the end; move each one behind its anchor.
    ggml_tensor** const nodes = ggml_graph_nodes(graph);
    const std::vector<ggml_tensor*> before(nodes, nodes + n_before);
    auto* next = nodes;
    for (ggml_tensor* const node : before) {
        *next++ = node;
        const auto [first, last] = behind.equal_range(node);
        for (auto added = first; added != last; ++added) *next++ = added->second;
    }
    return true;
}

}  // namespace kqview
