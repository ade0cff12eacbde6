// A sequence's part of the cache as bytes. Like context.cpp this file sees internal headers of
// llama.cpp: its public interface neither applies a pending shift nor tells one kind of cache from
// another.
#include <llama-context.h>
#include <llama-kv-cache-iswa.h>
#include <llama-kv-cache.h>
#include <llama-model.h>

#include <string>

#include "base/error.h"
#include "base/log.h"
#include "llama/backend.h"
#include "llama/context.h"

namespace kqview {

namespace {

// What this context keeps in place of the cache whose bytes are known; empty for that cache.
// llama.cpp leaves out of a window's cache what no later token sees, so columns would be no
// positions any more; of several caches in a row it may restore the first and fail at the second.
std::string other_than_plain(const llama_memory_i* memory) {
    if (!memory) return "no KV cache";
    if (dynamic_cast<const llama_kv_cache*>(memory)) return "";
    if (dynamic_cast<const llama_kv_cache_iswa*>(memory)) return "a cache for sliding windows";
    return "recurrent state or several caches";
}

// What keeps a plain cache's keys from being moved, or is moved wrongly by llama.cpp; empty when
// nothing does. tests/engine/test_architectures_cache.py compares moved keys of every architecture with
// fresh ones.
std::string rotation_obstacle(const llama_model& source, ggml_type type) {
    if (source.pos_embd) return "learned positions";
    switch (source.arch) {
        case LLM_ARCH_HUNYUAN_DENSE:
        case LLM_ARCH_HUNYUAN_MOE:
        case LLM_ARCH_MAINCODER: return "keys that it scales after their rotation";
        // llama.cpp moves keys with the rope factors of the file, these rotate without them.
        case LLM_ARCH_COGVLM:
        case LLM_ARCH_PANGU_EMBED: return "keys that it rotates in a way of its own";
        case LLM_ARCH_BAICHUAN:
            if (source.type != LLM_TYPE_7B) return "keys that it does not rotate";
            break;
        default: break;
    }
    // Other types and parts of quantised heads end the process in ggml.
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

llama_kv_cache& plain_cache(llama_context* handle) {
    auto* const memory = llama_get_memory(handle);
    const auto kind = other_than_plain(memory);
    if (kind.empty()) return dynamic_cast<llama_kv_cache&>(*memory);
    throw error(errc::unsupported_model,
                "slot: this model keeps " + kind +
                    ", which cannot be saved whole; send the ids again instead");
}

}  // namespace

bool context::is_causal() const { return handle_->get_cparams().causal_attn; }

context::cache_facts context::cache() const {
    if (!has_cache()) {
        throw error(errc::unsupported_model,
                    "slot: this model keeps no KV cache; send the ids again instead");
    }
    const auto& cache = plain_cache(handle_.get());
    return {cache.get_n_stream(), cache.has_cell_ext()};
}

std::string context::shift_obstacle() const {
    if (!has_cache()) return "no KV cache";
    auto* const memory = llama_get_memory(handle_.get());
    if (auto kind = other_than_plain(memory); !kind.empty()) return kind;
    if (!llama_memory_can_shift(memory)) return "positions that cannot be moved";
    return rotation_obstacle(*model_->get(), plain_cache(handle_.get()).type_k());
}

bool context::discard(slot_id slot, std::span<const token_range> gone) {
    auto& cache = plain_cache(handle_.get());
    if (gone.empty() || !shift_obstacle().empty()) return false;
    for (const auto& range : gone) {
        const auto start = static_cast<llama_pos>(range.start);
        // A plain cache removes any range.
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
                "slot.shift: llama.cpp could not rotate the keys; lower n_ctx or n_slots");
}

void context::flush_shifts() {
    const llama_activity guard("shifting a slot");
    model_->rpc().check();
    const auto turn = model_->rpc().take_turn();
    handle_->memory_update(false);
    model_->rpc().check();
}

std::size_t context::state_bytes(slot_id slot) {
    plain_cache(handle_.get());
    return llama_state_seq_get_size(handle_.get(), slot);
}

void context::write_state(slot_id slot, std::span<std::byte> out) {
    const llama_activity guard("saving a slot");
    const auto log_position = log_ring::instance().position();
    const auto n_written = llama_state_seq_get_data(
        handle_.get(), reinterpret_cast<std::uint8_t*>(out.data()), out.size(), slot);
    model_->rpc().check();
    if (n_written == out.size()) return;
    throw error(errc::internal, "slot.save: llama.cpp wrote " + std::to_string(n_written) +
                                    " bytes of " + std::to_string(out.size()) + ": " +
                                    log_ring::instance().errors_since(log_position));
}

bool context::read_state(slot_id slot, std::span<const std::byte> bytes, int n_tokens) {
    const llama_activity guard("restoring a slot");
    auto& cache = plain_cache(handle_.get());
    const auto n_read = llama_state_seq_set_data(
        handle_.get(), reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size(), slot);
    model_->rpc().check();
    if (n_read != bytes.size()) return false;
    const auto& cells = cache.get_cells(slot);
    for (int i = 0; i < n_tokens; ++i) {
        const auto cell = static_cast<std::uint32_t>(i);
        if (cells.is_empty(cell) || cells.pos_get(cell) != i || !cells.seq_has(cell, slot))
            return false;
    }
    return cells.seq_pos_max(slot) == n_tokens - 1;
}

}  // namespace kqview
