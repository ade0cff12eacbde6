#include "state/ses1.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "base/error.h"

namespace kqview {

namespace {

static_assert(std::endian::native == std::endian::little,
              "blobs are little endian, as llama.cpp's");

// Reads little-endian numbers from a span of bytes and reports a field that ends too early.
class byte_reader {
public:
    explicit byte_reader(std::span<const std::byte> bytes, std::size_t at = 0)
        : bytes_(bytes), at_(at) {}

    std::size_t at() const { return at_; }
    std::uint64_t n_left() const { return bytes_.size() - at_; }

    // The next number; raises state_format if the bytes end before it does.
    template <class number>
    number take(const char* field) {
        const auto taken = skip(sizeof(number), field);
        number value;
        std::memcpy(&value, taken.data(), sizeof(value));
        return value;
    }

    // The next `n` bytes; `n` may exceed this machine's size_t.
    std::span<const std::byte> skip(std::uint64_t n, const char* field) {
        if (n > n_left()) {
            throw error(errc::state_format,
                        "saved slot: " + std::string(field) + " at byte " + std::to_string(at_) +
                            " needs " + std::to_string(n) + " bytes, " + std::to_string(n_left()) +
                            " are left; the saved slot was cut short");
        }
        const auto taken = bytes_.subspan(at_, static_cast<std::size_t>(n));
        at_ += static_cast<std::size_t>(n);
        return taken;
    }

private:
    std::span<const std::byte> bytes_;
    std::size_t at_;
};

constexpr std::array<char, 4> magic{'S', 'E', 'S', '1'};
constexpr std::uint32_t kv_magic = 0xaf143cd8;
constexpr const char* resave = "; save the slot again";

[[noreturn]] void fail(errc code, const char* field, std::size_t at, const std::string& what) {
    throw error(
        code, "saved slot: " + std::string(field) + " at byte " + std::to_string(at) + " " + what);
}

std::string is_but(std::int64_t got, std::int64_t wanted, const char* whose) {
    return "is " + std::to_string(got) + ", " + whose + " " + std::to_string(wanted);
}

constexpr const char* blob_needs = "a sound blob has";
constexpr const char* engine_has = "this engine has";
constexpr const char* same_model = "; restore it with the model it was saved with";

// ---- header

std::vector<token_id> read_tokens(byte_reader& in, const kv_shape& shape) {
    const auto start = in.skip(magic.size(), "magic");
    if (std::memcmp(start.data(), magic.data(), magic.size()) != 0) {
        fail(errc::state_format, "magic", 0, "is not 'SES1'; pass what Slot.save returned");
    }
    const auto n_at = in.at();
    const auto n_tokens = in.take<std::uint32_t>("n_tokens");
    if (n_tokens > shape.n_ctx) {
        fail(errc::state_mismatch, "n_tokens", n_at,
             "is " + std::to_string(n_tokens) + ", a slot of this engine holds " +
                 std::to_string(shape.n_ctx) + "; raise n_ctx");
    }
    const auto ids_at = in.at();
    const auto bytes = in.skip(std::uint64_t{n_tokens} * sizeof(token_id), "tokens");
    std::vector<token_id> tokens(n_tokens);
    if (n_tokens > 0) std::memcpy(tokens.data(), bytes.data(), bytes.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        const auto at = ids_at + i * sizeof(token_id);
        if (tokens[i] < 0) {
            fail(errc::state_format, "token id", at,
                 "is " + std::to_string(tokens[i]) + ", ids are 0 and above" + resave);
        }
        if (static_cast<std::uint32_t>(tokens[i]) >= shape.n_vocab) {
            fail(errc::state_mismatch, "token id", at,
                 "is " + std::to_string(tokens[i]) + ", the vocabulary has " +
                     std::to_string(shape.n_vocab) + same_model);
        }
    }
    return tokens;
}

// Returns the cell count of the stream that has cells; leaves the reader at its first cell.
std::uint32_t read_stream_counts(byte_reader& in, std::uint32_t& n_stream) {
    const auto magic_at = in.at();
    if (in.take<std::uint32_t>("kv magic") != kv_magic) {
        fail(errc::state_format, "kv magic", magic_at,
             "is not llama.cpp's; the blob is of another kind or version of llama.cpp");
    }
    in.take<std::int32_t>("sequence");  // any sequence is accepted
    const auto n_at = in.at();
    n_stream = in.take<std::uint32_t>("n_stream");
    if (n_stream == 0) fail(errc::state_format, "n_stream", n_at, "is 0, 1 or more are needed");
    for (std::uint32_t i = 0; i < n_stream; ++i) {
        if (const auto n_cells = in.take<std::uint32_t>("n_cells"); n_cells > 0) {
            return n_cells;
        }
    }
    return 0;
}

// ---- cells

struct cell_fields {
    std::int32_t position;
    std::optional<std::array<std::int32_t, 3>> extra;  // x, y, token
};

cell_fields read_cell(byte_reader& in, const kv_shape& shape) {
    cell_fields cell{in.take<std::int32_t>("position"), {}};
    const auto n_at = in.at();
    if (const auto n = in.take<std::uint32_t>("n_seq_id"); n != 1) {
        fail(errc::state_format, "n_seq_id", n_at, is_but(n, 1, blob_needs) + resave);
    }
    if (shape.has_extra) {
        cell.extra = {in.take<std::int32_t>("x"), in.take<std::int32_t>("y"),
                      in.take<std::int32_t>("cell token")};
    }
    in.take<std::int32_t>("cell sequence");  // llama.cpp writes the slot's own there
    return cell;
}

void check_extra(const cell_fields& cell, std::size_t at, const ses1_view& view,
                 const kv_shape& shape) {
    if (!cell.extra) return;
    const auto [x, y, id] = *cell.extra;
    const auto limit = static_cast<std::int32_t>(shape.n_ctx);
    if (x < 0 || x >= limit || y < 0 || y >= limit) {
        fail(errc::state_format, "x, y", at + 8, "lies outside the context" + std::string(resave));
    }
    const auto expected = view.tokens[static_cast<std::size_t>(cell.position)];
    if (id != expected) {
        fail(errc::state_format, "cell token", at + 16,
             is_but(id, expected, "the list of ids has"));
    }
}

// Checks that each position from 0 to the last token's occurs exactly once.
void read_cells(byte_reader& in, ses1_view& view, const kv_shape& shape) {
    const auto n_tokens = view.tokens.size();
    std::vector<bool> is_seen(n_tokens);
    for (std::size_t i = 0; i < n_tokens; ++i) {
        const auto at = in.at();
        const auto cell = read_cell(in, shape);
        if (cell.position < 0 || static_cast<std::uint32_t>(cell.position) >= n_tokens) {
            fail(errc::state_format, "position", at,
                 "is " + std::to_string(cell.position) + ", 0.." + std::to_string(n_tokens - 1) +
                     " are needed" + resave);
        }
        const auto position = static_cast<std::size_t>(cell.position);
        if (is_seen[position]) {
            fail(errc::state_format, "position", at,
                 "is " + std::to_string(position) + " for the second time" + resave);
        }
        is_seen[position] = true;
        view.is_in_order = view.is_in_order && position == i;
        check_extra(cell, at, view, shape);
    }
}

// ---- layers

void check_equal(const char* field, std::size_t at, std::uint64_t got, std::uint64_t wanted,
                 const char* remedy) {
    if (got == wanted) return;
    fail(errc::state_mismatch, field, at,
         "is " + std::to_string(got) + ", " + engine_has + " " + std::to_string(wanted) + remedy);
}

struct block_names {
    const char* type;
    const char* unit;
    const char* numbers;
};
constexpr block_names key_names{"K type", "K row size", "K rows"};
constexpr block_names value_names{"V type", "V row size", "V rows"};
constexpr block_names column_names{"V type", "V element size", "V columns"};

void read_block(byte_reader& in, const kv_block& wanted, std::size_t n_cells,
                const block_names& names, ses1_source source) {
    auto at = in.at();
    const auto type = in.take<std::int32_t>(names.type);
    if (type != static_cast<std::int32_t>(wanted.type)) {
        fail(errc::state_mismatch, names.type, at,
             "is " + name_of(static_cast<kv_type>(type)) + ", " + engine_has + " " +
                 name_of(wanted.type) + "; open the engine with kv_type=\"" +
                 name_of(static_cast<kv_type>(type)) + "\"");
    }
    at = in.at();
    if (wanted.n_columns == 0) {
        check_equal(names.unit, at, in.take<std::uint64_t>(names.unit), wanted.unit_bytes,
                    same_model);
    } else {
        check_equal(names.unit, at, in.take<std::uint32_t>(names.unit), wanted.unit_bytes,
                    same_model);
        at = in.at();
        check_equal("V width", at, in.take<std::uint32_t>("V width"), wanted.n_columns, same_model);
    }
    at = in.at();
    const auto numbers = in.skip(wanted.bytes_of(n_cells), names.numbers);
    if (source == ses1_source::own) return;
    if (const auto found = find_unsound(wanted.type, numbers)) {
        fail(errc::state_format, names.numbers, at + *found,
             "hold a value that is not finite or above 65504; it would spoil what is generated");
    }
}

void read_layers(byte_reader& in, std::size_t n_cells, const kv_layout& layout,
                 ses1_source source) {
    auto at = in.at();
    const auto is_transposed = in.take<std::uint32_t>("V transposed");
    if (is_transposed > 1) {
        fail(errc::state_format, "V transposed", at,
             "is " + std::to_string(is_transposed) + ", 0 and 1 are known" + resave);
    }
    if ((is_transposed == 1) != layout.is_transposed) {
        fail(errc::state_mismatch, "V transposed", at,
             std::string(layout.is_transposed ? "is 0: the slot was saved with flash attention; "
                                                "open the engine with flash_attn=True"
                                              : "is 1: the slot was saved without flash attention; "
                                                "open the engine with flash_attn=False"));
    }
    at = in.at();
    check_equal("n_layer", at, in.take<std::uint32_t>("n_layer"), layout.keys.size(), same_model);
    for (const auto& block : layout.keys) read_block(in, block, n_cells, key_names, source);
    const auto& names = layout.is_transposed ? column_names : value_names;
    for (const auto& block : layout.values) read_block(in, block, n_cells, names, source);
}

void check_rest_empty(byte_reader& in, std::uint64_t n_streams_left) {
    for (std::uint64_t i = 0; i < n_streams_left; ++i) {
        const auto at = in.at();
        if (const auto n_cells = in.take<std::uint32_t>("n_cells"); n_cells > 0) {
            fail(errc::state_format, "n_cells", at,
                 "is " + std::to_string(n_cells) + ", a second stream with cells; one is a slot's");
        }
    }
}

}  // namespace

ses1_view read_ses1(std::span<const std::byte> blob, const kv_layout& layout, ses1_source source) {
    byte_reader in(blob);
    ses1_view view;
    view.tokens = read_tokens(in, layout.shape);
    const auto kv_at = in.at();
    view.kv_data = blob.subspan(kv_at);
    const auto n_cells = read_stream_counts(in, view.n_stream);
    const auto cells_at = in.at();
    if (n_cells != view.tokens.size()) {
        fail(errc::state_format, "n_cells", cells_at - sizeof(n_cells),
             is_but(n_cells, static_cast<std::int64_t>(view.tokens.size()), "the list of ids has") +
                 resave);
    }
    if (n_cells > 0) {
        const auto i_stream = (cells_at - kv_at - 12) / sizeof(n_cells) - 1;
        read_cells(in, view, layout.shape);
        read_layers(in, n_cells, layout, source);
        view.payload = blob.subspan(cells_at, in.at() - cells_at);
        check_rest_empty(in, view.n_stream - i_stream - 1);
    }
    if (in.n_left() > 0) {
        fail(errc::state_format, "the end", in.at(),
             "has " + std::to_string(in.n_left()) + " bytes behind it" + resave);
    }
    return view;
}

// ---- writing: from llama.cpp's bytes to a blob, and from a blob to bytes that llama.cpp reads

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

// Copies the cells' part of kv_data, each cell to the index given by its position.
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
        throw error(
            errc::unsupported_model,
            std::string(
                "this model's slots cannot be saved: the bytes that llama.cpp writes for them "
                "have an unknown form (") +
                failure.what() + ")");
    }
}

std::size_t ses1_write_offset(std::size_t n_tokens, std::uint32_t i_stream) {
    // Empty streams before this one take 4 bytes each; the header overwrites them if it is long
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
    // llama.cpp puts the cells of any stream into the stream of the target sequence.
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
