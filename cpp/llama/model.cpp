#include "llama/model.h"

#include <limits>

#include "base/error.h"
#include "base/log.h"
#include "gguf/files.h"
#include "llama/backend.h"
#include "llama/devices.h"
#include "memory/device_need.h"

namespace kqview {

namespace {

// A file that cannot be used is said before any server is asked.
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
                       why.is_memory ? "lower n_gpu_layers, or take a smaller model"
                                     : "try n_gpu_layers=0, or another file");
    }
}

void model::load(const model_options& options) {
    const auto devices = rpc_.list();
    const auto log_position = log_ring::instance().position();

    auto params = llama_model_default_params();
    params.n_gpu_layers = options.n_gpu_layers;
    if (!rpc_.empty()) params.devices = const_cast<ggml_backend_dev_t*>(devices.data());
    params.check_tensors = options.check_tensors;
    params.no_alloc = options.no_alloc;
    if (options.no_alloc) params.load_mode = LLAMA_LOAD_MODE_NONE;
    bool stopped = false;
    struct progress_state {
        const std::function<bool(float)>& call;
        bool& stopped;
    } state{options.progress, stopped};
    if (options.progress) {
        params.progress_callback = [](float fraction, void* data) {
            auto& target = *static_cast<progress_state*>(data);
            target.stopped = target.stopped || !target.call(fraction);
            return !target.stopped;
        };
        params.progress_callback_user_data = &state;
    }

    handle_.reset(llama_model_load_from_file(options.path.c_str(), params));
    if (stopped) throw error(errc::model_load, "Engine: loading " + options.path + " was stopped");
    rpc_.check_loading();
    if (!handle_) {
        auto why = log_ring::instance().errors_since(log_position);
        if (why.empty()) why = "llama.cpp gave no reason";
        const bool memory = says_out_of_memory(why);
        throw error(memory ? errc::out_of_memory : errc::model_load,
                    "Engine: " + options.path + " cannot be loaded: " + why +
                        (memory ? "; free: " + free_memory_text() +
                                      "; lower n_gpu_layers, or take a smaller model"
                                : ""));
    }
    vocab_ = llama_model_get_vocab(handle_.get());
    n_vocab_ = llama_vocab_n_tokens(vocab_);
    if (options.no_alloc) return;
    for (const auto& option : options.lora) load_adapter(option);
    rpc_.check_loading();
}

model::~model() {
    // Freeing what lies on a server would wait for a thread that the child does not have.
    if (is_abandoned_ || (!rpc_.empty() && rpc_.is_forked())) (void)handle_.release();
}

void model::load_adapter(const lora_option& option) {
    check_adapter_file(option.path);
    const auto log_position = log_ring::instance().position();
    auto* const adapter = llama_adapter_lora_init(get(), option.path.c_str());
    if (!adapter) {
        throw error(errc::model_load, "Engine: the LoRA adapter " + option.path +
                                          " cannot be used with this model: " +
                                          log_ring::instance().errors_since(log_position));
    }
    adapters_.push_back(adapter);
    adapter_scales_.push_back(option.scale);
}

bool model::can_truncate() const {
    return !llama_model_is_recurrent(get()) && !llama_model_is_hybrid(get());
}

std::map<std::string, std::string> model::metadata() const {
    std::map<std::string, std::string> all;
    const int n = llama_model_meta_count(get());
    std::string buffer(256, '\0');
    const auto read = [&](auto&& call) {
        int size = call(buffer.data(), buffer.size());
        if (size >= static_cast<int>(buffer.size())) {
            buffer.resize(static_cast<std::size_t>(size) + 1);
            size = call(buffer.data(), buffer.size());
        }
        return std::string(buffer.data(), size < 0 ? 0 : static_cast<std::size_t>(size));
    };
    for (int i = 0; i < n; ++i) {
        auto key = read([&](char* text, std::size_t size) {
            return llama_model_meta_key_by_index(get(), i, text, size);
        });
        all[std::move(key)] = read([&](char* text, std::size_t size) {
            return llama_model_meta_val_str_by_index(get(), i, text, size);
        });
    }
    return all;
}

void model::require_vocab(const char* who) const {
    if (has_vocab()) return;
    throw error(errc::unsupported_model,
                std::string(who) + ": this model file has no vocabulary; work with token ids");
}

void model::check_token(token_id id, const char* who) const {
    if (id >= 0 && id < n_vocab_) return;
    throw error(errc::invalid_token, std::string(who) + ": token id " + std::to_string(id) +
                                         ", the vocabulary has 0.." + std::to_string(n_vocab_ - 1));
}

std::vector<token_id> model::tokenize(std::string_view text, bool add_special,
                                      bool parse_special) const {
    require_vocab("tokenize");
    if (text.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max() / 2)) {
        throw error(errc::request, "tokenize: text has " + std::to_string(text.size()) +
                                       " bytes, the limit is 1 GiB; split it");
    }
    const auto size = static_cast<std::int32_t>(text.size());
    std::vector<token_id> ids(text.size() + 8);
    const auto call = [&] {
        return llama_tokenize(vocab_, text.data(), size, ids.data(),
                              static_cast<std::int32_t>(ids.size()), add_special, parse_special);
    };
    auto n = call();
    if (n < 0) {
        ids.resize(static_cast<std::size_t>(-n));
        n = call();
    }
    ids.resize(static_cast<std::size_t>(n));
    return ids;
}

std::string model::detokenize(std::span<const token_id> ids) const {
    require_vocab("detokenize");
    for (const auto id : ids) check_token(id, "detokenize");
    if (ids.empty()) return {};
    std::string text(ids.size() * 8, '\0');
    const auto call = [&] {
        return llama_detokenize(vocab_, ids.data(), static_cast<std::int32_t>(ids.size()),
                                text.data(), static_cast<std::int32_t>(text.size()), false, true);
    };
    auto n = call();
    if (n < 0) {
        text.resize(static_cast<std::size_t>(-n));
        n = call();
    }
    text.resize(static_cast<std::size_t>(n < 0 ? 0 : n));
    return text;
}

std::string model::token_bytes(token_id id) const {
    require_vocab("token_bytes");
    check_token(id, "token_bytes");
    std::string bytes(32, '\0');
    const auto call = [&] {
        return llama_token_to_piece(vocab_, id, bytes.data(),
                                    static_cast<std::int32_t>(bytes.size()), 0, true);
    };
    auto n = call();
    if (n < 0) {
        bytes.resize(static_cast<std::size_t>(-n));
        n = call();
    }
    bytes.resize(static_cast<std::size_t>(n < 0 ? 0 : n));
    return bytes;
}

std::vector<token_id> model::control_tokens() const {
    std::vector<token_id> ids;
    for (token_id id = 0; has_vocab() && id < n_vocab_; ++id) {
        if ((llama_vocab_get_attr(vocab_, id) & LLAMA_TOKEN_ATTR_CONTROL) != 0) ids.push_back(id);
    }
    return ids;
}

}  // namespace kqview
