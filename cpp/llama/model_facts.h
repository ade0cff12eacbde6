// Facts about a loaded model from llama.cpp, for kqview.ModelInfo and for building prompts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "llama/model.h"

namespace kqview {

// Texts are the file's bytes, unchanged.
struct model_facts {
    int n_vocab;
    bool has_vocab;
    int n_layer;
    int n_head;
    int n_head_kv;
    int n_embd;
    int n_ctx_train;
    int n_swa;  // width of the sliding window, 0 = none
    std::uint64_t n_params;
    std::uint64_t size_bytes;
    std::string file_type;
    float rope_freq_scale;
    std::optional<token_id> bos_token_id;
    std::optional<token_id> eos_token_id;
    std::optional<token_id> eot_token_id;
    std::optional<token_id> pad_token_id;
    std::optional<token_id> sep_token_id;
    bool adds_bos;
    bool adds_eos;
    bool adds_sep;
    bool can_generate;  // token by token
    std::optional<std::string> chat_template;
    std::optional<std::string> rerank_template;
    std::vector<std::string> classifier_labels;
};

model_facts facts_of(const model& source);

}  // namespace kqview
