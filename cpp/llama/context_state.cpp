// A sequence's part of the cache as bytes. Like context.cpp this file sees internal headers of llama.cpp:
// its public interface neither applies a pending shift nor tells one kind of cache from another.
#include <llama-context.h>
#include <llama-kv-cache-iswa.h>
#include <llama-kv-cache.h>

#include <string>

#include "base/error.h"
#include "base/log.h"
#include "llama/backend.h"
#include "llama/context.h"

namespace kqview {

namespace {

[[noreturn]] void refuse(const char* kind) {
    throw error(errc::unsupported_model,
                std::string("slot: this model keeps ") + kind +
                    ", which cannot be saved whole; send the ids again instead");
}

// The cache whose bytes are known. llama.cpp leaves out of a window's cache what no later token sees, so
// columns would be no positions any more; of several caches in a row it may restore the first and fail
// at the second.
llama_kv_cache& plain_cache(llama_context* handle) {
    auto* const memory = llama_get_memory(handle);
    if (!memory) refuse("no KV cache");
    if (auto* const cache = dynamic_cast<llama_kv_cache*>(memory)) return *cache;
    if (dynamic_cast<llama_kv_cache_iswa*>(memory)) refuse("a cache for sliding windows");
    refuse("recurrent state or several caches");
}

}  // namespace

context::cache_facts context::cache() const {
    if (!has_cache()) refuse("no KV cache");
    const auto& cache = plain_cache(handle_.get());
    return {cache.get_n_stream(), cache.has_cell_ext()};
}

bool context::shift(slot_id slot, std::int32_t n_keep, std::int32_t n_discard) {
    auto* const memory = &plain_cache(handle_.get());
    if (!llama_memory_can_shift(memory)) return false;
    if (!llama_memory_seq_rm(memory, slot, n_keep, n_keep + n_discard)) return false;
    llama_memory_seq_add(memory, slot, n_keep + n_discard, -1, -n_discard);
    flush_shifts();
    return true;
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
