#include "llama/sequence_state.h"

#include <ggml-backend.h>
#include <llama-io.h>
#include <llama-kv-cache-dsa-iswa.h>
#include <llama-kv-cache-dsa.h>
#include <llama-kv-cache-iswa.h>
#include <llama-kv-cache-msa.h>
#include <llama-kv-cache.h>
#include <llama-memory-hybrid-idx.h>
#include <llama-memory-hybrid-iswa.h>
#include <llama-memory-hybrid.h>
#include <llama-memory-recurrent.h>
#include <llama.h>

#include <cstring>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

// What a cache holds of a sequence: cells 0..n-1, in a stream of its own.
std::uint32_t n_cells_held(const llama_kv_cache& cache, slot_id slot) {
    const auto& cells = cache.get_cells(slot);
    std::uint32_t n = 0;
    for (std::uint32_t i = 0; i < cells.size(); ++i) n += cells.seq_has(i, slot);
    return n;
}

// Whether a window's cache has room for all that the model's other cache holds.
bool is_whole(const llama_kv_cache& window, const llama_kv_cache& other) {
    return window.get_size() >= other.get_size();
}
constexpr const char* no_window = "only what its sliding windows see (swa_full is off)";

bool are_at_their_positions(const llama_kv_cache& cache, slot_id slot, std::uint32_t n_cells) {
    const auto& cells = cache.get_cells(slot);
    if (n_cells > cells.size()) return false;
    for (std::uint32_t i = 0; i < n_cells; ++i) {
        if (cells.is_empty(i) || !cells.seq_has(i, slot)) return false;
        if (cells.pos_get(i) != static_cast<llama_pos>(i)) return false;
    }
    return cells.seq_pos_max(slot) == static_cast<llama_pos>(n_cells) - 1;
}

// Collects what llama.cpp writes, as far as there is room, and counts it.
class state_writer : public llama_io_write_i {
public:
    explicit state_writer(std::span<std::byte> out) : out_(out) {}

    void write(const void* from, std::size_t n) override {
        if (auto* const to = place(n)) std::memcpy(to, from, n);
    }
    void write_tensor(ggml_tensor* tensor, std::size_t offset, std::size_t n) override {
        if (auto* const to = place(n)) ggml_backend_tensor_get(tensor, to, offset, n);
    }
    std::size_t n_bytes() override { return n_written_; }

private:
    std::byte* place(std::size_t n) {
        n_written_ += n;
        return n > 0 && n_written_ <= out_.size() ? &out_[n_written_ - n] : nullptr;
    }

    std::span<std::byte> out_;
    std::size_t n_written_ = 0;
};

// Of a cache: one stream, and every cell of the sequence.
class cache_writer final : public llama_io_write_i {
public:
    cache_writer(const llama_kv_cache& cache, slot_id slot, std::span<std::byte> out)
        : cache_(cache),
          slot_(slot),
          n_before_(cache.get_stream(slot)),
          n_held_(n_cells_held(cache, slot)),
          to_(out) {}

    void write(const void* from, std::size_t n) override {
        const auto i = n_numbers_++;
        if (i == 0) return put(std::uint32_t{1});
        if (i <= n_before_) return;  // streams without cells
        if (i == n_before_ + 1) {
            std::memcpy(&n_seen_, from, sizeof(n_seen_));
            put(n_held_);
            if (n_seen_ < n_held_) put_cells();
        } else if (n_seen_ == n_held_ || i > n_before_ + 1 + n_numbers_of_cells()) {
            to_.write(from, n);
        }
    }
    // The hidden cells lie in front of those that are seen.
    void write_tensor(ggml_tensor* tensor, std::size_t offset, std::size_t n) override {
        const auto n_hidden = n_seen_ < n_held_ ? n / n_seen_ * (n_held_ - n_seen_) : 0;
        to_.write_tensor(tensor, offset - n_hidden, n + n_hidden);
    }
    // The numbers at the end are those of the streams behind, without cells.
    std::size_t n_bytes() override {
        return to_.n_bytes() - sizeof(std::uint32_t) * (cache_.get_n_stream() - 1 - n_before_);
    }

private:
    template <class number>
    void put(number value) {
        to_.write(&value, sizeof(value));
    }
    std::size_t n_numbers_of_cells() const {
        return n_seen_ * (cache_.has_cell_ext() ? std::size_t{4} : 3);
    }
    void put_cells() {
        if (!are_at_their_positions(cache_, slot_, n_held_)) {
            throw error(errc::internal, "cells that a sliding window hides are not in their place");
        }
        for (std::uint32_t i = 0; i < n_held_; ++i) {
            put(static_cast<llama_pos>(i));
            put(std::uint32_t{1});
            if (cache_.has_cell_ext()) put(cache_.get_cells(slot_).ext_get(i));
            put(slot_);
        }
    }

    const llama_kv_cache& cache_;
    const slot_id slot_;
    const std::uint32_t n_before_;  // streams before the sequence's
    const std::uint32_t n_held_;
    std::uint32_t n_seen_ = 0;  // cells that the window does not hide
    std::size_t n_numbers_ = 0;
    state_writer to_;
};

// What a memory reads: `head`, then bytes.
class state_reader final : public llama_io_read_i {
public:
    state_reader(std::vector<std::uint32_t> head, std::span<const std::byte> bytes)
        : head_(std::move(head)), bytes_(bytes) {}

    void read(void* to, std::size_t n) override {
        if (n_head_read_ < head_.size()) {
            std::memcpy(to, &head_[n_head_read_++], sizeof(std::uint32_t));
        } else {
            std::memcpy(to, take(n), n);
        }
    }
    void read_tensor(ggml_tensor* tensor, std::size_t offset, std::size_t n) override {
        if (n > 0) ggml_backend_tensor_set(tensor, take(n), offset, n);
    }
    std::size_t n_bytes() override { return 0; }  // nobody asks
    std::span<const std::byte> rest() const { return bytes_; }

private:
    const std::byte* take(std::size_t n) {
        if (n > bytes_.size()) throw std::runtime_error("the saved slot ends too early");
        const auto* const taken = bytes_.data();
        bytes_ = bytes_.subspan(n);
        return taken;
    }

    std::vector<std::uint32_t> head_;
    std::size_t n_head_read_ = 0;
    std::span<const std::byte> bytes_;
};

}  // namespace

bool memory_part::has_extra() const { return cache && cache->has_cell_ext(); }

std::size_t write_state(const memory_part& part, slot_id slot, std::span<std::byte> out) {
    if (part.cache) {
        cache_writer writer(*part.cache, slot, out);
        part.cache->state_write(writer, slot, 0);
        return writer.n_bytes();
    }
    state_writer writer(out);
    if (part.state->seq_pos_max(slot) < 0) {  // llama.cpp would write the head of each layer
        const std::uint32_t n_cells = 0;
        writer.write(&n_cells, sizeof(n_cells));
    } else {
        part.state->state_write(writer, slot, 0);
    }
    return writer.n_bytes();
}

std::vector<memory_part> parts_of(llama_memory_i* memory) {
    const char* why = "keys that it compresses over several tokens";
    if (!memory) {
        why = "no KV cache";
    } else if (auto* const plain = dynamic_cast<llama_kv_cache*>(memory)) {
        return {{.cache = plain}};
    } else if (auto* const window = dynamic_cast<llama_kv_cache_iswa*>(memory)) {
        if (is_whole(*window->get_swa(), *window->get_base())) {
            return {{.cache = window->get_base()}, {.cache = window->get_swa()}};
        }
        why = no_window;
    } else if (auto* const sparse = dynamic_cast<llama_kv_cache_dsa*>(memory)) {
        return {{.cache = sparse->get_mla()}, {.cache = sparse->get_lid()}};
    } else if (auto* const both = dynamic_cast<llama_kv_cache_dsa_iswa*>(memory)) {
        if (is_whole(*both->get_swa(), *both->get_dsa()->get_mla())) {
            return {{.cache = both->get_dsa()->get_mla()},
                    {.cache = both->get_dsa()->get_lid()},
                    {.cache = both->get_swa()}};
        }
        why = no_window;
    } else if (auto* const indexed = dynamic_cast<llama_kv_cache_msa*>(memory)) {
        return {{.cache = indexed->get_base()}, {.cache = indexed->get_idx()}};
    } else if (auto* const recurrent = dynamic_cast<llama_memory_recurrent*>(memory)) {
        return {{.state = recurrent}};
    } else if (dynamic_cast<llama_memory_hybrid_idx*>(memory)) {
        why = "an index that mirrors the cells of another cache";
    } else if (auto* const hybrid = dynamic_cast<llama_memory_hybrid*>(memory)) {
        return {{.cache = hybrid->get_mem_attn()}, {.state = hybrid->get_mem_recr()}};
    } else if (auto* const windowed = dynamic_cast<llama_memory_hybrid_iswa*>(memory)) {
        auto* const caches = windowed->get_mem_attn();
        if (is_whole(*caches->get_swa(), *caches->get_base())) {
            return {{.cache = caches->get_base()},
                    {.cache = caches->get_swa()},
                    {.state = windowed->get_mem_recr()}};
        }
        why = no_window;
    }
    throw error(errc::unsupported_model, "this model keeps ", why,
                ", which cannot be saved; send the token ids again instead");
}

std::vector<memory_part> tail_parts_of(llama_memory_i* memory) {
    if (auto* const recurrent = dynamic_cast<llama_memory_recurrent*>(memory)) {
        return {{.state = recurrent}};
    }
    if (auto* const hybrid = dynamic_cast<llama_memory_hybrid*>(memory)) {
        return {{.state = hybrid->get_mem_recr()}};
    }
    if (auto* const windowed = dynamic_cast<llama_memory_hybrid_iswa*>(memory)) {
        return {{.state = windowed->get_mem_recr()}};
    }
    return {};
}

std::size_t memory_bytes_of(const memory_part& part) {
    const auto breakdown =
        part.cache ? part.cache->memory_breakdown() : part.state->memory_breakdown();
    return std::accumulate(breakdown.begin(), breakdown.end(), std::size_t{0},
                           [](std::size_t sum, const auto& one) { return sum + one.second; });
}

std::span<const std::byte> read_state(const memory_part& part, slot_id slot,
                                      std::span<const std::byte> bytes, int n_tokens) {
    try {
        if (part.state) {
            state_reader reader({}, bytes);
            part.state->state_read(reader, slot, 0);
            if (part.state->seq_pos_max(slot) == n_tokens - 1) return reader.rest();
        } else {
            // llama.cpp puts the cells of any stream into the sequence's: the last one has them.
            std::vector<std::uint32_t> head(part.cache->get_n_stream(), 0);
            head[0] = part.cache->get_n_stream();
            state_reader reader(std::move(head), bytes.subspan(sizeof(std::uint32_t)));
            part.cache->state_read(reader, slot, 0);
            const auto n_cells = static_cast<std::uint32_t>(n_tokens);
            if (are_at_their_positions(*part.cache, slot, n_cells)) return reader.rest();
        }
    } catch (const std::exception& failure) {
        throw error(errc::internal, "llama.cpp refused a slot: ", failure.what());
    }
    throw error(errc::internal, "llama.cpp put the cells of a slot elsewhere");
}

}  // namespace kqview
