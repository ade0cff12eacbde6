#include "llama/context_params.h"

#include <ggml.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

using pooling = std::pair<enum llama_pooling_type, const char*>;
constexpr std::array pooling_types{
    pooling{LLAMA_POOLING_TYPE_NONE, "none"}, pooling{LLAMA_POOLING_TYPE_MEAN, "mean"},
    pooling{LLAMA_POOLING_TYPE_CLS, "cls"}, pooling{LLAMA_POOLING_TYPE_LAST, "last"},
    pooling{LLAMA_POOLING_TYPE_RANK, "rank"}};

constexpr std::array kv_types{GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                              GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0,
                              GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL};

const char* name_of(const pooling& known) { return known.second; }
const char* name_of(ggml_type known) { return ggml_type_name(known); }

// Parses an option that is one of a few names.
template <typename Known, std::size_t n>
const Known& find_named(const char* option, const std::string& name,
                        const std::array<Known, n>& all) {
    std::string names;
    for (const auto& known : all) {
        if (name == name_of(known)) return known;
        names += text_of(names.empty() ? "" : ", ", name_of(known));
    }
    throw error(errc::request, option, " is '", name, "', it must be one of ", names);
}

void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value >= low && value <= high) return;
    throw error(errc::request, name, " is ", value, ", allowed are ", low, "..", high);
}

// The most tokens of a prompt that one step scores: their logits take up to this much memory.
std::uint32_t n_scored_of(const model& source, std::uint32_t n_ubatch) {
    constexpr std::int64_t most_bytes = std::int64_t{64} << 20;
    const auto n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(source.get()));
    const auto row_bytes = static_cast<std::int64_t>(sizeof(float)) * std::max(1, n_vocab);
    return static_cast<std::uint32_t>(
        std::clamp<std::int64_t>(most_bytes / row_bytes, 1, n_ubatch));
}

}  // namespace

const char* name_of(enum llama_pooling_type type) {
    const auto* const known = std::ranges::find(pooling_types, type, &pooling::first);
    return known == pooling_types.end() ? "" : known->second;
}

int n_ctx_of(const model& source, const context_options& options) {
    const int n_ctx = options.n_ctx == 0 ? llama_model_n_ctx_train(source.get()) : options.n_ctx;
    const int n_positions = embedding_facts_of(source).n_positions;
    return n_positions > 0 ? std::min(n_ctx, n_positions) : n_ctx;
}

llama_context_params params_of(const model& source, const context_options& options) {
    const int n_ctx = n_ctx_of(source, options);
    const int n_slots = options.n_slots;
    check_range("n_slots", n_slots, 1, static_cast<int>(llama_max_parallel_sequences()));
    check_range("n_ctx", n_ctx, 1, (std::int64_t{1} << 30) / n_slots);
    check_range("n_batch", options.n_batch, 1, 1 << 20);
    check_range("n_ubatch", options.n_ubatch, 1, 1 << 20);
    check_range("n_threads", options.n_threads, 1, GGML_MAX_N_THREADS);

    const int n_ctx_padded = (n_ctx + cell_padding - 1) / cell_padding * cell_padding;
    const int n_ubatch = std::min({options.n_ubatch, options.n_batch, n_ctx_padded});
    auto params = llama_context_default_params();
    params.n_ctx = static_cast<std::uint32_t>(n_ctx_padded * n_slots);
    // A multiple of n_slots: llama.cpp reserves the same number of tokens for each slot and, if it
    // pools, every one of them must be an output.
    const int n_batch = (std::max(n_ubatch, n_slots) + n_slots - 1) / n_slots * n_slots;
    params.n_batch = static_cast<std::uint32_t>(n_batch);
    params.n_ubatch = params.n_batch;
    params.n_seq_max = static_cast<std::uint32_t>(n_slots);
    params.n_outputs_max = std::max(params.n_seq_max, n_scored_of(source, params.n_ubatch));
    params.pooling_type = options.pooling.empty()
                              ? LLAMA_POOLING_TYPE_UNSPECIFIED
                              : find_named("pooling", options.pooling, pooling_types).first;
    if (!options.pooling.empty() || embedding_facts_of(source).pools) {
        params.n_outputs_max = params.n_ubatch;  // an embedding makes every token an output
    }
    params.n_threads = options.n_threads;
    params.n_threads_batch =
        options.n_threads_batch > 0 ? options.n_threads_batch : options.n_threads;
    params.type_k = find_named("kv_type", options.kv_type, kv_types);
    params.type_v = params.type_k;
    params.flash_attn_type = options.flash == flash_attention::on ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                             : options.flash == flash_attention::off
                                 ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                 : LLAMA_FLASH_ATTN_TYPE_AUTO;
    params.kv_unified = false;  // one KV stream per slot: a slot's columns are its own cells
    params.swa_full = options.swa_full;
    params.n_rs_seq = options.guesses ? n_states_kept : 0;
    params.ctx_type = options.predicts ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
    params.no_perf = true;
    return params;
}

context_handle open_context(llama_model* source, llama_context_params params) {
    context_handle handle(llama_init_from_model(source, params), llama_free);
    if (!handle || llama_get_memory(handle.get()) || params.n_outputs_max >= params.n_ubatch) {
        return handle;
    }
    params.n_outputs_max = params.n_ubatch;
    handle.reset();
    handle.reset(llama_init_from_model(source, params));
    return handle;
}

}  // namespace kqview
