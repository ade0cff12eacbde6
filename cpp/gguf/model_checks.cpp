#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gguf/checks.h"
#include "gguf/header.h"

namespace kqview {

namespace {

constexpr std::int64_t n_layer_max = 512;  // llama.cpp's limit
constexpr std::int64_t n_expert_max = 1024;
constexpr std::int64_t n_head_max = 1 << 16;
constexpr std::int64_t n_width_max = 1 << 24;

bool is_one_of(std::string_view word, std::span<const std::string_view> words) {
    return std::ranges::find(words, word) != words.end();
}

// The values "<architecture>.<name>" of a model.
class hyperparameters {
public:
    explicit hyperparameters(const gguf_header& head)
        : head_(head), arch_(head.at("general.architecture", gguf_type::string).strings[0]) {}

    std::string_view arch() const { return arch_; }

    std::string key(std::string_view name) const { return text_of(arch_, ".", name); }

    const gguf_value* find(std::string_view name) const { return head_.find(key(name)); }
    void need_type(std::string_view name, gguf_type type) const {
        (void)head_.find(key(name), type);
    }

    template <typename... Parts>
    [[noreturn]] void fail(std::string_view name, const Parts&... what) const {
        head_.fail(key(name), " ", what...);
    }

    // The integer for a layer: the value itself, or the layer's element if it is an array; empty if
    // it is missing or of another type.
    std::optional<std::int64_t> integer(std::string_view name, std::size_t layer = 0) const {
        const auto* const value = find(name);
        if (!value || !value->is_integer()) return std::nullopt;
        if (!value->is_array) return value->integer();
        if (layer >= value->size()) return std::nullopt;
        return value->integer(layer);
    }

private:
    const gguf_header& head_;
    std::string_view arch_;
};

// What llama.cpp opens beside another model: encoders of images, and layers that guess for it.
constexpr std::string_view parts_of_models[] = {"clip", "dflash", "eagle3", "gemma4-assistant"};

void check_whole(const gguf_header& head, const hyperparameters& model) {
    if (!is_one_of(model.arch(), parts_of_models)) return;
    throw error(errc::unsupported_model, head.file, ": ", model.arch(),
                " is a part of another model, which kqview does not use; open that model's own "
                "file (draft takes a smaller model, 'mtp' or 'prompt-lookup')");
}

// Values that every architecture reads, with their types.
struct integer_rule {
    std::string_view name;
    std::int64_t least;
    std::int64_t most;
    bool may_be_array;  // one per layer
};
constexpr integer_rule integer_rules[] = {
    {"block_count", 1, n_layer_max, false},
    {"embedding_length", 1, n_width_max, false},
    {"context_length", 0, INT32_MAX, false},
    {"feed_forward_length", 0, n_width_max, true},
    {"attention.head_count", 0, n_head_max, true},
    {"attention.head_count_kv", 0, n_head_max, true},
    {"attention.key_length", 0, n_head_max, false},
    {"attention.value_length", 0, n_head_max, false},
    {"attention.key_length_swa", 0, n_head_max, false},
    {"attention.value_length_swa", 0, n_head_max, false},
    {"rope.dimension_count", 0, n_head_max, false},
    {"rope.dimension_count_swa", 0, n_head_max, false},
    {"expert_count", 0, n_expert_max, false},
    {"expert_used_count", 0, n_expert_max, true},
};

void check_integer(const hyperparameters& model, const integer_rule& rule, std::size_t n_layer) {
    const auto* const value = model.find(rule.name);
    if (!value) return;
    const bool is_array = value->is_array && rule.may_be_array;
    const bool has_type =
        value->type == gguf_type::u32 || (is_array && value->type == gguf_type::i32);
    if (!has_type || value->is_array != is_array) {
        model.fail(rule.name, "is of type ", value->type_text(), ", u32",
                   rule.may_be_array ? " or an array of u32" : "", " is needed", convert_again);
    }
    if (is_array && value->size() != n_layer) {
        model.fail(rule.name, "has ", value->size(), " values, the model has ", n_layer, " layers",
                   convert_again);
    }
    for (std::size_t i = 0; i < value->size(); ++i) {
        const auto number = value->integer(i);
        if (number < rule.least || number > rule.most) {
            model.fail(rule.name, "is ", number, ", ", rule.least, "..", rule.most, " are possible",
                       convert_again);
        }
    }
}

// ggml ends the process if an epsilon is negative or not a number.
void check_reals(const gguf_header& head, const hyperparameters& model) {
    const auto prefix = std::string(model.arch()) + ".";
    for (const auto& value : head.values) {
        if (!value.is_real() || !value.key.starts_with(prefix)) continue;
        const auto name = value.key.substr(prefix.size());
        const bool is_epsilon = name.ends_with("epsilon");
        const bool is_base = name.starts_with("rope.freq_base");
        if (is_epsilon || is_base) model.need_type(name, gguf_type::f32);
        for (std::size_t i = 0; i < value.size(); ++i) {
            const auto number = value.real(i);
            const bool is_bad = (is_epsilon || is_base) && !(number >= 0 && number < 1e30);
            if (std::isnan(number) || is_bad) {
                model.fail(name, "is ", number, ", ",
                           is_bad ? "0 or more, and finite, is needed" : "a number is needed",
                           convert_again);
            }
        }
    }
}

// Values that must be 1 or more in some architectures: llama.cpp divides by them without a check.
struct divisor_rule {
    std::string_view name;
    bool may_be_missing;  // it then has a default
    std::array<std::string_view, 12> archs;
};
constexpr divisor_rule divisor_rules[] = {
    {"full_attention_interval",
     true,
     {"minimax-01", "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "step35"}},
    {"wkv.head_size", true, {"rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}},
    {"ssm.time_step_rank",
     true,
     {"mamba2", "granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1", "plamo2", "qwen3next",
      "qwen35", "qwen35moe", "qwen4exp"}},
    {"ssm.group_count",
     true,
     {"mamba2", "granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1", "qwen3next", "qwen35",
      "qwen35moe", "qwen4exp"}},
    {"attention.head_count", false, {"olmo2", "phimoe"}},
    {"attention.output_group_count", true, {"deepseek4"}},
    {"experts_per_group", true, {"grovemoe"}},
    {"interleave_moe_layer_step", true, {"ernie4_5-moe"}},
    {"attention.sliding_window", false, {"afmoe"}},  // no division: a null pointer if missing
};

void check_divisors(const hyperparameters& model) {
    for (const auto& rule : divisor_rules) {
        if (!is_one_of(model.arch(), rule.archs)) continue;
        const auto divisor = model.integer(rule.name);
        if (!divisor && rule.may_be_missing) continue;
        if (divisor.value_or(0) <= 0) {
            model.fail(rule.name, divisor ? "is " + std::to_string(*divisor) : "is missing",
                       ", a model of ", model.arch(), " needs 1 or more", convert_again);
        }
    }
}

void check_experts(const hyperparameters& model, std::size_t n_layer) {
    const auto n_expert = model.integer("expert_count").value_or(0);
    std::int64_t n_used_max = 0;
    for (std::size_t i = 0; i < n_layer; ++i) {
        n_used_max = std::max(n_used_max, model.integer("expert_used_count", i).value_or(0));
    }
    if (n_used_max > n_expert || (n_expert > 0 && n_used_max == 0)) {
        model.fail("expert_used_count", "is ", n_used_max, " of ", n_expert, " experts, 1..",
                   n_expert, " are possible", convert_again);
    }
    const auto n_group = model.integer("expert_group_count").value_or(0);
    const auto n_group_used = model.integer("expert_group_used_count").value_or(0);
    const bool has_groups = n_group > 1;
    if (n_group < 0 || (n_group > 0 && n_group >= n_expert) ||
        (has_groups && (n_expert % n_group != 0 || n_group_used <= 0 || n_group_used >= n_group))) {
        model.fail("expert_group_count", "is ", n_group, " with ", n_group_used,
                   " used, which does not divide ", n_expert, " experts", convert_again);
    }
}

// The names of key parts such as "attention.key_length", for layers with or without a sliding
// window.
struct head_names {
    std::string_view key_length;
    std::string_view rope;
};
constexpr head_names full_names{"attention.key_length", "rope.dimension_count"};
constexpr head_names swa_names{"attention.key_length_swa", "rope.dimension_count_swa"};

// Architectures whose attention rotates nothing; some of their files say so with a 0.
constexpr std::string_view unrotated_archs[] = {
    "glm5-next", "kimi-linear",  "kimi-k3",   "bloom",      "gpt2",   "jais",
    "jamba",     "jina-bert-v2", "mpt",       "nemotron_h", "refact", "nemotron_h_moe",
    "bert",      "t5",           "t5encoder", "starcoder"};

// `n_rot`: what the file says, or llama.cpp takes instead.
void check_head_size(const hyperparameters& model, std::int64_t head_size, const head_names& names,
                     std::optional<std::int64_t> n_rot) {
    if (n_rot == 0 && is_one_of(model.arch(), unrotated_archs)) return;
    if (n_rot && (*n_rot <= 0 || *n_rot > head_size || *n_rot % 2 != 0)) {
        model.fail(names.rope, model.find(names.rope) ? "is " : "is missing, which makes it ",
                   *n_rot, ", an even number of 2..", head_size, ", the size of a head, is needed",
                   convert_again);
    }
}

// Rotary positions in several sections: time, height, width. llama.cpp divides by the sum of the
// section sizes.
constexpr std::string_view sectioned_archs[] = {"qwen2vl", "paddleocr", "qwen3vl",  "qwen3vlmoe",
                                                "qwen35",  "qwen35moe", "qwen4exp", "qwen3tts"};

void check_rope_sections(const hyperparameters& model, std::int64_t head_size) {
    constexpr std::string_view name = "rope.dimension_sections";
    const auto* const value = model.find(name);
    if (!value || !value->is_integer()) return;
    std::int64_t sum = 0, n_first = 0;  // of all; of the three that count
    for (std::size_t i = 0; i < value->size(); ++i) {
        const auto size = value->integer(i);
        if (size < 0 || size > head_size) {
            model.fail(name, "has a section of ", size, ", 0..", head_size, " are possible",
                       convert_again);
        }
        sum += size;
        if (i < 3) n_first += size;
    }
    if (sum > head_size || (n_first == 0 && is_one_of(model.arch(), sectioned_archs))) {
        model.fail(name, "have ", sum, " values together, 1..", head_size, " are possible",
                   convert_again);
    }
}

// The tensor's layer and role: "3" and "attn_q" for "blk.3.attn_q.weight"; empty for a tensor
// outside any layer.
std::optional<std::pair<std::size_t, std::string_view>> layer_of(std::string_view name) {
    if (!name.starts_with("blk.")) return std::nullopt;
    name.remove_prefix(4);
    std::size_t layer = 0;
    const auto [end, failure] = std::from_chars(name.data(), name.data() + name.size(), layer);
    if (failure != std::errc()) return std::nullopt;
    return std::pair{layer, name.substr(static_cast<std::size_t>(end - name.data()))};
}

// The layers that have a tensor of one of these roles.
std::vector<bool> layers_with(std::initializer_list<std::string_view> roles,
                              std::span<const gguf_tensor> tensors, std::size_t n_layer) {
    std::vector<bool> found(n_layer);
    for (const auto& tensor : tensors) {
        const auto place = layer_of(tensor.name);
        if (!place || place->first >= n_layer) continue;
        const auto is_role = [&](auto role) { return place->second.starts_with(role); };
        if (std::ranges::any_of(roles, is_role)) found[place->first] = true;
    }
    return found;
}

void check_heads(const hyperparameters& model, std::span<const gguf_tensor> tensors,
                 std::size_t n_layer) {
    const auto attends =
        layers_with({".attn_k.weight", ".attn_q.weight", ".attn_qkv.weight"}, tensors, n_layer);
    // Recurrent layers share some of these names.
    const auto is_recurrent = layers_with({".ssm_"}, tensors, n_layer);
    const auto n_embd = model.integer("embedding_length").value_or(0);
    std::int64_t n_head_first = 0;
    for (std::size_t i = 0; i < n_layer; ++i) {
        const auto n_head = model.integer("attention.head_count", i).value_or(0);
        const auto n_head_kv = model.integer("attention.head_count_kv", i).value_or(n_head);
        const auto layer = " in layer " + std::to_string(i);
        if (attends[i] && !is_recurrent[i] && (n_head == 0 || n_head_kv == 0)) {
            model.fail(n_head == 0 ? "attention.head_count" : "attention.head_count_kv", "is 0",
                       layer, ", which has attention; 1 or more are needed", convert_again);
        }
        if (n_head_kv > 0 && n_head % n_head_kv != 0) {
            model.fail("attention.head_count_kv", "is ", n_head_kv, layer,
                       ", which does not divide its ", n_head, " heads", convert_again);
        }
        if (i == 0) n_head_first = n_head;
    }
    if (n_head_first == 0) return;  // llama.cpp derives the head size from the first layer
    const auto head_size = model.integer(full_names.key_length).value_or(n_embd / n_head_first);
    if (head_size <= 0) {
        model.fail("attention.head_count", "is ", n_head_first, " with embedding_length ", n_embd,
                   "; a head of 1 or more values is needed", convert_again);
    }
    const auto n_rot = model.integer(full_names.rope);
    check_head_size(model, head_size, full_names, n_rot);
    const auto of_window = model.integer(swa_names.key_length);
    auto n_rot_of_window = model.integer(swa_names.rope);
    if (of_window && !n_rot_of_window) n_rot_of_window = n_rot.value_or(head_size);
    check_head_size(model, of_window.value_or(head_size), swa_names, n_rot_of_window);
    check_rope_sections(model, head_size);
}

// ---- tensors

// Tensors that llama.cpp loads as optional but then reads without a check.
struct tensor_rule {
    std::string_view name;
    std::array<std::string_view, 2> archs;
};
constexpr tensor_rule tensor_rules[] = {
    {"enc.blk.0.attn_rel_b.weight", {"t5", "t5encoder"}},
    {"dec.blk.0.attn_rel_b.weight", {"t5"}},
};

// A layer of experts needs their up projection, by itself or merged with the gate.
void check_expert_tensors(const gguf_header& head, std::span<const gguf_tensor> tensors,
                          std::size_t n_layer) {
    const auto goes_down = layers_with({".ffn_down_exps.weight"}, tensors, n_layer);
    const auto goes_up =
        layers_with({".ffn_up_exps.weight", ".ffn_gate_up_exps.weight"}, tensors, n_layer);
    for (std::size_t i = 0; i < n_layer; ++i) {
        if (!goes_down[i] || goes_up[i]) continue;
        head.fail(
            "layer ", i,
            " has ffn_down_exps.weight, but neither ffn_up_exps.weight nor ffn_gate_up_exps.weight",
            convert_again);
    }
}

void check_needed_tensors(const gguf_header& head, const hyperparameters& model,
                          std::span<const gguf_tensor> tensors) {
    for (const auto& rule : tensor_rules) {
        if (!is_one_of(model.arch(), rule.archs)) continue;
        if (std::ranges::find(tensors, rule.name, &gguf_tensor::name) == tensors.end()) {
            head.fail("tensor ", quoted(rule.name), " is missing, a model of ", model.arch(),
                      " needs it", convert_again);
        }
    }
}

// A tensor's role: its name after "blk.N." and the like, without ".weight".
std::string_view role_of(std::string_view name) {
    for (const std::string_view block : {"blk.", "enc.blk.", "dec.blk."}) {
        if (!name.starts_with(block)) continue;
        const auto dot = name.find('.', block.size());
        if (dot != name.npos) name.remove_prefix(dot + 1);
        break;
    }
    if (name.ends_with(".weight")) name.remove_suffix(7);
    return name;
}

// Roles, besides those ending with "norm", that ggml adds, multiplies element-wise, convolves with
// or scans. On the CPU it does so only with F32, and otherwise ends the process.
constexpr std::string_view f32_roles[] = {
    "token_types", "rope_freqs", "rope_factors_long", "rope_factors_short", "attn_sinks", "ffn.act",
    "layer_output_scale", "altup_correct_scale", "exp_probs_b", "exp_probs_b_vl", "attn_norm_2",
    "post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2", "ffn_norm_exps",
    // recurrent layers
    "ssm_a", "ssm_d", "ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "ple_conv1d",
    "shortconv.conv", "attn_conv_base", "ffn_conv_base", "ple_norm_key", "ple_norm_query",
    "ple_norm_conv", "time_mix_lerp_x", "time_mix_lerp_w", "time_mix_lerp_k", "time_mix_lerp_v",
    "time_mix_lerp_r", "time_mix_lerp_g", "time_mix_lerp_fused", "time_mix_decay", "time_mix_first",
    "time_mix_w0", "time_mix_a0", "time_mix_v0", "time_mix_k_k", "time_mix_k_a", "time_mix_r_k",
    "time_mix_ln", "channel_mix_lerp_k", "channel_mix_lerp_r",
    // residual streams
    "attn_res_score", "ffn_res_score", "output_res_score", "output_hc_scale", "output_hc_base",
    "hc_attn_scale", "hc_attn_base", "hc_ffn_scale", "hc_ffn_base", "hrm.z_l_init"};
// Roles that are tables of ids.
constexpr std::string_view id_roles[] = {"ffn_gate_tid2eid", "d2t", "masked_embd_ordering"};

bool needs_f32(std::string_view role, std::string_view arch) {
    // Other architectures look up rows in it.
    if (role == "indexer_compressor_ape" && arch == "glm5-next") return true;
    return role.ends_with("norm") || role.ends_with(".bias") || role.ends_with("scale") ||
           role.ends_with("scales") || is_one_of(role, f32_roles);
}

void check_weight_type(const gguf_header& file, const gguf_tensor& tensor) {
    const auto& type = tensor_types[tensor.type];
    if (type.is_weight) return;
    file.fail("tensor ", quoted(tensor.name), " is of type ", type.name,
              ", which cannot be multiplied with; F32, F16, BF16 and the quantised types can; "
              "convert it again");
}

}  // namespace

void check_hyperparameters(const gguf_header& head, std::span<const gguf_tensor> tensors) {
    const hyperparameters model(head);
    if (tensors.empty()) return;  // only a vocabulary, which llama.cpp refuses itself
    check_whole(head, model);
    const auto n_layer = model.integer("block_count").value_or(0);
    for (const auto& rule : integer_rules) {
        check_integer(model, rule,
                      static_cast<std::size_t>(std::clamp<std::int64_t>(n_layer, 0, n_layer_max)));
    }
    check_reals(head, model);
    check_divisors(model);
    check_experts(model, static_cast<std::size_t>(n_layer));
    check_heads(model, tensors, static_cast<std::size_t>(n_layer));
    check_needed_tensors(head, model, tensors);
    check_expert_tensors(head, tensors, static_cast<std::size_t>(n_layer));
}

void check_tensor_types(const gguf_header& head, const gguf_header& part) {
    const auto arch = hyperparameters(head).arch();
    for (const auto& tensor : part.tensors) {
        const auto role = role_of(tensor.name);
        if (is_one_of(role, id_roles)) continue;
        if (!needs_f32(role, arch)) {
            check_weight_type(part, tensor);
        } else if (tensor.type != type_f32) {
            part.fail("tensor ", quoted(tensor.name), " of shape ", tensor.shape_text(),
                      " is of type ", tensor_types[tensor.type].name,
                      ", llama.cpp computes with F32 here", convert_again);
        }
    }
}

void check_adapter(const gguf_header& file) {
    for (const char* key : {"general.type", "general.architecture", "adapter.type"}) {
        (void)file.find(key, gguf_type::string);
    }
    const auto* const alpha = file.find("adapter.lora.alpha", gguf_type::f32);
    if (alpha && !std::isfinite(alpha->real())) {
        file.fail("adapter.lora.alpha is ", alpha->real(), ", a finite number is needed",
                  convert_again);
    }
    for (const auto& tensor : file.tensors) {
        if (tensor.name.ends_with("_norm.weight")) continue;  // llama.cpp ignores them
        check_weight_type(file, tensor);
    }
}

}  // namespace kqview
