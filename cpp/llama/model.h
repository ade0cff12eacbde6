// Owns a loaded model: weights, vocabulary, metadata. Immutable once loaded.
// Threads: every const member may be called from any thread, while the engine thread decodes.
#pragma once

#include <llama.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "llama/rpc_devices.h"
#include "llama/vocabulary.h"
#include "rpc/servers.h"

namespace kqview {

// Low-rank changes to the weights, applied while the graph runs (Hu et al., 2021).
struct lora_option {
    std::string path;
    float scale = 1.0f;
};

struct model_options {
    std::string path;
    std::vector<lora_option> lora;
    int n_gpu_layers = -1;
    std::vector<rpc_endpoint> rpc_servers;
    std::chrono::milliseconds rpc_wait{300'000};  // for each answer of a server
    bool no_alloc = false;  // no weights: contexts only plan what they need, and allocate nothing
    bool vocabulary_only = false;  // for tokenizing only
    bool predicts = false;  // with its layers that predict later tokens (see predictor_obstacle)
    // Called with 0..1 on the loading thread; false ends the load with errc::model_load.
    std::function<bool(float)> progress;
};

class model {
public:
    // Raises model_load, with llama.cpp's last log lines, if the file cannot be used; out_of_memory
    // if those lines report a failed allocation.
    explicit model(const model_options& options);
    ~model();

    const model_options& options() const { return options_; }  // without `progress`
    const llama_model* get() const { return handle_.get(); }
    llama_model* get() { return handle_.get(); }
    const vocabulary& words() const { return words_; }
    const llama_vocab* vocab() const { return words_.get(); }

    // The RPC servers that compute layers. Call `rpc().leave()` once no engine uses the model.
    rpc_devices& rpc() { return rpc_; }
    const rpc_devices& rpc() const { return rpc_; }

    // Adapters, for use by contexts, and the scales they were loaded with; freed with the model.
    std::span<llama_adapter_lora* const> adapters() const { return adapters_; }
    const lora_scales& adapter_scales() const { return adapter_scales_; }

    // Call when the model's devices have failed: freeing memory there would end the process, so it
    // is leaked. Any thread.
    void abandon() noexcept { is_abandoned_ = true; }

    int n_vocab() const { return words_.size(); }
    // Whether there are layers whose queries do not see all tokens before them.
    bool has_window() const { return llama_model_n_swa(handle_.get()) > 0; }
    // Those layers, in order.
    std::vector<int> window_layers() const;
    bool has_vocab() const { return words_.exists(); }
    bool is_end_of_generation(token_id id) const {
        return has_vocab() && llama_vocab_is_eog(vocab(), id);
    }
    // Why its layers that predict later tokens cannot be used to guess (multi-token prediction,
    // DeepSeek-V3, section 2.2); empty if they can. They must have been loaded.
    std::string predictor_obstacle() const;
    // Whether a text is one step, without a cache.
    bool is_encoder() const;
    // False for recurrent state, which cannot drop its newest tokens: the slot is prefilled again.
    bool can_truncate() const;

    // Key-value pairs of the file as text, sorted by key; bytes unchanged.
    std::vector<std::pair<std::string, std::string>> metadata() const;

    // See `words()`.
    std::string token_bytes(token_id id) const { return words_.token_bytes(id); }
    void check_token(token_id id, const char* who) const { words_.check_token(id, who); }

private:
    struct model_deleter {
        void operator()(llama_model* handle) const { llama_model_free(handle); }
    };

    void load(const model_options& options);
    void load_adapter(const lora_option& option);

    model_options options_;
    rpc_devices rpc_;  // outlives the weights
    std::unique_ptr<llama_model, model_deleter> handle_;
    std::vector<llama_adapter_lora*> adapters_;
    lora_scales adapter_scales_;
    vocabulary words_;
    std::atomic<bool> is_abandoned_{false};
};

// What the weights and the file tell about embeddings, but llama.cpp's public interface does not.
struct embedding_facts {
    bool pools;     // its file names a pooling type
    int n_classes;  // outputs of its classifier head; 0 = it has none
    // Number of learned position vectors; llama.cpp ends the process beyond it. 0 = no limit.
    int n_positions;
};
embedding_facts embedding_facts_of(const model& source);

}  // namespace kqview
