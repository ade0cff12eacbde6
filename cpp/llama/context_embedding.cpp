// What of a context gives embeddings. Like context.cpp this file sees internal headers of
// llama.cpp: its public interface tells neither whether a model has a classifier head or learned
// positions, nor whether its graph has an embedding at all; without one llama.cpp ends the process.
#include <llama-context.h>
#include <llama-model.h>

#include <array>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "llama/context.h"

namespace kqview {

namespace {

constexpr std::array<std::pair<std::string_view, enum llama_pooling_type>, 5> pooling_types{{
    {"none", LLAMA_POOLING_TYPE_NONE},
    {"mean", LLAMA_POOLING_TYPE_MEAN},
    {"cls", LLAMA_POOLING_TYPE_CLS},
    {"last", LLAMA_POOLING_TYPE_LAST},
    {"rank", LLAMA_POOLING_TYPE_RANK},
}};

// "" for what a file may say and this llama.cpp does not know.
std::string name_of(enum llama_pooling_type type) {
    for (const auto& [name, known] : pooling_types) {
        if (known == type) return std::string(name);
    }
    return {};
}

}  // namespace

enum llama_pooling_type pooling_type_of(const std::string& name) {
    if (name.empty()) return LLAMA_POOLING_TYPE_UNSPECIFIED;
    std::string names;
    for (const auto& [text, type] : pooling_types) {
        if (text == name) return type;
        names += (names.empty() ? "" : ", ") + std::string(text);
    }
    throw error(errc::request, "Engine: pooling is '" + name + "', known are " + names);
}

embedding_facts embedding_facts_of(const model& source) {
    const auto& all = *source.get();
    embedding_facts facts{};
    facts.pools = all.hparams.pooling_type != LLAMA_POOLING_TYPE_NONE &&
                  all.hparams.pooling_type != LLAMA_POOLING_TYPE_UNSPECIFIED;
    if (all.cls || all.cls_out) facts.n_classes = static_cast<int>(all.hparams.n_cls_out);
    if (all.pos_embd) facts.n_positions = static_cast<int>(all.pos_embd->ne[1]);
    return facts;
}

// An encoder can embed whatever its file says; other models, where the file or the caller names a
// pooling.
void context::open_embeddings(const context_options& options) {
    const bool is_encoder = !has_cache() && !llama_model_is_diffusion(model_->get());
    const auto facts = embedding_facts_of(*model_);
    if (options.pooling.empty() && !facts.pools && !is_encoder) return;
    const auto type = ::llama_pooling_type(handle_.get());
    const auto* const hidden = handle_->get_gf_res_reserve()->get_embd();
    const bool has_hidden = hidden && hidden->ne[0] == llama_model_n_embd_out(model_->get());
    const bool has_head = type != LLAMA_POOLING_TYPE_RANK || facts.n_classes > 0;
    if (has_hidden && has_head) {
        pooling_ = name_of(type);
    } else if (!options.pooling.empty()) {
        throw error(
            errc::unsupported_model,
            "Engine: pooling is '" + options.pooling + "', and " +
                (has_hidden ? "this model has no classifier head; choose mean, cls, last or none"
                            : "llama.cpp gives no embedding of this model; leave it out"));
    }
}

void context::set_embeds(bool embeds) {
    if (embeds == embeds_) return;
    if (embeds && pooling_.empty()) {
        throw error(errc::internal, "context.decode: an embedding, and this context gives none");
    }
    embeds_ = embeds;
    llama_set_embeddings(handle_.get(), embeds);
}

std::vector<float> context::embedding(slot_id slot, int n_tokens) {
    const bool pools = pooling_ != "none";
    const auto n_values =
        static_cast<std::size_t>(pooling_ == "rank" ? embedding_facts_of(*model_).n_classes
                                                    : llama_model_n_embd_out(model_->get()));
    std::vector<float> values;
    values.reserve(n_values * static_cast<std::size_t>(pools ? 1 : n_tokens));
    for (int i = 0; i < (pools ? 1 : n_tokens); ++i) {
        const float* const row = pools ? llama_get_embeddings_seq(handle_.get(), slot)
                                       : llama_get_embeddings_ith(handle_.get(), i);
        if (!row) throw error(errc::internal, "no embedding of slot " + std::to_string(slot));
        values.insert(values.end(), row, row + n_values);
    }
    return values;
}

}  // namespace kqview
