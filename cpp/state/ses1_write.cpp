// The writing half of SES1: from what llama.cpp wrote to a blob, and from a blob to what it reads.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"
#include "state/byte_reader.h"
#include "state/kv_values.h"
#include "state/ses1.h"

namespace kqview {

namespace {

constexpr std::size_t n_kv_head = 12;     // magic, sequence, n_stream
constexpr std::size_t n_count = 4;        // n_cells of a stream
constexpr std::size_t n_layers_head = 8;  // is_transposed, n_layer
constexpr std::size_t n_block_head =
    12;  // type and row bytes, or type, element bytes and n_columns

std::size_t cell_bytes(const kv_shape& shape) { return shape.has_extra ? 24 : 12; }

template <class number>
void put(std::span<std::byte> out, std::size_t at, number value) {
    std::memcpy(out.subspan(at, sizeof(value)).data(), &value, sizeof(value));
}

template <class number>
number get(std::span<const std::byte> bytes, std::size_t at) {
    return byte_reader(bytes, at).take<number>("number");
}

kv_block learn_block(byte_reader& in, std::uint64_t n_cells, bool is_column) {
    kv_block block;
    block.type = static_cast<kv_type>(in.take<std::int32_t>("type"));
    if (!is_known(block.type)) throw error(errc::state_format, "a type that is not known");
    if (is_column) {
        block.unit_bytes = in.take<std::uint32_t>("element size");
        block.n_columns = in.take<std::uint32_t>("width");
    } else {
        block.unit_bytes = in.take<std::uint64_t>("row size");
    }
    if (block.unit_bytes == 0 || (is_column && block.n_columns == 0)) {
        throw error(errc::state_format, "rows without bytes");
    }
    in.skip(block.bytes_of(n_cells), "rows");
    return block;
}

kv_layout learn(std::span<const std::byte> kv_data, const kv_shape& shape) {
    byte_reader in(kv_data);
    in.skip(n_kv_head - n_count, "head");
    auto n_streams_left = in.take<std::uint32_t>("n_stream");
    std::uint32_t n_cells = 0;
    while (n_cells == 0 && n_streams_left > 0) {
        n_cells = in.take<std::uint32_t>("n_cells");
        --n_streams_left;
    }
    if (n_cells == 0) throw error(errc::state_format, "no cells");
    in.skip(std::uint64_t{n_cells} * cell_bytes(shape), "cells");
    kv_layout layout;
    layout.shape = shape;
    layout.is_transposed = in.take<std::uint32_t>("V transposed") != 0;
    const auto n_layer = in.take<std::uint32_t>("n_layer");
    for (std::uint32_t i = 0; i < n_layer; ++i) {
        layout.keys.push_back(learn_block(in, n_cells, false));
    }
    const auto n_behind = std::uint64_t{n_streams_left} * n_count;
    while (in.n_left() > n_behind) {
        layout.values.push_back(learn_block(in, n_cells, layout.is_transposed));
    }
    if (in.n_left() != n_behind || layout.values.size() > n_layer) {
        throw error(errc::state_format, "an end at another place");
    }
    return layout;
}

// Copies the cells' part of kv_data, each cell to the index that is its position.
void copy_sorted(std::span<const std::byte> from, std::span<std::byte> to, std::size_t n_cells,
                 const kv_layout& layout) {
    const auto n_cell = cell_bytes(layout.shape);
    std::vector<std::size_t> position_of(n_cells);
    for (std::size_t i = 0; i < n_cells; ++i) {
        position_of[i] = static_cast<std::size_t>(get<std::int32_t>(from, i * n_cell));
    }
    std::size_t at = 0;
    const auto permute = [&](std::size_t n_unit) {
        for (std::size_t i = 0; i < n_cells; ++i) {
            std::memcpy(to.subspan(at + position_of[i] * n_unit, n_unit).data(),
                        from.subspan(at + i * n_unit, n_unit).data(), n_unit);
        }
        at += n_cells * n_unit;
    };
    const auto copy = [&](std::size_t n) {
        std::memcpy(to.subspan(at, n).data(), from.subspan(at, n).data(), n);
        at += n;
    };
    permute(n_cell);
    copy(n_layers_head);
    for (const auto* blocks : {&layout.keys, &layout.values}) {
        for (const auto& block : *blocks) {
            copy(n_block_head);
            const auto n_runs = std::max<std::uint32_t>(block.n_columns, 1);
            for (std::uint32_t j = 0; j < n_runs; ++j) {
                permute(static_cast<std::size_t>(block.unit_bytes));
            }
        }
    }
}

}  // namespace

kv_layout learn_layout(std::span<const std::byte> kv_data, const kv_shape& shape) {
    try {
        return learn(kv_data, shape);
    } catch (const error& failure) {
        throw error(errc::unsupported_model,
                    std::string("slot: this model's cache is saved in a form that is not known (") +
                        failure.what() + "); slots of it cannot be saved");
    }
}

std::size_t ses1_write_offset(std::size_t n_tokens, std::uint32_t i_stream) {
    // Empty streams in front of ours are 4 bytes each, which the header overwrites where it is long
    // enough.
    const auto n_header = ses1_header_bytes(n_tokens);
    const auto n_front = n_count * i_stream;
    return n_header >= n_front ? n_header - n_front : n_header;
}

std::size_t seal_ses1(std::span<std::byte> buffer, std::span<const token_id> tokens,
                      std::uint32_t i_stream) {
    const auto n_header = ses1_header_bytes(tokens.size());
    const auto kv_at = ses1_write_offset(tokens.size(), i_stream);
    const auto n_stream = get<std::uint32_t>(buffer, kv_at + 8);
    const auto kv_magic = get<std::uint32_t>(buffer, kv_at);
    const auto sequence = get<std::int32_t>(buffer, kv_at + 4);
    const auto count_at = kv_at + n_kv_head + n_count * i_stream;
    std::uint32_t n_cells = 0;
    std::size_t n_payload = 0;
    if (!tokens.empty()) {
        const auto n_behind = n_count * (n_stream - i_stream - 1);
        n_cells = get<std::uint32_t>(buffer, count_at);
        n_payload = buffer.size() - n_behind - count_at - n_count;
        std::memmove(buffer.data() + n_header + n_kv_head + n_count,
                     buffer.data() + count_at + n_count, n_payload);
    }
    std::memcpy(buffer.data(), "SES1", 4);
    put(buffer, 4, static_cast<std::uint32_t>(tokens.size()));
    if (!tokens.empty()) std::memcpy(buffer.data() + 8, tokens.data(), tokens.size_bytes());
    put(buffer, n_header, kv_magic);
    put(buffer, n_header + 4, sequence);
    put(buffer, n_header + 8, std::uint32_t{1});
    put(buffer, n_header + n_kv_head, n_cells);
    return n_header + n_kv_head + n_count + n_payload;
}

std::vector<std::byte> to_native(const ses1_view& view, const kv_layout& layout) {
    const auto n_stream = layout.shape.n_stream;
    std::vector<std::byte> native(n_kv_head + n_count * n_stream + view.payload.size());
    std::memcpy(native.data(), view.kv_data.data(), n_kv_head - n_count);
    put(std::span(native), n_kv_head - n_count, n_stream);
    // llama.cpp puts the cells of whatever stream into that of the sequence it is told.
    put(std::span(native), n_kv_head, static_cast<std::uint32_t>(view.tokens.size()));
    const auto to = std::span(native).subspan(n_kv_head + n_count, view.payload.size());
    if (view.is_in_order) {
        if (!to.empty()) std::memcpy(to.data(), view.payload.data(), to.size());
    } else {
        copy_sorted(view.payload, to, view.tokens.size(), layout);
    }
    return native;
}

void sort_cells(std::span<std::byte> blob, const ses1_view& view, const kv_layout& layout) {
    const std::vector<std::byte> unsorted(view.payload.begin(), view.payload.end());
    const auto at = static_cast<std::size_t>(view.payload.data() - blob.data());
    copy_sorted(unsorted, blob.subspan(at, unsorted.size()), view.tokens.size(), layout);
}

}  // namespace kqview
