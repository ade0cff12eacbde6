#include "llama/context.h"

#include <ggml.h>
#include <llama-adapter.h>
#include <llama-arch.h>
#include <llama-context.h>
#include <llama-ext.h>  // llama_graph_reserve
#include <llama-hparams.h>
#include <llama-kv-cache-iswa.h>
#include <llama-kv-cache.h>
#include <llama-model.h>

#include <algorithm>
#include <limits>
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

context::batch_owner::~batch_owner() {
    batch.embd = nullptr;  // ours
    if (batch.token) llama_batch_free(batch);
}

namespace {

void check_predictor(const model& source) {
    const auto why = source.predictor_obstacle();
    if (why.empty()) return;
    throw error(errc::unsupported_model,
                "draft is 'mtp', layers of the model that predict later tokens, but ", why,
                "; use 'prompt-lookup' or the file of a smaller model");
}

}  // namespace

context::context(std::shared_ptr<model> source, const context_options& options)
    : model_(std::move(source)),
      n_ctx_(n_ctx_of(*model_, options)),
      n_slots_(options.n_slots),
      aborted_decodes_(options.aborted_decodes) {
    if (options.tells_states || options.predicts) check_predictor(*model_);
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
                       options.predicts ? "leave draft out, or use 'prompt-lookup'"
                                        : "lower n_ctx, n_slots, n_ubatch or n_gpu_layers");
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
                    "llama.cpp refused a context of ", n_ctx_, " tokens x ", n_slots_,
                    " slots, kv_type ", options.kv_type, ": ", why,
                    memory   ? "; lower n_ctx, n_slots, n_ubatch or n_gpu_layers"
                    : option ? "; choose another kv_type or flash_attn"
                             : "");
    }
    batch_.batch = llama_batch_init(static_cast<std::int32_t>(params.n_batch), 0, 1);
    llama_set_abort_callback(handle_.get(), &context::is_over, this);
    use(model_->adapter_scales());
    open_embeddings(options);
    open_states(options);
    if (has_cache()) tail_parts_ = tail_parts_of(llama_get_memory(handle_.get()));
    if (llama_n_rs_seq(handle_.get()) > 0) kept_states_.resize(static_cast<std::size_t>(n_slots_));
}

std::size_t context::memory_bytes() const {
    std::size_t n_bytes = 0;
    for (const auto& [buffer_type, part] : llama_get_memory_breakdown(handle_.get())) {
        n_bytes += part.context + part.compute;
        if (!predicts()) n_bytes += part.model;  // else the engine's own context counts it
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
    if (states_) add_states(tokens);
    const llama_activity guard("decoding");
    const auto& servers = model_->rpc();
    servers.check();
    const auto turn = servers.take_turn();
    const auto log_position = log_ring::instance().position();
    const int status = decode_until_stopped();
    note_step(tokens, status != 0);
    if (!servers.empty()) {
        // Logits may still be on their way. A chunk that wants none does not have to wait.
        const auto is_awaited = [&](const step_token& one) { return one.wants_logits || embeds; };
        if (std::any_of(tokens.begin(), tokens.end(), is_awaited)) {
            llama_synchronize(handle_.get());
        }
        servers.check();
    }
    if (status == 0) return states_ ? take_states(tokens) : void();
    if (heart_ && heart_->is_stopped()) {
        throw error(errc::closed, "the engine was closed while llama.cpp computed a step");
    }
    throw error(errc::decode, model_->is_encoder() ? "llama_encode" : "llama_decode", " returned ",
                status, " for ", tokens.size(),
                " tokens: ", log_ring::instance().errors_since(log_position));
}

// ---- states, from which other layers predict

// More than a chunk of a prompt, or a step with guesses, has.
constexpr int n_states_more = 64;

void context::open_states(const context_options& options) {
    if (!options.tells_states && !options.predicts) return;
    const auto* const source = model_->get();
    if (::llama_pooling_type(handle_.get()) != LLAMA_POOLING_TYPE_NONE) {
        throw error(errc::unsupported_model,
                    "draft is 'mtp', but this model pools what its layers predict from; leave "
                    "draft or pooling out");
    }
    // Of a context that predicts, of the tokens whose logits are wanted.
    llama_set_embeddings_nextn(handle_.get(), true, options.predicts);
    reserve();
    if (!handle_->get_gf_res_reserve()->get_h_nextn())
        throw error(errc::unsupported_model, "draft is 'mtp', but llama.cpp's graph of this model ",
                    "does not tell what to predict from; use 'prompt-lookup'");
    if (!options.predicts) return;
    const auto n_values = static_cast<std::size_t>(llama_model_n_embd_out(source));
    states_ = std::make_unique<token_states>(n_slots_, n_values,
                                             static_cast<std::size_t>(n_chunk_ + n_states_more));
    states_before_.resize(n_values * llama_n_batch(handle_.get()));
}

int context::n_predicting() const {
    return predicts() ? llama_model_n_layer_nextn(model_->get()) : 1;
}

void context::predict_with(int i_layer) { llama_set_nextn_layer_offset(handle_.get(), i_layer); }

const float* context::state(int i_token) {
    const float* const values = llama_get_embeddings_nextn_ith(handle_.get(), i_token);
    if (!values) throw error(errc::internal, "llama.cpp gave no state of token ", i_token);
    return values;
}

void context::add_states(std::span<const step_token> tokens) {
    const auto n_values = static_cast<std::size_t>(llama_model_n_embd_out(model_->get()));
    auto to = states_before_.begin();
    for (const auto& token : tokens) {
        const auto position = static_cast<std::size_t>(token.position);
        to = std::copy_n(states_->before(token.slot, position), n_values, to);
    }
    batch_.batch.embd = states_before_.data();
}

// Those of each slot's last token, which stand for the model's own until it tells them.
void context::take_states(std::span<const step_token> tokens) {
    if (!std::ranges::all_of(tokens, &step_token::wants_logits)) return;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (i + 1 < tokens.size() && tokens[i + 1].slot == tokens[i].slot) continue;
        states_->put(tokens[i].slot, static_cast<std::size_t>(tokens[i].position),
                     state(static_cast<int>(i)));
    }
}

// Stopping early uses llama.cpp's own failure path: some keys and values are written, outputs are
// due, and llama.cpp removes the tokens again.
int context::decode_until_stopped() {
    const auto& aborted = aborted_decodes_;
    n_nodes_to_abort_ =
        std::find(aborted.begin(), aborted.end(), ++n_decodes_) != aborted.end() ? 13 : 0;
    may_stop_ = true;
    const int status = model_->is_encoder() ? llama_encode(handle_.get(), batch_.batch)
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
    if (!row) throw error(errc::internal, "no logits for batch token ", i_token);
    return row;
}

void context::copy(slot_id from, slot_id to) {
    const auto memory = llama_get_memory(handle_.get());
    if (!memory) return;
    llama_memory_seq_rm(memory, to, -1, -1);
    llama_memory_seq_cp(memory, from, to, -1, -1);
    auto* const copied = kept_of(to);
    if (!copied) return;
    const auto source = *kept_of(from);
    *copied = {.is_lost = source.is_lost};
    if (!source.has_dropped || source.is_lost) return;
    // llama.cpp copies the state behind the tokens that were dropped.
    std::vector<std::byte> state(snapshot_bytes(from));
    write_snapshot(from, state);
    read_snapshot(to, state, llama_memory_seq_pos_max(memory, from) + 1);
}

bool context::has_what_is_seen(slot_id slot, std::int32_t n_keep) const {
    return std::ranges::all_of(tail_parts_, [&](const memory_part& part) {
        return kqview::has_what_is_seen(part, model_->get()->hparams, slot, n_keep);
    });
}

bool context::truncate(slot_id slot, std::int32_t n_keep) {
    const auto memory = llama_get_memory(handle_.get());
    if (!memory) return true;
    if (n_keep > 0 && !has_what_is_seen(slot, n_keep)) return false;
    auto* const kept = kept_of(slot);
    return kept ? drop(*kept, slot, n_keep) : llama_memory_seq_rm(memory, slot, n_keep, -1);
}

context::kept_states* context::kept_of(slot_id slot) {
    return kept_states_.empty() ? nullptr : &kept_states_[static_cast<std::size_t>(slot)];
}

bool context::drop(kept_states& kept, slot_id slot, std::int32_t n_keep) {
    const auto memory = llama_get_memory(handle_.get());
    const auto n_dropped = llama_memory_seq_pos_max(memory, slot) + 1 - n_keep;
    if (n_keep == 0) {
        kept = {};
    } else if (kept.is_lost || n_dropped > kept.n_droppable) {
        return false;
    } else if (n_dropped > 0) {
        kept = {.has_dropped = true};
    }
    return llama_memory_seq_rm(memory, slot, n_keep, -1);
}

// The states of other slots may have moved, without those that were kept.
void context::note_step(std::span<const step_token> tokens, bool has_failed) {
    if (kept_states_.empty()) return;
    for (auto& kept : kept_states_) kept.n_droppable = 0;
    for (const auto& token : tokens)
        *kept_of(token.slot) = {.n_droppable = -1, .is_lost = has_failed};  // one of them stays
    if (has_failed) return;
    for (const auto& token : tokens) {
        auto& n = kept_of(token.slot)->n_droppable;
        n = std::min(n + 1, n_states_kept);
    }
}

int context::n_dropped_most() const {
    return kept_states_.empty() ? std::numeric_limits<int>::max() : n_states_kept;
}

bool context::drops_tail(slot_id slot, std::int32_t n_keep) const {
    if (n_keep == 0) return true;
    return std::ranges::all_of(tail_parts_, &memory_part::is_ring) &&
           has_what_is_seen(slot, n_keep);
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
    throw error(errc::out_of_memory, "llama.cpp could not reserve its compute buffers: ",
                log_ring::instance().errors_since(log_position), "; lower n_ubatch or n_slots");
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
        throw error(errc::unsupported_model, "pooling is '", options.pooling, "', but ",
                    has_hidden ? "this model has no classifier head; choose mean, cls, last or none"
                               : "llama.cpp gives no embedding for this model; leave pooling out");
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
        if (!row) throw error(errc::internal, "no embedding of slot ", slot);
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

std::size_t context::n_ring_cells() const {
    const auto ring = std::ranges::find_if(tail_parts_, &memory_part::is_ring);
    return ring == tail_parts_.end() ? 0 : ring->n_cells();
}

void context::read_ring(slot_id slot, std::span<std::int32_t> positions) const {
    const auto ring = std::ranges::find_if(tail_parts_, &memory_part::is_ring);
    const auto& cells = ring->cache->get_cells(slot);
    for (std::uint32_t i = 0; i < positions.size(); ++i) {
        const bool is_own = !cells.is_empty(i) && cells.seq_has(i, slot);
        positions[i] = is_own ? cells.pos_get(i) : -1;
    }
}

std::uint32_t context::n_seen_least() const {
    const auto& hparams = model_->get()->hparams;
    return hparams.swa_type == LLAMA_SWA_TYPE_STANDARD ? std::max(2u, hparams.n_swa) - 1 : 1;
}

bool context::has_whole_cache() const {
    try {
        return std::ranges::none_of(parts(), &memory_part::is_ring);
    } catch (const error&) {
        return false;
    }
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

std::size_t context::snapshot_memory_bytes() const {
    std::size_t n_bytes = 0;
    for (const auto& part : tail_parts_) n_bytes += memory_bytes_of(part);
    return n_bytes;
}

std::size_t context::snapshot_bytes(slot_id slot) {
    std::size_t n_bytes = 0;
    for (const auto& part : tail_parts_) n_bytes += kqview::write_state(part, slot, {});
    return n_bytes;
}

void context::write_snapshot(slot_id slot, std::span<std::byte> out) {
    const llama_activity guard("taking a checkpoint");
    llama_synchronize(handle_.get());
    for (const auto& part : tail_parts_) out = out.subspan(kqview::write_state(part, slot, out));
    model_->rpc().check();
}

void context::read_snapshot(slot_id slot, std::span<const std::byte> bytes, int n_tokens) {
    const llama_activity guard("going back to a checkpoint");
    llama_synchronize(handle_.get());
    if (auto* const kept = kept_of(slot)) *kept = {};
    for (const auto& part : tail_parts_) {
        bytes = kqview::read_state(part, slot, bytes, n_tokens);
    }
    model_->rpc().check();
    // The other parts drop their tails now that these have.
    if (truncate(slot, n_tokens)) return;
    throw error(errc::internal, "slot ", slot, " did not go back to ", n_tokens, " tokens");
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
    throw error(errc::internal, "saving a slot, llama.cpp left ", left.size(), " bytes of ",
                out.size());
}

void context::read_state(slot_id slot, std::span<const std::byte> bytes, int n_tokens) {
    const llama_activity guard("restoring a slot");
    llama_synchronize(handle_.get());
    if (auto* const kept = kept_of(slot)) *kept = {};
    // With the old cells goes what a memory has derived from them, which may differ for new ones.
    llama_memory_seq_rm(llama_get_memory(handle_.get()), slot, 0, -1);
    for (const auto& part : parts()) {
        bytes = kqview::read_state(part, slot, bytes, n_tokens);
    }
    model_->rpc().check();
    if (!bytes.empty()) throw error(errc::internal, "llama.cpp left bytes of a restored slot");
}

}  // namespace kqview
