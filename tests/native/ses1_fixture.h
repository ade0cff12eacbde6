// SES1 blobs written by hand, field by field, independent of the code under test.
#pragma once

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
inline built_blob build_blob(const blob_options& options = {}) {
    built_blob out;
    for (const char letter : {'S', 'E', 'S', '1'}) out.put("magic", letter);
    const auto n = static_cast<std::uint32_t>(options.tokens.size());
    out.put("n_tokens", n);
    for (const auto id : options.tokens) out.put("token", id);
    out.put("kv_magic", std::uint32_t{0xaf143cd8});
    out.put("sequence", static_cast<std::int32_t>(options.i_stream));
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
    return out;
}

inline kv_layout test_layout(const blob_options& options = {}) {
    kv_layout layout;
    layout.shape = {options.n_stream, options.has_extra, 100, 16};
    layout.is_transposed = options.is_transposed;
    layout.keys.assign(n_test_layer, {kv_type::f32, 4 * n_test_width, 0});
    if (options.block_bytes > 0) {
        layout.keys.assign(n_test_layer, {options.type, options.block_bytes, 0});
    }
    layout.values = layout.keys;
    if (options.is_transposed) {
        layout.values.assign(n_test_layer, {kv_type::f32, 4, n_test_width});
    }
    return layout;
}

}  // namespace kqview::test
