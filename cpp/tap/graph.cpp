#include "tap/graph.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <unordered_set>

namespace kqview {

namespace {

// The layer of a tensor that llama.cpp named "<stem>-<il>".
std::optional<int> layer_of(const ggml_tensor* tensor) {
    const std::string_view name = tensor->name;
    const auto dash = name.rfind('-');
    if (dash == std::string_view::npos || dash == 0 || dash + 1 == name.size()) return std::nullopt;
    const auto digits = name.substr(dash + 1);
    int il = 0;
    const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), il);
    if (failure != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
    return il;
}

bool has_stem(const ggml_tensor* tensor, std::string_view stem) {
    const std::string_view name = tensor->name;
    return name.size() > stem.size() && name.substr(0, stem.size()) == stem &&
           name[stem.size()] == '-';
}

float op_param_f32(const ggml_tensor* tensor, int i) {
    float value;
    std::memcpy(&value, reinterpret_cast<const char*>(tensor->op_params) + i * 4, sizeof value);
    return value;
}

using consumers = std::unordered_map<const ggml_tensor*, ggml_tensor*>;

// The first node that reads each tensor.
consumers first_consumers(ggml_cgraph* graph) {
    consumers first;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor* const node = ggml_graph_node(graph, i);
        for (const ggml_tensor* const source : node->src) {
            if (source) first.emplace(source, node);
        }
    }
    return first;
}

// The flash attention node has no name of its own. The first name after it is `kqv_out-<il>`, or
// the name that a model with a gate gives the same tensor (`attn_pregate-<il>` and the like).
std::optional<int> layer_behind(const ggml_tensor* flash, const consumers& readers) {
    const ggml_tensor* node = flash;
    for (int i = 0; i < 12; ++i) {
        if (const auto il = layer_of(node)) return il;
        const auto next = readers.find(node);
        if (next == readers.end()) return std::nullopt;
        node = next->second;
    }
    return std::nullopt;
}

// Walks back from the softmax's input through scale, tanh and bias to the product itself.
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

// Others than sparse models use llama.cpp's mask, an input, as it is or cast.
bool is_made(ggml_tensor* mask) { return input_of(mask)->op != GGML_OP_NONE; }

void set_mask(attention_site& site, ggml_tensor* mask) {
    site.mask = mask;
    if (!mask) return;
    site.mask_strides = {mask->nb[1], 0, mask->ne[3] == 1 ? 0 : mask->nb[3]};
    site.has_made_mask = is_made(mask);
}

// Number of keys that a model appends to the tokens' keys; each stands for several tokens
// (deepseek4).
int n_appended(const ggml_tensor* k) {
    const ggml_tensor* const all = k->op == GGML_OP_PERMUTE ? k->src[0] : k;
    const bool is_appended = all->op == GGML_OP_CONCAT && all->op_params[0] == 2;
    return is_appended ? static_cast<int>(all->src[1]->ne[2]) : 0;
}

bool is_readable(const attention_site& site) {
    return site.q->type == GGML_TYPE_F32 && site.q->nb[0] == sizeof(float) &&
           site.q->ne[0] == site.k->ne[0] && site.n_head_kv > 0 &&
           site.n_head % site.n_head_kv == 0 && site.k->nb[0] == ggml_type_size(site.k->type);
}

std::optional<attention_site> site_of_flash(ggml_tensor* flash, int il) {
    attention_site site;
    site.il = il;
    site.flash = flash;
    site.q = flash->src[0];
    site.k = cast_source(flash->src[1]);
    set_mask(site, flash->src[3]);
    site.sinks = flash->src[4];
    site.scale = op_param_f32(flash, 0);
    site.max_bias = op_param_f32(flash, 1);
    site.softcap = op_param_f32(flash, 2);
    site.n_head = static_cast<int>(site.q->ne[2]);
    site.n_head_kv = static_cast<int>(site.k->ne[2]);
    site.n_stream = static_cast<int>(site.q->ne[3]);
    site.n_extra_cells = n_appended(site.k);
    site.n_cells = static_cast<int>(site.k->ne[1]) - site.n_extra_cells;
    site.q_strides = strides_of(site.q);
    site.k_strides = strides_of(site.k);
    if (flash->ne[1] == site.n_head && flash->ne[3] == site.n_stream) site.output = flash;
    return is_readable(site) ? std::optional(site) : std::nullopt;
}

// The node that gathered these rows, behind casts and reshapes; null if none did.
const ggml_tensor* gather_behind(const ggml_tensor* rows) {
    while (rows->op == GGML_OP_CPY || rows->op == GGML_OP_RESHAPE) rows = rows->src[0];
    return rows->op == GGML_OP_GET_ROWS ? rows : nullptr;
}

// minimax-m3 puts (KV head, stream) on the stream dimension, KV heads innermost. A single token
// gathers its keys by row number in the cache, which holds n_head_kv rows per cell; a prompt has
// one mask per KV head.
std::optional<attention_site> site_of_msa(ggml_tensor* flash, int il) {
    auto site = site_of_flash(flash, il);
    if (!site) return std::nullopt;
    const auto* const gather = gather_behind(flash->src[1]);
    const auto n_channels = static_cast<int>(site->q->ne[3]);
    site->k = flash->src[1];
    site->output = nullptr;
    site->n_stream = gather ? static_cast<int>(gather->src[1]->ne[1]) : 1;
    site->n_head_kv = n_channels / site->n_stream;
    site->n_head = static_cast<int>(site->q->ne[2]) * site->n_head_kv;
    const auto per_channel = [&](const ggml_tensor* tensor) {
        const auto n_head_kv = static_cast<std::size_t>(site->n_head_kv);
        return operand_strides{tensor->nb[1], tensor->nb[3], n_head_kv * tensor->nb[3]};
    };
    site->q_strides = {site->q->nb[1], site->q->nb[2], per_channel(site->q).stream};
    site->k_strides = per_channel(site->k);
    site->mask_strides = per_channel(site->mask);
    site->heads_per_mask = site->n_head / site->n_head_kv;
    if (gather) {
        site->gathered = gather->src[1];
        site->gathered_strides = {0, static_cast<std::size_t>(site->n_cells) * sizeof(int),
                                  site->gathered->nb[1]};
        site->rows_per_cell = site->n_head_kv;
        site->n_cells_max = static_cast<int>(gather->src[0]->ne[1]) / site->n_head_kv;
    }
    return is_readable(*site) ? site : std::nullopt;
}

// glm5-next gathers keys for each query of a small batch and puts the queries on the last
// dimension.
std::optional<attention_site> site_of_gathered_softmax(ggml_tensor* softmax, int il) {
    const ggml_tensor* const kq = softmax->src[0];
    if (kq->op != GGML_OP_MUL_MAT) return std::nullopt;
    const auto* const gather = gather_behind(kq->src[0]);
    if (!gather || gather->src[1]->type != GGML_TYPE_I32) return std::nullopt;
    const auto* const cache = gather->src[0]->view_src;
    if (!cache) return std::nullopt;
    attention_site site;
    site.il = il;
    site.flash = softmax;
    site.k = kq->src[0];  // ne=[n_embd_head, n_gathered, 1, n_tokens]
    site.q = kq->src[1];  // ne=[n_embd_head, 1, n_head, n_tokens]
    site.scale = op_param_f32(softmax, 0);
    site.n_head = static_cast<int>(site.q->ne[2]);
    site.n_head_kv = 1;
    site.n_stream = static_cast<int>(site.q->ne[3]);
    site.n_cells = static_cast<int>(site.k->ne[1]);
    site.q_strides = strides_of(site.q);
    site.k_strides = strides_of(site.k);
    set_mask(site, softmax->src[1]);
    site.gathered = gather->src[1];
    site.gathered_strides = {0, 0, static_cast<std::size_t>(site.n_cells) * sizeof(int)};
    site.n_cells_max = static_cast<int>(cache->ne[1]);
    site.has_stream_per_query = true;
    return is_readable(site) ? std::optional(site) : std::nullopt;
}

std::optional<attention_site> site_of_softmax(ggml_tensor* softmax, int il,
                                              const consumers& readers) {
    attention_site site;
    site.il = il;
    site.softmax = softmax;
    site.kq = product_behind(softmax->src[0]);
    if (!site.kq || !ggml_are_same_shape(site.kq, softmax)) return std::nullopt;
    set_mask(site, softmax->src[1]);
    site.sinks = softmax->src[2];
    site.scale = op_param_f32(softmax, 0);
    site.max_bias = op_param_f32(softmax, 1);
    site.n_head = static_cast<int>(softmax->ne[2]);
    site.n_head_kv = static_cast<int>(site.kq->src[0]->ne[2]);
    site.n_stream = static_cast<int>(softmax->ne[3]);
    site.n_cells = static_cast<int>(softmax->ne[0]) - n_appended(site.kq->src[0]);
    const auto mixed = readers.find(softmax);
    if (mixed != readers.end() && mixed->second->op == GGML_OP_MUL_MAT &&
        mixed->second->src[1] == softmax) {
        site.output = mixed->second;
    }
    return site;
}

std::optional<attention_site> site_of(ggml_tensor* node, const consumers& readers) {
    if (node->op == GGML_OP_SOFT_MAX) {
        const auto il = layer_of(node);
        if (!il) return std::nullopt;
        if (has_stem(node, "kq_soft_max")) return site_of_softmax(node, *il, readers);
        if (has_stem(node, "kq_soft_max_gathered")) return site_of_gathered_softmax(node, *il);
    } else if (node->op == GGML_OP_FLASH_ATTN_EXT) {
        const auto il = layer_behind(node, readers);
        if (!il) return std::nullopt;
        return has_stem(node, "msa_fattn") ? site_of_msa(node, *il) : site_of_flash(node, *il);
    }
    return std::nullopt;
}

// True if these keys are part of the cache. Cross attention computes its keys from the encoder's
// output.
bool is_cached(const attention_site& site) {
    const ggml_tensor* const k = site.keys();
    return k->view_src && k->view_src->op == GGML_OP_NONE;
}

}  // namespace

ggml_tensor* input_of(ggml_tensor* mask) {
    while (mask->op == GGML_OP_CPY || mask->op == GGML_OP_CONT || mask->op == GGML_OP_VIEW ||
           mask->op == GGML_OP_RESHAPE || mask->op == GGML_OP_PERMUTE) {
        mask = mask->src[0];
    }
    return mask;
}

attention_sites find_attention(ggml_cgraph* graph) {
    const auto readers = first_consumers(graph);
    std::vector<attention_site> found;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (auto site = site_of(ggml_graph_node(graph, i), readers)) {
            site->position = i;
            found.push_back(*site);
        }
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const auto& a, const auto& b) { return a.il < b.il; });
    attention_sites result;
    for (std::size_t i = 0; i < found.size();) {
        auto end = i + 1;
        while (end < found.size() && found[end].il == found[i].il) ++end;
        // minimax-m3 computes attention for each stream of a prompt separately; only one stream is
        // ever captured.
        const bool is_msa = found[i].flash && has_stem(found[i].flash, "msa_fattn");
        const auto first = found.begin() + static_cast<std::ptrdiff_t>(i);
        const auto last = found.begin() + static_cast<std::ptrdiff_t>(end);
        if (end == i + 1 || is_msa) {
            result.sites.push_back(found[i]);
        } else if (std::count_if(first, last, is_cached) == 1) {  // the others are cross attention
            result.sites.push_back(*std::find_if(first, last, is_cached));
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
        if (!has_stem(node, "l_out")) continue;
        const auto il = layer_of(node);
        const bool is_matrix = node->type == GGML_TYPE_F32 && node->nb[0] == sizeof(float) &&
                               node->ne[2] == 1 && node->ne[3] == 1;
        if (il && is_matrix) found[*il] = node;
    }
    std::vector<hidden_site> sites;
    for (const auto& [il, output] : found) sites.push_back({il, output});
    return sites;
}

namespace {

bool is_product(const ggml_tensor* node) {
    return node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
}

bool is_output_matrix(const ggml_tensor* weights) {
    const std::string_view name = weights->name;
    return name == "output.weight" || name == "token_embd.weight";
}

// Whether a product is one with weights of a layer's feed-forward part, of any layer if il < 0.
bool is_feed_forward(const ggml_tensor* product, int il) {
    std::string_view name = product->src[0]->name;
    constexpr std::string_view block = "blk.";
    if (!name.starts_with(block)) return false;
    name.remove_prefix(block.size());
    const auto dot = name.find('.');
    if (dot == std::string_view::npos || !name.substr(dot + 1).starts_with("ffn_")) return false;
    return il < 0 || name.substr(0, dot) == text_of(il);
}

enum class ancestor : std::uint8_t { wanted, beyond, between };

// Whether a tensor is computed from a wanted one, on ways that lead through no others beyond it.
template <typename Kind>
bool comes_from(const ggml_tensor* tensor, const Kind& kind_of,
                std::unordered_set<const ggml_tensor*>& seen) {
    if (!tensor || !seen.insert(tensor).second) return false;
    const auto kind = kind_of(tensor);
    if (kind != ancestor::between) return kind == ancestor::wanted;
    return std::ranges::any_of(
        tensor->src, [&](const ggml_tensor* source) { return comes_from(source, kind_of, seen); });
}

// The sum of two parts of the residual stream that this one is, behind norms, factors and a choice
// of tokens; null if it is none.
ggml_tensor* sum_behind(ggml_tensor* node) {
    for (;; node = node->src[0]) {
        const auto* const other = node->src[1];
        switch (node->op) {
            case GGML_OP_ADD:
            case GGML_OP_MUL:
                if (other->op == GGML_OP_NONE) break;  // weights
                return node->op == GGML_OP_ADD && ggml_are_same_shape(node->src[0], other)
                           ? node
                           : nullptr;
            case GGML_OP_NORM:
            case GGML_OP_RMS_NORM:
            case GGML_OP_SCALE:
            case GGML_OP_GET_ROWS: break;
            default: return nullptr;
        }
    }
}

// Follows the wanted part back from a layer's output through the sums that it is one term of.
template <typename Kind>
ggml_tensor* addend(const hidden_site& layer, const Kind& kind_of) {
    ggml_tensor* found = nullptr;
    for (auto* sum = sum_behind(layer.output); sum; sum = sum_behind(found)) {
        const auto has_part = [&](const ggml_tensor* term) {
            std::unordered_set<const ggml_tensor*> seen;
            return comes_from(term, kind_of, seen);
        };
        const bool is_first = has_part(sum->src[0]);
        if (is_first == has_part(sum->src[1])) break;
        found = sum->src[is_first ? 0 : 1];
    }
    const bool is_matrix = found && found->type == GGML_TYPE_F32 && found->ne[2] == 1 &&
                           found->nb[0] == sizeof(float) && found->ne[0] == layer.output->ne[0];
    return is_matrix ? found : nullptr;
}

}  // namespace

ggml_tensor* find_head(ggml_cgraph* graph) {
    const int n_nodes = ggml_graph_n_nodes(graph);
    std::unordered_set<const ggml_tensor*> logits;
    ggml_tensor* head = nullptr;
    for (int i = 0; i < n_nodes && !head; ++i) {
        if (std::string_view(ggml_graph_node(graph, i)->name) == "result_output")
            head = ggml_graph_node(graph, i);
    }
    // A model may cap or scale what comes from the product, or add to it.
    for (; head && head->op != GGML_OP_MUL_MAT; head = head->src[0]) logits.insert(head);
    if (!head || !is_output_matrix(head->src[0])) return nullptr;
    logits.insert(head);
    for (int i = 0; i < n_nodes; ++i) {
        const auto* const node = ggml_graph_node(graph, i);
        const bool reads = std::ranges::any_of(
            node->src, [&](const ggml_tensor* source) { return logits.contains(source); });
        if (reads && !logits.contains(node)) return nullptr;
    }
    return head;
}

ggml_tensor* attention_addend(const hidden_site& layer, const attention_site& attention) {
    return addend(layer, [&](const ggml_tensor* node) {
        if (node == attention.flash || node == attention.softmax) return ancestor::wanted;
        const bool is_other = node != layer.output && has_stem(node, "l_out");
        const bool is_beyond = is_other || (is_product(node) && is_feed_forward(node, -1));
        return is_beyond ? ancestor::beyond : ancestor::between;
    });
}

ggml_tensor* mlp_addend(const hidden_site& layer) {
    return addend(layer, [&](const ggml_tensor* node) {
        if (!is_product(node)) return ancestor::between;
        return is_feed_forward(node, layer.il) ? ancestor::wanted : ancestor::beyond;
    });
}

void replace_for_readers(ggml_cgraph* graph, const ggml_tensor* before, ggml_tensor* after) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor* const node = ggml_graph_node(graph, i);
        std::ranges::replace(node->src, const_cast<ggml_tensor*>(before), after);
        if (node->view_src == before) node->view_src = after;
    }
}

bool insert_nodes(ggml_cgraph* graph, const std::vector<placed_node>& placed) {
    const int n_before = ggml_graph_n_nodes(graph);
    // The scheduler's tables hold nodes and leafs together, and are as large as the graph's
    // capacity.
    std::unordered_set<const ggml_tensor*> leafs;
    for (int i = 0; i < n_before; ++i) {
        for (const auto* source : ggml_graph_node(graph, i)->src) {
            if (source && source->op == GGML_OP_NONE) leafs.insert(source);
        }
    }
    for (const auto& added : placed) {
        for (const auto* source : added.node->src) {
            if (source && source->op == GGML_OP_NONE) leafs.insert(source);
        }
    }
    const auto n_needed = static_cast<std::size_t>(n_before) + leafs.size() + placed.size();
    if (n_needed > static_cast<std::size_t>(ggml_graph_size(graph))) return false;

    ggml_tensor** const nodes = ggml_graph_nodes(graph);
    std::unordered_map<const ggml_tensor*, int> position;
    for (int i = 0; i < n_before; ++i) position.emplace(nodes[i], i);
    // After the anchor and after every source: the mask of a sparse layer comes later than its
    // product.
    std::vector<std::vector<ggml_tensor*>> behind(static_cast<std::size_t>(n_before));
    for (const auto& [anchor, node] : placed) {
        int last = position.at(anchor);
        for (const ggml_tensor* const source : node->src) {
            const auto found = position.find(source);
            if (found != position.end()) last = std::max(last, found->second);
        }
        behind[static_cast<std::size_t>(last)].push_back(node);
        position.emplace(node, last);  // other added nodes may read it
        ggml_build_forward_expand(graph, node);
    }
    // ggml appended the nodes at the end; move each one into place.
    const std::vector<ggml_tensor*> before(nodes, nodes + n_before);
    auto* next = nodes;
    for (int i = 0; i < n_before; ++i) {
        *next++ = before[static_cast<std::size_t>(i)];
        for (auto* const added : behind[static_cast<std::size_t>(i)]) *next++ = added;
    }
    return true;
}

}  // namespace kqview
