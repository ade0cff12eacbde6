// SES1 blobs written by hand, field by field, independent of the code under test.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "state/kv_layout.h"

namespace kqview::test {

struct blob_options {
    std::vector<std::int32_t> tokens{11, 12, 13};
    std::vector<std::int32_t> positions{0, 1, 2};
    std::uint32_t n_stream = 1;
    std::uint32_t i_stream = 0;
    bool is_transposed = false;
    bool has_extra = false;
    // Parts behind the first cache: the cache of a sliding window, a recurrent state.
    bool has_window = false;
    bool has_state = false;
    bool has_untyped = false;  // a block behind the state's R that does not say its type
    std::size_t n_ring = 0;    // the window's cache has the last so many tokens alone
    // One quantised block a row, of this type and size, in place of four F32 numbers; not
    // transposed.
    kv_type type = kv_type::f32;
    std::uint32_t block_bytes = 0;
};

struct built_blob {
    std::vector<std::byte> bytes;
    std::map<std::string, std::size_t> at;  // offset of each field, the first of its name

    template <class number>
    void put(const std::string& name, number value) {
        at.emplace(name, bytes.size());
        const auto* const from = reinterpret_cast<const std::byte*>(&value);
        bytes.insert(bytes.end(), from, from + sizeof(value));
    }
    template <class number>
    built_blob with(const std::string& name, number value) const {
        auto copy = *this;
        const auto* const from = reinterpret_cast<const std::byte*>(&value);
        std::copy(from, from + sizeof(value),
                  copy.bytes.begin() + static_cast<std::ptrdiff_t>(at.at(name)));
        return copy;
    }
};

inline constexpr std::uint32_t n_test_layer = 2;
inline constexpr std::uint32_t n_test_width = 4;

// Number `column` of position `position` in block `i_block` (keys, then values).
inline float test_value(std::uint32_t i_block, std::int32_t position, std::uint32_t column) {
    return static_cast<float>(i_block) * 100.0f + static_cast<float>(position) +
           static_cast<float>(column) / 8.0f;
}

// Two layers, four F32 numbers a cell.
inline void put_cache(built_blob& out, const blob_options& options) {
    out.put("n_stream", options.n_stream);
    const auto n_cells = static_cast<std::uint32_t>(options.positions.size());
    for (std::uint32_t stream = 0; stream < options.n_stream; ++stream) {
        const bool is_ours = stream == options.i_stream && n_cells > 0;
        out.put(is_ours ? "n_cells" : "n_no_cells", is_ours ? n_cells : std::uint32_t{0});
        if (!is_ours) continue;
        for (std::uint32_t i = 0; i < n_cells; ++i) {
            const auto position = options.positions[i];
            out.put("position", position);
            out.put("n_seq_id", std::uint32_t{1});
            if (options.has_extra) {
                out.put("x", position);
                out.put("y", position);
                out.put("cell_token", options.tokens[static_cast<std::size_t>(position)]);
            }
            out.put("cell_sequence", static_cast<std::int32_t>(options.i_stream));
        }
        out.put("is_transposed", std::uint32_t{options.is_transposed});
        out.put("n_layer", n_test_layer);
        for (std::uint32_t block = 0; block < 2 * n_test_layer; ++block) {
            const std::string name = block < n_test_layer ? "k" : "v";
            out.put(name + "_type", static_cast<std::int32_t>(options.type));
            if (options.block_bytes > 0) {
                out.put(name + "_row_bytes", std::uint64_t{options.block_bytes});
                const auto n_bytes = n_cells * options.block_bytes;
                for (std::uint32_t i = 0; i < n_bytes; ++i)
                    out.put(name + "_byte", std::uint8_t{17});
                continue;
            }
            if (options.is_transposed && block >= n_test_layer) {
                out.put("v_element_bytes", std::uint32_t{4});
                out.put("v_width", n_test_width);
                for (std::uint32_t j = 0; j < n_test_width; ++j) {
                    for (const auto position : options.positions) {
                        out.put("v_value", test_value(block, position, j));
                    }
                }
                continue;
            }
            out.put(name + "_row_bytes", std::uint64_t{4 * n_test_width});
            for (const auto position : options.positions) {
                for (std::uint32_t j = 0; j < n_test_width; ++j) {
                    out.put(name + "_value", test_value(block, position, j));
                }
            }
        }
    }
}

// Two layers, of which the second alone has a state.
inline void put_state(built_blob& out, const blob_options& options) {
    const auto n = static_cast<std::int32_t>(options.tokens.size());
    out.put("n_states", n > 0 ? std::uint32_t{1} : std::uint32_t{0});
    if (n == 0) return;
    out.put("state_position", n - 1);
    out.put("state_n_seq_id", std::uint32_t{0});
    out.put("state_is_transposed", std::uint32_t{0});
    out.put("state_n_layer", n_test_layer);
    for (const auto* const name : {"r", "s"}) {
        out.put(name + std::string("_type"), static_cast<std::int32_t>(kv_type::f32));
        out.put(name + std::string("_row_bytes"), std::uint64_t{4});
        out.put(name + std::string("_value"), 1e30f);
        if (!options.has_untyped || *name == 's') continue;
        out.put("p_row_bytes", std::uint64_t{8});
        for (int i = 0; i < 2; ++i) out.put("p_value", 1e30f);
    }
}

inline blob_options ring_of(blob_options options) {
    const auto n = options.tokens.size(), n_cells = std::min(n, options.n_ring);
    options.positions.resize(n_cells);
    std::iota(options.positions.begin(), options.positions.end(),
              static_cast<std::int32_t>(n - n_cells));
    std::reverse(options.positions.begin(), options.positions.end());  // it has no order
    return options;
}

// Of slots with these numbers of the tokens.
inline built_blob build_checkpoints(const blob_options& options,
                                    const std::vector<std::uint32_t>& counts) {
    built_blob out;
    for (const char letter : {'S', 'C', 'P', '1'}) out.put("magic", letter);
    out.put("n", static_cast<std::uint32_t>(counts.size()));
    for (const auto n : counts) {
        auto then = options;
        then.tokens.resize(n);
        then.n_stream = 1;
        then.i_stream = 0;
        built_blob parts;
        if (options.n_ring > 0) put_cache(parts, ring_of(then));
        if (options.has_state) put_state(parts, then);
        out.put("n_tokens", n);
        out.put("bytes", std::uint64_t{parts.bytes.size()});
        for (const auto& [name, at] : parts.at) out.at.emplace(name, out.bytes.size() + at);
        out.bytes.insert(out.bytes.end(), parts.bytes.begin(), parts.bytes.end());
    }
    return out;
}

inline built_blob build_blob(const blob_options& options = {}) {
    built_blob out;
    for (const char letter : {'S', 'E', 'S', '1'}) out.put("magic", letter);
    out.put("n_tokens", static_cast<std::uint32_t>(options.tokens.size()));
    for (const auto id : options.tokens) out.put("token", id);
    out.put("kv_magic", std::uint32_t{0xaf143cd8});
    out.put("sequence", static_cast<std::int32_t>(options.i_stream));
    put_cache(out, options);
    out.at.emplace("second", out.bytes.size());
    if (options.has_window) put_cache(out, options.n_ring > 0 ? ring_of(options) : options);
    out.at.emplace("third", out.bytes.size());
    if (options.has_state) put_state(out, options);
    return out;
}

inline kv_layout test_layout(const blob_options& options = {}) {
    kv_part cache;
    cache.has_extra = options.has_extra;
    cache.is_transposed = options.is_transposed;
    cache.n_layer = n_test_layer;
    cache.keys.assign(n_test_layer, {kv_type::f32, 4 * n_test_width, 0});
    if (options.block_bytes > 0) {
        cache.keys.assign(n_test_layer, {options.type, options.block_bytes, 0});
    }
    cache.values = cache.keys;
    if (options.is_transposed) {
        cache.values.assign(n_test_layer, {kv_type::f32, 4, n_test_width});
    }
    kv_layout layout{100, 16, {cache}};
    if (options.has_window) {
        auto& window = layout.parts.emplace_back(cache);
        window.has_window = true;
        window.n_ring_cells = static_cast<std::uint32_t>(options.n_ring);
        window.n_ring_least = window.n_ring_cells > 0 ? window.n_ring_cells - 1 : 0;
    }
    if (options.has_state) {
        kv_part state;
        state.is_recurrent = true;
        state.n_layer = n_test_layer;
        state.keys.assign(2, {kv_type::f32, 4, 0});
        if (options.has_untyped) {
            state.keys.insert(state.keys.begin() + 1, {kv_type::f32, 8, 0, false});
            state.untyped = {1};
        }
        layout.parts.push_back(state);
    }
    return layout;
}

// What learn_layout is told of a layout.
inline kv_layout unlearned(const kv_layout& layout) {
    kv_layout known{layout.n_vocab, layout.n_ctx, {}};
    for (const auto& part : layout.parts) {
        auto& one = known.parts.emplace_back(part);
        one.keys.clear();
        one.values.clear();
        one.is_transposed = false;
        one.n_layer = 0;
    }
    return known;
}

}  // namespace kqview::test
