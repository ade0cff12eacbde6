#include "llama/context.h"

#include <ggml.h>
#include <llama-ext.h>  // llama_graph_reserve: llama.cpp's internal header, used here alone

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/size_text.h"
#include "llama/backend.h"
#include "llama/devices.h"
#include "memory/device_need.h"

namespace kqview {

namespace {

constexpr std::array<std::pair<std::string_view, ggml_type>, 9> kv_types{{
    {"f32", GGML_TYPE_F32},
    {"f16", GGML_TYPE_F16},
    {"bf16", GGML_TYPE_BF16},
    {"q8_0", GGML_TYPE_Q8_0},
    {"q5_1", GGML_TYPE_Q5_1},
    {"q5_0", GGML_TYPE_Q5_0},
    {"q4_1", GGML_TYPE_Q4_1},
    {"q4_0", GGML_TYPE_Q4_0},
    {"iq4_nl", GGML_TYPE_IQ4_NL},
}};

ggml_type kv_type_of(const std::string& name) {
    std::string known;
    for (const auto& [text, type] : kv_types) {
        if (text == name) return type;
        known += (known.empty() ? "" : ", ") + std::string(text);
    }
    throw error(errc::request, "Engine: kv_type is '" + name + "', known are " + known);
}

void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value >= low && value <= high) return;
    throw error(errc::request, std::string("Engine: ") + name + " is " + std::to_string(value) +
                                   ", allowed are " + std::to_string(low) + ".." +
                                   std::to_string(high));
}

std::vector<std::uint64_t> sorted(std::vector<std::uint64_t> numbers) {
    std::sort(numbers.begin(), numbers.end());
    return numbers;
}

constexpr int padding = 256;  // llama.cpp pads the cells of a sequence to this

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

    const int n_ctx_padded = (n_ctx + padding - 1) / padding * padding;
    const int n_ubatch = std::min({options.n_ubatch, options.n_batch, n_ctx_padded});
    auto params = llama_context_default_params();
    params.n_ctx = static_cast<std::uint32_t>(n_ctx_padded * n_slots);
    // Whole slots: llama.cpp reserves the same number of tokens for each of them, and where it
    // pools every one of those has to be an output.
    const int n_batch = (std::max(n_ubatch, n_slots) + n_slots - 1) / n_slots * n_slots;
    params.n_batch = static_cast<std::uint32_t>(n_batch);
    params.n_ubatch = params.n_batch;
    params.n_seq_max = static_cast<std::uint32_t>(n_slots);
    params.n_outputs_max = static_cast<std::uint32_t>(n_slots);
    params.pooling_type = pooling_type_of(options.pooling);
    if (!options.pooling.empty() || embedding_facts_of(source).pools) {
        params.n_outputs_max = params.n_ubatch;  // an embedding makes every token an output
    }
    params.n_threads = options.n_threads;
    params.n_threads_batch =
        options.n_threads_batch > 0 ? options.n_threads_batch : options.n_threads;
    params.type_k = kv_type_of(options.kv_type);
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

// Where llama.cpp copies the outputs of a step to; it takes that memory when the first such step
// comes.
double output_bytes(const llama_model* source, const llama_context_params& params) {
    const double n_floats = llama_vocab_n_tokens(llama_model_get_vocab(source));
    return 4.0 * params.n_outputs_max * (n_floats + llama_model_n_embd_out(source));
}

// More than any context can need: no model keeps wider heads than twice its embedding.
double largest_need_bytes(const llama_model* source, const llama_context_params& params) {
    const double n_cache_floats =
        2.0 * 2.0 * llama_model_n_layer(source) * llama_model_n_embd(source);
    const double n_score_floats = static_cast<double>(params.n_ubatch) * llama_model_n_head(source);
    return 4.0 * params.n_ctx * (n_cache_floats + n_score_floats) +
           2.0 * output_bytes(source, params);
}

using context_handle = std::unique_ptr<llama_context, void (*)(llama_context*)>;

// A context without a cache (an encoder, a diffusion model) computes every token of a batch in one
// step and gives an output for each. That a model has none shows in the context alone.
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

// What a context takes of the host (first) and of each device as llama.cpp plans it, without what
// it keeps about each cell; with the model's weights on devices. Nothing where llama.cpp refuses:
// the real one says why.
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

// A plan costs time and memory for each cell. Beyond this many every part of a context grows
// evenly: it is more than a sliding window.
constexpr std::uint32_t n_planned_max = 1 << 16;
constexpr double bytes_of_cell = 64;

std::vector<device_need> planned(model& weightless, const llama_context_params& params) {
    if (params.n_ctx <= n_planned_max) return planned_at(weightless, params, params.n_ctx);
    auto needs = planned_at(weightless, params, n_planned_max);
    const auto halves = planned_at(weightless, params, n_planned_max / 2);
    const double n_steps =
        (static_cast<double>(params.n_ctx) - n_planned_max) / (n_planned_max / 2);
    const auto extend = [n_steps](std::size_t& whole, std::size_t half) {
        if (whole > half) {
            whole += static_cast<std::size_t>(n_steps * static_cast<double>(whole - half));
        }
    };
    for (std::size_t i = 0; i < std::min(needs.size(), halves.size()); ++i) {
        extend(needs[i].context_bytes, halves[i].context_bytes);
        extend(needs[i].compute_bytes, halves[i].compute_bytes);
    }
    return needs;
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
    double n_bytes = bytes_of_cell * params.n_ctx + output_bytes(source.get(), params);
    if (const auto needs = planned(weightless, params); !needs.empty()) {
        n_bytes += static_cast<double>(needs.front().context_bytes + needs.front().compute_bytes);
    }
    if (n_bytes <= limit_bytes) return;
    throw error(errc::out_of_memory,
                "Engine: a context of " + std::to_string(n_ctx_of(source, options)) + " tokens x " +
                    std::to_string(options.n_slots) + " slots needs " + size_text(n_bytes) +
                    ", this process may use " + size_text(limit_bytes) +
                    "; lower n_ctx, n_slots or n_ubatch, or choose a smaller kv_type");
}

void check_device_memory(const model_options& wanted, const context_options& options) {
    start_llama();
    if (!has_offload_device()) return;
    model weightless(weightless_options(wanted));
    auto needs = planned(weightless, params_of(weightless, options));
    if (needs.empty()) return;
    needs.erase(needs.begin());  // the host's: see check_memory
    check_device_needs(needs, llama_model_n_layer(weightless.get()) + 1);
}

void check_opening(const model_options& wanted, const context_options& options) {
    start_llama();
    const auto weightless = std::make_shared<model>(weightless_options(wanted));
    check_memory(*weightless, options);
    check_device_memory(wanted, options);
    const context probe(weightless, options);
}

context::batch_owner::~batch_owner() {
    if (batch.token) llama_batch_free(batch);
}

context::context(std::shared_ptr<model> source, const context_options& options)
    : model_(std::move(source)),
      n_ctx_(n_ctx_of(*model_, options)),
      n_slots_(options.n_slots),
      aborted_decodes_(sorted(options.aborted_decodes)) {
    const auto params = params_of(*model_, options);
    n_ubatch_ =
        std::min({options.n_ubatch, options.n_batch, static_cast<int>(params.n_ctx) / n_slots_});
    n_chunk_ = n_ubatch_;

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
                    "Engine: llama.cpp refused a context of " + std::to_string(n_ctx_) +
                        " tokens x " + std::to_string(n_slots_) + " slots, kv_type " +
                        options.kv_type + ": " + why +
                        (memory   ? "; lower n_ctx, n_slots, n_ubatch or n_gpu_layers"
                         : option ? "; choose another kv_type or flash_attn"
                                  : ""));
    }
    batch_.batch = llama_batch_init(static_cast<std::int32_t>(params.n_batch), 0, 1);
    llama_set_abort_callback(handle_.get(), &context::is_over, this);
    use_adapters();
    open_embeddings(options);
}

void context::use_adapters() {
    // llama.cpp changes neither; its signature is from C.
    const auto adapters = model_->adapters();
    if (adapters.empty()) return;
    std::vector<llama_adapter_lora*> handles(adapters.begin(), adapters.end());
    std::vector<float> scales(model_->adapter_scales().begin(), model_->adapter_scales().end());
    if (llama_set_adapters_lora(handle_.get(), handles.data(), handles.size(), scales.data()) !=
        0) {
        throw error(errc::model_load, "Engine: llama.cpp refused the LoRA adapters");
    }
}

void context::decode(std::span<const batch_token> tokens, bool embeds) {
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
        // Logits may still be on their way. A chunk without any need not be waited for.
        const auto is_awaited = [&](const batch_token& one) { return one.wants_logits || embeds; };
        if (std::any_of(tokens.begin(), tokens.end(), is_awaited)) {
            llama_synchronize(handle_.get());
        }
        servers.check();
    }
    if (status == 0) return;
    if (heart_ && heart_->is_stopped()) {
        throw error(errc::closed, "engine: it was closed while llama.cpp computed a step");
    }
    throw error(errc::decode,
                std::string(has_encoder ? "llama_encode returned " : "llama_decode returned ") +
                    std::to_string(status) + " for " + std::to_string(tokens.size()) +
                    " tokens: " + log_ring::instance().errors_since(log_position));
}

// What breaks off is llama.cpp's own way to fail: some keys and values are written, rows are due,
// and it takes the tokens back.
int context::decode_until_stopped() {
    const bool aborts =
        std::binary_search(aborted_decodes_.begin(), aborted_decodes_.end(), ++n_decodes_);
    n_nodes_to_abort_ = aborts ? 13 : 0;
    may_stop_ = true;
    const int status = llama_model_has_encoder(model_->get())
                           ? llama_encode(handle_.get(), batch_.batch)
                           : llama_decode(handle_.get(), batch_.batch);
    may_stop_ = false;
    n_nodes_to_abort_ = 0;
    return status;
}

// llama.cpp asks behind each node that a CPU computes, on one of its compute threads.
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
    // A cache of a window's size has forgotten the positions before it.
    const auto n_window = llama_model_n_swa(model_->get());
    const auto first_seen = std::max(0, n_keep - n_window + 1);
    if (n_keep > 0 && n_window > 0 && llama_memory_seq_pos_min(memory, slot) > first_seen)
        return false;
    return llama_memory_seq_rm(memory, slot, n_keep, -1);
}

void context::reserve() {
    set_embeds(false);  // a graph that pools has as many outputs as tokens, this one has fewer
    const llama_activity guard("reserving a graph");
    model_->rpc().check();
    const auto log_position = log_ring::instance().position();
    const auto n_slots = static_cast<std::uint32_t>(n_slots_);
    const auto n_tokens = static_cast<std::uint32_t>(std::max(n_ubatch_, n_slots_));
    const auto n_outputs = has_cache() ? n_slots : n_tokens;
    if (llama_graph_reserve(handle_.get(), n_tokens, n_slots, n_outputs)) return;
    throw error(errc::out_of_memory, "llama.cpp could not reserve its compute buffers: " +
                                         log_ring::instance().errors_since(log_position) +
                                         "; lower n_ubatch or n_slots");
}

std::int32_t context::n_graphs_reused() const { return llama_perf_context(handle_.get()).n_reused; }

}  // namespace kqview
