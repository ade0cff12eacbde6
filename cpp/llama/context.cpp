#include "llama/context.h"

#include <ggml.h>
#include <llama-context.h>
#include <llama-ext.h>  // llama_graph_reserve
#include <llama-kv-cache-iswa.h>
#include <llama-kv-cache.h>
#include <llama-model.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "llama/backend.h"
#include "llama/devices.h"
#include "memory/device_need.h"

namespace kqview {

namespace {

// ---- options

constexpr std::array kv_types{GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                              GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0,
                              GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL};

constexpr std::array pooling_types{LLAMA_POOLING_TYPE_NONE, LLAMA_POOLING_TYPE_MEAN,
                                   LLAMA_POOLING_TYPE_CLS, LLAMA_POOLING_TYPE_LAST,
                                   LLAMA_POOLING_TYPE_RANK};

const char* name_of(ggml_type type) { return ggml_type_name(type); }

// "" for a value that a file may have but this llama.cpp does not know.
const char* name_of(enum llama_pooling_type type) {
    switch (type) {
        case LLAMA_POOLING_TYPE_NONE: return "none";
        case LLAMA_POOLING_TYPE_MEAN: return "mean";
        case LLAMA_POOLING_TYPE_CLS: return "cls";
        case LLAMA_POOLING_TYPE_LAST: return "last";
        case LLAMA_POOLING_TYPE_RANK: return "rank";
        default: return "";
    }
}

// Parses an option that is one of a few names.
template <typename Value, std::size_t n>
Value value_of(const char* option, const std::string& name, const std::array<Value, n>& known) {
    std::string names;
    for (const auto value : known) {
        if (name == name_of(value)) return value;
        names += (names.empty() ? "" : ", ") + std::string(name_of(value));
    }
    throw error(errc::request,
                std::string(option) + " is '" + name + "', it must be one of " + names);
}

void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value >= low && value <= high) return;
    throw error(errc::request, std::string(name) + " is " + std::to_string(value) +
                                   ", allowed are " + std::to_string(low) + ".." +
                                   std::to_string(high));
}

constexpr int padding = 256;  // llama.cpp pads the cells of a sequence to this

int n_ctx_of(const model& source, const context_options& options) {
    const int n_ctx = options.n_ctx == 0 ? llama_model_n_ctx_train(source.get()) : options.n_ctx;
    const int n_positions = embedding_facts_of(source).n_positions;
    return n_positions > 0 ? std::min(n_ctx, n_positions) : n_ctx;
}

// The most tokens of a prompt that one step scores: their logits take up to this much memory.
std::uint32_t n_scored_of(const model& source, std::uint32_t n_ubatch) {
    constexpr std::int64_t most_bytes = std::int64_t{64} << 20;
    const auto n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(source.get()));
    const auto row_bytes = static_cast<std::int64_t>(sizeof(float)) * std::max(1, n_vocab);
    return static_cast<std::uint32_t>(
        std::clamp<std::int64_t>(most_bytes / row_bytes, 1, n_ubatch));
}

llama_context_params params_of(const model& source, const context_options& options) {
    const int n_ctx = n_ctx_of(source, options);
    const int n_slots = options.n_slots;
    check_range("n_slots", n_slots, 1, static_cast<int>(llama_max_parallel_sequences()));
    check_range("n_ctx", n_ctx, 1, (std::int64_t{1} << 30) / n_slots);
    check_range("n_batch", options.n_batch, 1, 1 << 20);
    check_range("n_ubatch", options.n_ubatch, 1, 1 << 20);
    check_range("n_threads", options.n_threads, 1, GGML_MAX_N_THREADS);

    const int n_ctx_padded = (n_ctx + padding - 1) / padding * padding;
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
                              : value_of("pooling", options.pooling, pooling_types);
    if (!options.pooling.empty() || embedding_facts_of(source).pools) {
        params.n_outputs_max = params.n_ubatch;  // an embedding makes every token an output
    }
    params.n_threads = options.n_threads;
    params.n_threads_batch =
        options.n_threads_batch > 0 ? options.n_threads_batch : options.n_threads;
    params.type_k = value_of("kv_type", options.kv_type, kv_types);
    params.type_v = params.type_k;
    params.flash_attn_type = options.flash == flash_attention::on ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                             : options.flash == flash_attention::off
                                 ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                 : LLAMA_FLASH_ATTN_TYPE_AUTO;
    params.kv_unified = false;  // one KV stream per slot: a slot's columns are its own cells
    params.swa_full = options.swa_full;
    params.no_perf = true;
    return params;
}

// ---- memory: what a context will need, before llama.cpp allocates it

// The buffer for a step's outputs; llama.cpp allocates it at the first such step.
double output_bytes(const llama_model* source, const llama_context_params& params) {
    const double n_floats = llama_vocab_n_tokens(llama_model_get_vocab(source));
    return 4.0 * params.n_outputs_max * (n_floats + llama_model_n_embd_out(source));
}

// An upper bound for any context: no model has heads wider than twice its embedding.
double largest_need_bytes(const llama_model* source, const llama_context_params& params) {
    const double n_cache_floats =
        2.0 * 2.0 * llama_model_n_layer(source) * llama_model_n_embd(source);
    const double n_score_floats = static_cast<double>(params.n_ubatch) * llama_model_n_head(source);
    return 4.0 * params.n_ctx * (n_cache_floats + n_score_floats) +
           2.0 * output_bytes(source, params);
}

using context_handle = std::unique_ptr<llama_context, void (*)(llama_context*)>;

// A context without a cache (an encoder, a diffusion model) computes every token of a batch in one
// step and outputs all of them. Only the opened context tells whether a model has a cache.
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

// What llama.cpp plans for a context on the host (first) and on each device, including the model's
// weights on devices, but without its bookkeeping per cell. Empty if llama.cpp refuses: opening the
// real context then gives the reason.
std::vector<device_need> planned_at(model& weightless, llama_context_params params,
                                    std::uint32_t n_ctx) {
    params.n_ctx = n_ctx;
    const auto handle = guarded("estimating a context's memory", errc::model_load,
                                "lower n_ctx, n_slots or n_gpu_layers",
                                [&] { return open_context(weightless.get(), params); });
    if (!handle) return {};
    std::vector<device_need> needs(1);
    needs.front().device = "host";
    std::vector<ggml_backend_dev_t> devices;
    for (int i = 0; i < llama_model_n_devices(weightless.get()); ++i) {
        devices.push_back(llama_model_get_device(weightless.get(), i));
        auto& need = needs.emplace_back();
        need.device = ggml_backend_dev_name(devices.back());
        ggml_backend_dev_memory(devices.back(), &need.free_bytes, &need.total_bytes);
    }
    for (const auto& [buffer_type, part] : llama_get_memory_breakdown(handle.get())) {
        const bool is_host = ggml_backend_buft_is_host(buffer_type);
        const auto found =
            std::find(devices.begin(), devices.end(), ggml_backend_buft_get_device(buffer_type));
        if (!is_host && found == devices.end()) continue;
        auto& need = needs[is_host ? 0 : 1 + static_cast<std::size_t>(found - devices.begin())];
        need.model_bytes += part.model;
        need.context_bytes += part.context;
        need.compute_bytes += part.compute;
    }
    return needs;
}

// A plan costs time and memory per cell. Beyond this many cells, more than any sliding window,
// every part of a context grows linearly.
constexpr std::uint32_t n_planned_max = 1 << 16;
constexpr double bytes_of_cell = 64;

// Plans contexts of one model that differ in their size.
class planner {
public:
    explicit planner(model& weightless) : weightless_(weightless) {}

    std::vector<device_need> needs(const llama_context_params& params) {
        if (params.n_ctx <= n_planned_max) return planned_at(weightless_, params, params.n_ctx);
        if (whole_.empty()) {
            whole_ = planned_at(weightless_, params, n_planned_max);
            half_ = planned_at(weightless_, params, n_planned_max / 2);
        }
        auto needs = whole_;
        const double n_steps =
            (static_cast<double>(params.n_ctx) - n_planned_max) / (n_planned_max / 2);
        const auto extend = [n_steps](std::size_t& whole, std::size_t half) {
            if (whole > half) {
                whole += static_cast<std::size_t>(n_steps * static_cast<double>(whole - half));
            }
        };
        for (std::size_t i = 0; i < std::min(needs.size(), half_.size()); ++i) {
            extend(needs[i].context_bytes, half_[i].context_bytes);
            extend(needs[i].compute_bytes, half_[i].compute_bytes);
        }
        return needs;
    }

private:
    model& weightless_;
    std::vector<device_need> whole_, half_;  // of n_planned_max cells and half as many
};

std::vector<device_need> planned(model& weightless, const llama_context_params& params) {
    return planner(weightless).needs(params);
}

// Of a context on the host; `needs`: what planner::needs gives.
double host_need_bytes(const llama_model* source, const llama_context_params& params,
                       std::span<const device_need> needs) {
    double n_bytes = bytes_of_cell * params.n_ctx + output_bytes(source, params);
    if (!needs.empty()) {
        n_bytes += static_cast<double>(needs.front().context_bytes + needs.front().compute_bytes);
    }
    return n_bytes;
}

model_options weightless_options(const model_options& options) {
    auto weightless = options;
    weightless.no_alloc = true;
    weightless.progress = nullptr;
    return weightless;
}

}  // namespace

void check_memory(const model& source, const context_options& options) {
    const auto params = params_of(source, options);
    const auto limit_bytes = static_cast<double>(options.host_memory_bytes);
    if (options.host_memory_bytes == 0 ||
        largest_need_bytes(source.get(), params) < limit_bytes / 4)
        return;
    model weightless(weightless_options(source.options()));
    const double n_bytes = host_need_bytes(source.get(), params, planned(weightless, params));
    if (n_bytes <= limit_bytes) return;
    throw error(errc::out_of_memory,
                "a context of " + std::to_string(n_ctx_of(source, options)) + " tokens x " +
                    std::to_string(options.n_slots) + " slots needs " + size_text(n_bytes) +
                    ", but this process may use only " + size_text(limit_bytes) +
                    "; lower n_ctx, n_slots or n_ubatch, or choose a smaller kv_type");
}

// ---- a context by default

namespace {

// What the model was trained with, as far as llama.cpp can hold as many cells.
int largest_n_ctx(const model& source, const context_options& options) {
    auto trained = options;
    trained.n_ctx = 0;
    return std::min(n_ctx_of(source, trained), (1 << 30) / std::max(1, options.n_slots));
}

// A smaller one is nobody's idea of a default: the context then fails as one that was asked for.
int least_n_ctx(int largest) { return std::min(largest, 4096); }

// Where these needs have no room, as context_fit says it; nothing if they have.
std::optional<context_fit> shortage(const model& source, const llama_context_params& params,
                                    std::span<const device_need> needs, double free_bytes) {
    const auto compared = [](const std::string& where, double needed, double allowed) {
        std::optional<context_fit> found;
        if (needed <= allowed) return found;
        found = context_fit{.limited_by = where,
                            .needed_bytes = static_cast<std::size_t>(needed),
                            .allowed_bytes = static_cast<std::size_t>(std::max(0.0, allowed))};
        return found;
    };
    // What a loaded model has on devices is no longer free there.
    const bool is_loaded = !source.options().no_alloc;
    for (std::size_t i = 1; i < needs.size(); ++i) {
        const auto& need = needs[i];
        if (need.total_bytes == 0) continue;
        const auto weights = is_loaded ? 0.0 : static_cast<double>(need.model_bytes);
        const auto needed = static_cast<double>(need.context_bytes + need.compute_bytes);
        const auto free = static_cast<double>(need.free_bytes);
        if (auto found = compared(need.device, needed, 0.9 * (free - weights))) return found;
    }
    if (free_bytes == 0 || needs.empty()) return std::nullopt;
    const auto weights = static_cast<double>(needs.front().model_bytes);
    return compared("host", host_need_bytes(source.get(), params, needs),
                    0.5 * (free_bytes - weights));
}

}  // namespace

context_fit fit_context(model& source, const context_options& options) {
    const int largest = largest_n_ctx(source, options);
    const int least = least_n_ctx(largest);
    context_fit fit{.n_ctx = largest, .n_ctx_train = largest};
    if (largest == least) return fit;
    auto tried = options;
    tried.n_ctx = largest;
    const auto free_bytes = static_cast<double>(options.free_memory_bytes);
    const double most_bytes = static_cast<double>(llama_model_size(source.get())) +
                              2.0 * largest_need_bytes(source.get(), params_of(source, tried));
    const bool is_on_host = llama_model_n_devices(source.get()) == 0;
    if (is_on_host && (free_bytes == 0 || most_bytes < free_bytes)) return fit;

    std::optional<model> weightless;
    if (!source.options().no_alloc) weightless.emplace(weightless_options(source.options()));
    planner plans(weightless ? *weightless : source);
    while (tried.n_ctx > least) {
        const auto params = params_of(source, tried);
        const auto found = shortage(source, params, plans.needs(params), free_bytes);
        if (!found) break;
        fit = *found;
        const auto smaller =
            static_cast<int>(std::bit_floor(static_cast<unsigned>(tried.n_ctx - 1)));
        tried.n_ctx = std::max(least, smaller);
    }
    fit.n_ctx = tried.n_ctx;
    fit.n_ctx_train = largest;
    return fit;
}

void check_device_memory(const model_options& wanted, const context_options& options) {
    start_llama();
    if (!has_offload_device()) return;
    model weightless(weightless_options(wanted));
    auto least = options;
    if (least.n_ctx == 0) least.n_ctx = least_n_ctx(largest_n_ctx(weightless, options));
    auto needs = planned(weightless, params_of(weightless, least));
    if (needs.empty()) return;
    needs.erase(needs.begin());  // the host: see check_memory
    check_device_needs(needs, llama_model_n_layer(weightless.get()) + 1);
}

std::vector<device_need> check_opening(const model_options& wanted, const context_options& given) {
    start_llama();
    const auto weightless = std::make_shared<model>(weightless_options(wanted));
    auto options = given;
    if (options.n_ctx == 0) options.n_ctx = fit_context(*weightless, options).n_ctx;
    check_memory(*weightless, options);
    check_device_memory(wanted, options);
    const context probe(weightless, options);
    const auto params = params_of(*weightless, options);
    auto needs = planned(*weightless, params);
    if (!needs.empty()) {
        needs.front().context_bytes +=
            static_cast<std::size_t>(host_need_bytes(weightless->get(), params, {}));
    }
    return needs;
}

// ---- the context

context::batch_owner::~batch_owner() {
    if (batch.token) llama_batch_free(batch);
}

context::context(std::shared_ptr<model> source, const context_options& options)
    : model_(std::move(source)),
      n_ctx_(n_ctx_of(*model_, options)),
      n_slots_(options.n_slots),
      aborted_decodes_(options.aborted_decodes) {
    const auto params = params_of(*model_, options);
    n_chunk_ =
        std::min({options.n_ubatch, options.n_batch, static_cast<int>(params.n_ctx) / n_slots_});
    n_outputs_ = static_cast<int>(params.n_outputs_max);

    const auto log_position = log_ring::instance().position();
    constexpr auto activity = "creating a context";
    try {
        const llama_activity guard(activity);
        handle_.reset(open_context(model_->get(), params).release());
    } catch (const llama_abort& why) {
        if (!why.is_memory) model_->abandon();
        throw error_of(why, activity, errc::model_load,
                       "lower n_ctx, n_slots, n_ubatch or n_gpu_layers");
    }
    model_->rpc().check_loading();
    if (!handle_) {
        const auto why = log_ring::instance().errors_since(log_position);
        const bool memory = says_out_of_memory(why);
        // "K cache type ... does not divide", "V cache quantization requires flash_attn"
        const bool option = why.find(" cache ") != std::string::npos;
        throw error(memory   ? errc::out_of_memory
                    : option ? errc::request
                             : errc::model_load,
                    "llama.cpp refused a context of " + std::to_string(n_ctx_) + " tokens x " +
                        std::to_string(n_slots_) + " slots, kv_type " + options.kv_type + ": " +
                        why +
                        (memory   ? "; lower n_ctx, n_slots, n_ubatch or n_gpu_layers"
                         : option ? "; choose another kv_type or flash_attn"
                                  : ""));
    }
    batch_.batch = llama_batch_init(static_cast<std::int32_t>(params.n_batch), 0, 1);
    llama_set_abort_callback(handle_.get(), &context::is_over, this);
    use(model_->adapter_scales());
    open_embeddings(options);
}

std::size_t context::memory_bytes() const {
    std::size_t n_bytes = 0;
    for (const auto& [buffer_type, part] : llama_get_memory_breakdown(handle_.get())) {
        n_bytes += part.model + part.context + part.compute;
    }
    return n_bytes;
}

void context::use(const lora_scales& scales) {
    // llama.cpp changes neither; its C signature lacks const.
    const auto adapters = model_->adapters();
    if (adapters.empty()) return;
    std::vector<llama_adapter_lora*> handles(adapters.begin(), adapters.end());
    auto values = scales;
    if (llama_set_adapters_lora(handle_.get(), handles.data(), handles.size(), values.data()) !=
        0) {
        throw error(errc::model_load,
                    "llama.cpp refused the LoRA adapters; load the model without lora");
    }
}

void context::decode(std::span<const step_token> tokens, bool embeds) {
    set_embeds(embeds);
    auto& batch = batch_.batch;
    batch.n_tokens = 0;
    for (const auto& token : tokens) {
        const int i = batch.n_tokens++;
        batch.token[i] = token.id;
        batch.pos[i] = token.position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = token.slot;
        batch.logits[i] = token.wants_logits || embeds;
    }
    const llama_activity guard("decoding");
    const auto& servers = model_->rpc();
    servers.check();
    const auto turn = servers.take_turn();
    const auto log_position = log_ring::instance().position();
    const bool has_encoder = llama_model_has_encoder(model_->get());
    const int status = decode_until_stopped();
    if (!servers.empty()) {
        // Logits may still be on their way. A chunk that wants none does not have to wait.
        const auto is_awaited = [&](const step_token& one) { return one.wants_logits || embeds; };
        if (std::any_of(tokens.begin(), tokens.end(), is_awaited)) {
            llama_synchronize(handle_.get());
        }
        servers.check();
    }
    if (status == 0) return;
    if (heart_ && heart_->is_stopped()) {
        throw error(errc::closed, "the engine was closed while llama.cpp computed a step");
    }
    throw error(errc::decode,
                std::string(has_encoder ? "llama_encode returned " : "llama_decode returned ") +
                    std::to_string(status) + " for " + std::to_string(tokens.size()) +
                    " tokens: " + log_ring::instance().errors_since(log_position));
}

// Stopping early uses llama.cpp's own failure path: some keys and values are written, outputs are
// due, and llama.cpp removes the tokens again.
int context::decode_until_stopped() {
    const auto& aborted = aborted_decodes_;
    n_nodes_to_abort_ =
        std::find(aborted.begin(), aborted.end(), ++n_decodes_) != aborted.end() ? 13 : 0;
    may_stop_ = true;
    const int status = llama_model_has_encoder(model_->get())
                           ? llama_encode(handle_.get(), batch_.batch)
                           : llama_decode(handle_.get(), batch_.batch);
    may_stop_ = false;
    n_nodes_to_abort_ = 0;
    return status;
}

// llama.cpp calls this after each node that a CPU computes, on one of its compute threads.
bool context::is_over(void* self) {
    auto& mine = *static_cast<context*>(self);
    if (mine.heart_) mine.heart_->note_progress();
    if (!mine.may_stop_) return false;
    if (mine.n_nodes_to_abort_ > 0 && --mine.n_nodes_to_abort_ == 0) return true;
    return mine.heart_ && mine.heart_->is_stopped();
}

float* context::logits(int i_token) {
    float* const row = llama_get_logits_ith(handle_.get(), i_token);
    if (!row) throw error(errc::internal, "no logits for batch token " + std::to_string(i_token));
    return row;
}

void context::copy(slot_id from, slot_id to) {
    const auto memory = llama_get_memory(handle_.get());
    if (!memory) return;
    llama_memory_seq_rm(memory, to, -1, -1);
    llama_memory_seq_cp(memory, from, to, -1, -1);
}

bool context::truncate(slot_id slot, std::int32_t n_keep) {
    const auto memory = llama_get_memory(handle_.get());
    if (!memory) return true;
    // A cache of the window's size has dropped the positions before it.
    const auto n_window = llama_model_n_swa(model_->get());
    const auto first_seen = std::max(0, n_keep - n_window + 1);
    if (n_keep > 0 && n_window > 0 && llama_memory_seq_pos_min(memory, slot) > first_seen)
        return false;
    return llama_memory_seq_rm(memory, slot, n_keep, -1);
}

void context::synchronize() {
    const llama_activity guard("waiting for a step");
    llama_synchronize(handle_.get());
    model_->rpc().check();
}

void context::reserve() {
    set_embeds(false);  // a pooling graph outputs every token, this one fewer
    const llama_activity guard("reserving a graph");
    model_->rpc().check();
    const auto log_position = log_ring::instance().position();
    const auto n_slots = static_cast<std::uint32_t>(n_slots_);
    const auto n_tokens = static_cast<std::uint32_t>(std::max(n_chunk_, n_slots_));
    const auto n_outputs =
        has_cache() ? std::min(n_tokens, static_cast<std::uint32_t>(n_outputs_)) : n_tokens;
    if (llama_graph_reserve(handle_.get(), n_tokens, n_slots, n_outputs)) return;
    throw error(errc::out_of_memory, "llama.cpp could not reserve its compute buffers: " +
                                         log_ring::instance().errors_since(log_position) +
                                         "; lower n_ubatch or n_slots");
}

std::int32_t context::n_graphs_reused() const { return llama_perf_context(handle_.get()).n_reused; }

// ---- embeddings. llama.cpp's public interface does not tell whether a model's graph has an
// embedding; if it has none, asking for one ends the process. Hence the internal headers.

// An encoder can always embed; other models can if the file or the caller names a pooling type.
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
            "pooling is '" + options.pooling + "', but " +
                (has_hidden ? "this model has no classifier head; choose mean, cls, last or none"
                            : "llama.cpp gives no embedding for this model; leave pooling out"));
    }
}

void context::set_embeds(bool embeds) {
    if (embeds == embeds_) return;
    if (embeds && pooling_.empty()) {
        throw error(errc::internal, "an embedding was asked of a context that gives none");
    }
    embeds_ = embeds;
    llama_set_embeddings(handle_.get(), embeds);
}

std::vector<float> context::embedding(slot_id slot, int i_token, int n_tokens) {
    const bool pools = pooling_ != "none";
    const auto n_values =
        static_cast<std::size_t>(pooling_ == "rank" ? embedding_facts_of(*model_).n_classes
                                                    : llama_model_n_embd_out(model_->get()));
    std::vector<float> values;
    values.reserve(n_values * static_cast<std::size_t>(pools ? 1 : n_tokens));
    for (int i = 0; i < (pools ? 1 : n_tokens); ++i) {
        const float* const row = pools ? llama_get_embeddings_seq(handle_.get(), slot)
                                       : llama_get_embeddings_ith(handle_.get(), i_token + i);
        if (!row) throw error(errc::internal, "no embedding of slot " + std::to_string(slot));
        values.insert(values.end(), row, row + n_values);
    }
    return values;
}

// ---- the cache: its kind, and a sequence's part of it as bytes. llama.cpp's public interface
// neither applies a pending shift nor distinguishes the kinds of caches.

namespace {

// Names what this context has instead of a plain cache, in which llama.cpp can move positions;
// empty for a plain cache.
std::string other_than_plain(const llama_memory_i* memory) {
    if (!memory) return "no KV cache";
    if (dynamic_cast<const llama_kv_cache*>(memory)) return "";
    if (dynamic_cast<const llama_kv_cache_iswa*>(memory)) return "a cache for sliding windows";
    return "recurrent state or several caches";
}

// Why llama.cpp cannot move a plain cache's keys, or moves them wrongly; empty if it moves them
// correctly. tests/engine/test_architectures_cache.py compares moved keys of every architecture
// with fresh ones.
std::string rotation_obstacle(const llama_model& source, ggml_type type) {
    if (source.pos_embd) return "learned positions";
    switch (source.arch) {
        case LLM_ARCH_HUNYUAN_DENSE:
        case LLM_ARCH_HUNYUAN_MOE:
        case LLM_ARCH_MAINCODER: return "keys that it scales after their rotation";
        // llama.cpp moves keys with the file's rope factors; these models rotate without them.
        case LLM_ARCH_COGVLM:
        case LLM_ARCH_PANGU_EMBED: return "keys that it rotates in a way of its own";
        case LLM_ARCH_BAICHUAN:
            if (source.type != LLM_TYPE_7B) return "keys that it does not rotate";
            break;
        default: break;
    }
    // Other types, and parts of quantised heads, make ggml end the process.
    if (type == GGML_TYPE_F32 || type == GGML_TYPE_F16) return "";
    const auto& hparams = source.hparams;
    if (hparams.rope_type == LLAMA_ROPE_TYPE_NONE) return "";
    bool is_whole = ggml_is_quantized(type);
    for (std::uint32_t il = 0; il < hparams.n_layer(); ++il) {
        is_whole = is_whole && hparams.n_rot(il) == hparams.n_embd_head_k(il);
    }
    return is_whole ? ""
                    : std::string("keys as ") + ggml_type_name(type) + ", which cannot be rotated";
}

}  // namespace

bool context::is_causal() const { return handle_->get_cparams().causal_attn; }

std::vector<memory_part> context::parts() const {
    return parts_of(has_cache() ? llama_get_memory(handle_.get()) : nullptr);
}

std::string context::shift_obstacle() const {
    if (!has_cache()) return "no KV cache";
    auto* const memory = llama_get_memory(handle_.get());
    if (auto kind = other_than_plain(memory); !kind.empty()) return kind;
    if (!llama_memory_can_shift(memory)) return "positions that cannot be moved";
    return rotation_obstacle(*model_->get(), dynamic_cast<llama_kv_cache&>(*memory).type_k());
}

bool context::discard(slot_id slot, std::span<const token_range> gone) {
    if (gone.empty() || !shift_obstacle().empty()) return false;
    auto& cache = dynamic_cast<llama_kv_cache&>(*llama_get_memory(handle_.get()));
    for (const auto& range : gone) {
        const auto start = static_cast<llama_pos>(range.start);
        // A plain cache can remove any range.
        llama_memory_seq_rm(&cache, slot, start, start + static_cast<llama_pos>(range.n_tokens));
    }
    llama_pos n_gone = 0;
    for (std::size_t i = 0; i < gone.size(); ++i) {
        n_gone += static_cast<llama_pos>(gone[i].n_tokens);
        const auto from = static_cast<llama_pos>(gone[i].start + gone[i].n_tokens);
        const auto to = i + 1 < gone.size() ? static_cast<llama_pos>(gone[i + 1].start) : -1;
        llama_memory_seq_add(&cache, slot, from, to, -n_gone);
    }
    flush_shifts();
    if (!cache.get_has_shift()) return true;
    throw error(errc::out_of_memory,
                "llama.cpp had no memory to rotate the keys of a slot; lower n_ctx or n_slots");
}

void context::flush_shifts() {
    const llama_activity guard("shifting a slot");
    model_->rpc().check();
    const auto turn = model_->rpc().take_turn();
    handle_->memory_update(false);
    model_->rpc().check();
}

std::vector<std::size_t> context::part_bytes(slot_id slot) {
    std::vector<std::size_t> sizes;
    for (const auto& part : parts()) sizes.push_back(kqview::write_state(part, slot, {}));
    return sizes;
}

void context::write_state(slot_id slot, std::span<std::byte> out) {
    const llama_activity guard("saving a slot");
    llama_synchronize(handle_.get());
    auto left = out;
    for (const auto& part : parts()) left = left.subspan(kqview::write_state(part, slot, left));
    model_->rpc().check();
    if (left.empty()) return;
    throw error(errc::internal, "saving a slot, llama.cpp left " + std::to_string(left.size()) +
                                    " bytes of " + std::to_string(out.size()));
}

void context::read_state(slot_id slot, std::span<const std::byte> bytes, int n_tokens) {
    const llama_activity guard("restoring a slot");
    llama_synchronize(handle_.get());
    for (const auto& part : parts()) {
        bytes = kqview::read_state(part, slot, bytes, n_tokens);
    }
    model_->rpc().check();
    if (!bytes.empty()) throw error(errc::internal, "llama.cpp left bytes of a restored slot");
}

}  // namespace kqview
