#include "llama/model_facts.h"

namespace kqview {
namespace {

std::optional<token_id> id_or_none(llama_token id) {
    return id < 0 ? std::nullopt : std::optional<token_id>(id);
}

std::optional<std::string> text_or_none(const char* text) {
    return text ? std::optional<std::string>(text) : std::nullopt;
}

}  // namespace

model_facts facts_of(const model& source) {
    const auto* const handle = source.get();
    const auto* const vocab = source.vocab();
    model_facts facts;
    facts.n_vocab = source.n_vocab();
    facts.has_vocab = source.has_vocab();
    facts.n_layer = llama_model_n_layer(handle);
    facts.n_head = llama_model_n_head(handle);
    facts.n_head_kv = llama_model_n_head_kv(handle);
    facts.n_embd = llama_model_n_embd(handle);
    facts.n_ctx_train = llama_model_n_ctx_train(handle);
    facts.n_swa = llama_model_n_swa(handle);
    facts.n_params = llama_model_n_params(handle);
    facts.size_bytes = llama_model_size(handle);
    facts.file_type = llama_ftype_name(llama_model_ftype(handle));
    facts.rope_freq_scale = llama_model_rope_freq_scale_train(handle);
    facts.bos_token_id = id_or_none(llama_vocab_bos(vocab));
    facts.eos_token_id = id_or_none(llama_vocab_eos(vocab));
    facts.eot_token_id = id_or_none(llama_vocab_eot(vocab));
    facts.pad_token_id = id_or_none(llama_vocab_pad(vocab));
    facts.sep_token_id = id_or_none(llama_vocab_sep(vocab));
    facts.adds_bos = llama_vocab_get_add_bos(vocab);
    facts.adds_eos = llama_vocab_get_add_eos(vocab);
    facts.adds_sep = llama_vocab_get_add_sep(vocab);
    // Neither T5's decoder by itself nor a diffusion model can generate token by token.
    facts.can_generate = llama_model_has_decoder(handle) && !llama_model_has_encoder(handle) &&
                         !llama_model_is_diffusion(handle);
    facts.chat_template = text_or_none(llama_model_chat_template(handle, nullptr));
    facts.rerank_template = text_or_none(llama_model_chat_template(handle, "rerank"));
    for (std::uint32_t i = 0; i < llama_model_n_cls_out(handle); ++i) {
        if (const char* const label = llama_model_cls_label(handle, i)) {
            facts.classifier_labels.emplace_back(label);
        }
    }
    return facts;
}

}  // namespace kqview
