#include "llama/model.h"

#include <ggml-backend.h>
#include <llama-arch.h>
#include <llama-model.h>

#include <algorithm>
#include <cstdint>

#include "base/error.h"
#include "base/log.h"
#include "gguf/checks.h"
#include "llama/backend.h"
#include "llama/devices.h"
#include "memory/device_need.h"

namespace kqview {

namespace {

// Checks the file before contacting any server.
const std::vector<rpc_endpoint>& checked_servers(const model_options& options) {
    check_model_file(options.path);
    start_llama();
    return options.rpc_servers;
}

}  // namespace

model::model(const model_options& options)
    : options_(options), rpc_(checked_servers(options), options.rpc_wait) {
    options_.progress = nullptr;
    const std::string activity = "loading " + options.path;
    try {
        const llama_activity guard(activity.c_str());
        load(options);
    } catch (const llama_abort& why) {
        if (!why.is_memory) (void)handle_.release();
        throw error_of(why, activity.c_str(), errc::model_load,
                       why.is_memory ? "lower n_gpu_layers, or use a smaller model"
                                     : "try n_gpu_layers=0, or another file");
    }
}

void model::load(const model_options& options) {
    const auto devices = rpc_.list();
    const auto log_position = log_ring::instance().position();

    auto params = llama_model_default_params();
    params.n_gpu_layers = options.n_gpu_layers;
    if (!rpc_.empty()) params.devices = const_cast<ggml_backend_dev_t*>(devices.data());
    params.no_alloc = options.no_alloc;
    params.vocab_only = options.vocabulary_only;
    params.load_mtp = options.predicts;
    if (options.no_alloc) params.load_mode = LLAMA_LOAD_MODE_NONE;
    bool stopped = false;
    std::function<bool(float)> go_on = [&](float fraction) {
        stopped = stopped || !options.progress(fraction);
        return !stopped;
    };
    if (options.progress) {
        params.progress_callback = [](float fraction, void* data) {
            return (*static_cast<std::function<bool(float)>*>(data))(fraction);
        };
        params.progress_callback_user_data = &go_on;
    }

    handle_.reset(llama_model_load_from_file(options.path.c_str(), params));
    if (stopped)
        throw error(errc::model_load, "loading ", options.path,
                    " was stopped by its progress callback");
    rpc_.check_loading();
    if (!handle_) {
        auto why = log_ring::instance().errors_since(log_position);
        if (why.empty()) why = "llama.cpp gave no reason";
        const bool memory = says_out_of_memory(why);
        throw error(memory ? errc::out_of_memory : errc::model_load, options.path,
                    " cannot be loaded: ", why,
                    memory ? "; free: " + free_memory_text() +
                                 "; lower n_gpu_layers, or use a smaller model"
                           : "");
    }
    words_ = vocabulary(llama_model_get_vocab(handle_.get()));
    if (options.no_alloc) return;
    for (const auto& option : options.lora) load_adapter(option);
    rpc_.check_loading();
}

model::~model() {
    // Freeing memory on a server would wait for a thread that a forked child does not have.
    if (is_abandoned_ || (!rpc_.empty() && rpc_.is_forked())) (void)handle_.release();
}

void model::load_adapter(const lora_option& option) {
    check_adapter_file(option.path);
    const auto log_position = log_ring::instance().position();
    auto* const adapter = llama_adapter_lora_init(get(), option.path.c_str());
    if (!adapter) {
        throw error(
            errc::model_load, "the LoRA adapter ", option.path,
            " cannot be used with this model: ", log_ring::instance().errors_since(log_position));
    }
    adapters_.push_back(adapter);
    adapter_scales_.push_back(option.scale);
}

std::vector<int> model::window_layers() const {
    std::vector<int> layers;
    for (int il = 0; has_window() && il < llama_model_n_layer(get()); ++il) {
        if (get()->hparams.is_swa(static_cast<std::uint32_t>(il))) layers.push_back(il);
    }
    return layers;
}

// llama.cpp's other graphs would end the process.
std::string model::predictor_obstacle() const {
    const auto& all = *get();
    const auto n_layers = llama_model_n_layer_nextn(get());
    // Routers of some models are counted among them.
    if (n_layers <= 0 || all.hparams.router_layer >= 0) return "the file has none";
    const auto& layer = all.layers[all.hparams.n_layer()];
    if (!(layer.nextn.eh_proj && layer.nextn.enorm && layer.nextn.hnorm))
        return "they are not in the file";
    constexpr auto several = "llama.cpp computes one, and the file has more";
    switch (all.arch) {
        case LLM_ARCH_HY_V3:
        case LLM_ARCH_STEP35: return "";
        case LLM_ARCH_MIMO2:
            return layer.wqkv ? "" : "llama.cpp computes those whose Q, K and V are one matrix";
        case LLM_ARCH_BAILINGMOE3:
        case LLM_ARCH_COHERE2MOE:
        case LLM_ARCH_DEEPSEEK2:
        case LLM_ARCH_DEEPSEEK32:
        case LLM_ARCH_DEEPSEEK4:
        case LLM_ARCH_GLM_DSA:
        case LLM_ARCH_NEMOTRON_H_MOE:
        case LLM_ARCH_QWEN35:
        case LLM_ARCH_QWEN35MOE:
        case LLM_ARCH_QWEN3NEXT: return n_layers == 1 ? "" : several;
        case LLM_ARCH_GLM4_MOE:
            if (all.hparams.use_mrope()) return "llama.cpp computes those of models for text alone";
            return n_layers == 1 ? "" : several;
        default: return "llama.cpp does not compute those of its architecture";
    }
}

// llama-embed, a Llama that attends to both sides, is one as well: llama.cpp gives it a cache that
// its graph does not use.
bool model::is_encoder() const {
    return llama_model_has_encoder(get()) || get()->arch == LLM_ARCH_LLAMA_EMBED;
}

bool model::can_truncate() const {
    return !llama_model_is_recurrent(get()) && !llama_model_is_hybrid(get());
}

// llama.cpp's public call for the i-th pair walks the list from its start; hence the internal
// header.
std::vector<std::pair<std::string, std::string>> model::metadata() const {
    const auto& known = get()->gguf_kv;
    std::vector<std::pair<std::string, std::string>> pairs(known.begin(), known.end());
    std::sort(pairs.begin(), pairs.end());
    return pairs;
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

}  // namespace kqview
