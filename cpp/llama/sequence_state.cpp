#include "llama/sequence_state.h"

#include <ggml-backend.h>
#include <llama-hparams.h>
#include <llama-io.h>
#include <llama-kv-cache-dsa-iswa.h>
#include <llama-kv-cache-dsa.h>
#include <llama-kv-cache-dsv4.h>
#include <llama-kv-cache-iswa.h>
#include <llama-kv-cache-msa.h>
#include <llama-kv-cache.h>
#include <llama-memory-hybrid-idx.h>
#include <llama-memory-hybrid-iswa.h>
#include <llama-memory-hybrid.h>
#include <llama-memory-recurrent.h>
#include <llama.h>

#include <array>
#include <cstring>
#include <exception>
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

// A cache of layers with a window beside one that holds all tokens.
memory_part window_part(llama_kv_cache* window, const llama_kv_cache& other) {
    return {.cache = window, .has_window = true, .is_ring = window->get_size() < other.get_size()};
}

// The ring is where llama.cpp found room: its cells have no order.
bool is_end_of(const llama_kv_cache& ring, slot_id slot, std::uint32_t n_tokens) {
    const auto last = static_cast<llama_pos>(n_tokens) - 1;
    const auto first = ring.seq_pos_min(slot);
    return ring.seq_pos_max(slot) == last &&
           n_cells_held(ring, slot) == static_cast<std::uint32_t>(last - first + 1);
}

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

// Of a cache: one stream, and every cell of the sequence; of a ring, those that windows see.
class cache_writer final : public llama_io_write_i {
public:
    cache_writer(const memory_part& part, slot_id slot, std::span<std::byte> out)
        : cache_(*part.cache),
          slot_(slot),
          is_ring_(part.is_ring),
          n_before_(cache_.get_stream(slot)),
          n_held_(n_cells_held(cache_, slot)),
          to_(out) {}

    void write(const void* from, std::size_t n) override {
        const auto i = n_numbers_++;
        if (i == 0) return put(std::uint32_t{1});
        if (i <= n_before_) return;  // streams without cells
        if (i == n_before_ + 1) {
            std::memcpy(&n_seen_, from, sizeof(n_seen_));
            if (is_ring_) n_held_ = n_seen_;
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
    const bool is_ring_;
    const std::uint32_t n_before_;  // streams before the sequence's
    std::uint32_t n_held_;
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

std::array<llama_dsv4_comp_state*, 3> states_of(const llama_kv_cache_dsv4& compressor) {
    return {compressor.get_csa_state(), compressor.get_hca_state(), compressor.get_lid_state()};
}

}  // namespace

bool memory_part::has_extra() const { return cache && cache->has_cell_ext(); }

std::size_t memory_part::n_cells() const { return cache ? cache->get_size() : 0; }

std::vector<std::size_t> memory_part::untyped() const {
    std::vector<std::size_t> blocks;
    std::size_t n_blocks = 0;
    for (std::size_t il = 0; state && il < state->r_l.size(); ++il) {
        n_blocks += state->r_l[il] != nullptr;
        if (state->r_l[il] && state->p_l[il]) blocks.push_back(n_blocks++);
    }
    return blocks;
}

std::size_t write_state(const memory_part& part, slot_id slot, std::span<std::byte> out) {
    if (part.cache) {
        cache_writer writer(part, slot, out);
        part.cache->state_write(writer, slot, 0);
        return writer.n_bytes();
    }
    state_writer writer(out);
    if (part.compressor) {
        for (const auto* const one : states_of(*part.compressor)) {
            one->state_write(writer, slot, 0, part.compressor->get_rs_idx());
        }
    } else if (part.state->seq_pos_max(slot) < 0) {  // llama.cpp would write the head of each layer
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
        return {{.cache = window->get_base()}, window_part(window->get_swa(), *window->get_base())};
    } else if (auto* const sparse = dynamic_cast<llama_kv_cache_dsa*>(memory)) {
        return {{.cache = sparse->get_mla()}, {.cache = sparse->get_lid()}};
    } else if (auto* const both = dynamic_cast<llama_kv_cache_dsa_iswa*>(memory)) {
        auto* const base = both->get_dsa();
        return {{.cache = base->get_mla()},
                {.cache = base->get_lid()},
                window_part(both->get_swa(), *base->get_mla())};
    } else if (auto* const indexed = dynamic_cast<llama_kv_cache_msa*>(memory)) {
        return {{.cache = indexed->get_base()}, {.cache = indexed->get_idx()}};
    } else if (auto* const recurrent = dynamic_cast<llama_memory_recurrent*>(memory)) {
        return {{.state = recurrent}};
    } else if (auto* const hybrid = dynamic_cast<llama_memory_hybrid*>(memory)) {
        std::vector<memory_part> parts{{.cache = hybrid->get_mem_attn()},
                                       {.state = hybrid->get_mem_recr()}};
        // An index has each token in the cell that it has in the other cache: in that of its
        // position, as read_state() sees to in both.
        auto* const index = dynamic_cast<llama_memory_hybrid_idx*>(memory);
        if (index && index->get_mem_idx()) parts.push_back({.cache = index->get_mem_idx()});
        return parts;
    } else if (auto* const windowed = dynamic_cast<llama_memory_hybrid_iswa*>(memory)) {
        auto* const caches = windowed->get_mem_attn();
        return {{.cache = caches->get_base()},
                window_part(caches->get_swa(), *caches->get_base()),
                {.state = windowed->get_mem_recr()}};
    }
    throw error(errc::unsupported_model, "this model keeps ", why,
                ", which cannot be saved; send the token ids again instead");
}

std::vector<memory_part> tail_parts_of(llama_memory_i* memory) {
    std::vector<memory_part> parts;
    if (auto* const compressed = dynamic_cast<llama_kv_cache_dsv4*>(memory)) {
        auto* const caches = compressed->get_raw();
        parts = {window_part(caches->get_swa(), *caches->get_base()), {.compressor = compressed}};
    } else {
        parts = parts_of(memory);
    }
    std::erase_if(parts, [](const memory_part& one) { return one.cache && !one.is_ring; });
    return parts;
}

// If the position before the first one that is there is hidden, all that is missing is.
bool has_what_is_seen(const memory_part& part, const llama_hparams& of, slot_id slot,
                      std::int32_t n_keep) {
    if (!part.is_ring) return true;
    const auto first = part.cache->seq_pos_min(slot);
    return first <= 0 || llama_hparams::is_masked_swa(of.n_swa, of.swa_type, first - 1, n_keep);
}

std::size_t memory_bytes_of(const memory_part& part) {
    std::size_t n_bytes = 0;
    const auto add = [&](const auto& breakdown) {
        for (const auto& [buffer_type, n] : breakdown) n_bytes += n;
    };
    if (part.cache) add(part.cache->memory_breakdown());
    if (part.state) add(part.state->memory_breakdown());
    if (part.compressor) {
        for (const auto* const one : states_of(*part.compressor)) add(one->memory_breakdown());
    }
    return n_bytes;
}

std::span<const std::byte> read_state(const memory_part& part, slot_id slot,
                                      std::span<const std::byte> bytes, int n_tokens) {
    const auto n_cells = static_cast<std::uint32_t>(n_tokens);
    try {
        if (part.cache) {
            // llama.cpp puts the cells of any stream into the sequence's: the last one has them.
            std::vector<std::uint32_t> head(part.cache->get_n_stream(), 0);
            head[0] = part.cache->get_n_stream();
            state_reader reader(std::move(head), bytes.subspan(sizeof(std::uint32_t)));
            part.cache->state_read(reader, slot, 0);
            if (part.is_ring ? is_end_of(*part.cache, slot, n_cells)
                             : are_at_their_positions(*part.cache, slot, n_cells))
                return reader.rest();
        } else {
            state_reader reader({}, bytes);
            if (part.compressor) {
                for (auto* const one : states_of(*part.compressor))
                    one->state_read(reader, slot, 0);
                // Its caches drop nothing that these might still need.
                part.compressor->get_raw()->seq_rm(slot, n_tokens, -1);
                return reader.rest();
            }
            part.state->state_read(reader, slot, 0);
            if (part.state->seq_pos_max(slot) == n_tokens - 1) return reader.rest();
        }
    } catch (const std::exception& failure) {
        throw error(errc::internal, "llama.cpp refused a slot: ", failure.what());
    }
    throw error(errc::internal, "llama.cpp put the cells of a slot elsewhere");
}

}  // namespace kqview
