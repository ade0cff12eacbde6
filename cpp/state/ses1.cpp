#include "state/ses1.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
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
    std::span<const std::byte> since(std::size_t at) const { return bytes_.subspan(at, at_ - at); }

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
            throw error(errc::state_format, "saved slot: ", field, " at byte ", at_, " needs ", n,
                        " bytes, ", n_left(), " are left; the saved slot was cut short");
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

template <typename... Parts>
[[noreturn]] void fail(errc code, const char* field, std::size_t at, const Parts&... what) {
    throw error(code, "saved slot: ", field, " at byte ", at, " ", what...);
}

constexpr const char* blob_needs = "a sound blob has";
constexpr const char* ids_have = "the list of ids has";
constexpr const char* engine_has = "this engine has";
constexpr const char* same_model = "; restore it with the model it was saved with";

// Takes a number that a sound blob has, as `whose` says.
template <class number>
void take_only(byte_reader& in, const char* field, number wanted, const char* whose) {
    const auto at = in.at();
    const auto got = in.take<number>(field);
    if (got == wanted) return;
    fail(errc::state_format, field, at, "is ", got, ", ", whose, " ", wanted, resave);
}

// Takes a number that has to be that of this engine.
template <class number>
void take_own(byte_reader& in, const char* field, std::uint64_t wanted) {
    const auto at = in.at();
    const auto got = in.take<number>(field);
    if (got == wanted) return;
    fail(errc::state_mismatch, field, at, "is ", got, ", ", engine_has, " ", wanted, same_model);
}

std::size_t cell_bytes(const kv_part& part) {
    return part.is_recurrent ? 8 : part.has_extra ? 24 : 12;
}

// ---- header

std::vector<token_id> read_tokens(byte_reader& in, const kv_layout& layout) {
    const auto start = in.skip(magic.size(), "magic");
    if (std::memcmp(start.data(), magic.data(), magic.size()) != 0) {
        fail(errc::state_format, "magic", 0, "is not 'SES1'; pass what Slot.save returned");
    }
    const auto n_at = in.at();
    const auto n_tokens = in.take<std::uint32_t>("n_tokens");
    if (n_tokens > layout.n_ctx) {
        fail(errc::state_mismatch, "n_tokens", n_at, "is ", n_tokens,
             ", a slot of this engine holds ", layout.n_ctx, "; raise n_ctx");
    }
    const auto ids_at = in.at();
    const auto bytes = in.skip(std::uint64_t{n_tokens} * sizeof(token_id), "tokens");
    std::vector<token_id> tokens(n_tokens);
    if (n_tokens > 0) std::memcpy(tokens.data(), bytes.data(), bytes.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        const auto at = ids_at + i * sizeof(token_id);
        if (tokens[i] < 0) {
            fail(errc::state_format, "token id", at, "is ", tokens[i], ", ids are 0 and above",
                 resave);
        }
        if (static_cast<std::uint32_t>(tokens[i]) >= layout.n_vocab) {
            fail(errc::state_mismatch, "token id", at, "is ", tokens[i], ", the vocabulary has ",
                 layout.n_vocab, same_model);
        }
    }
    return tokens;
}

void skip_kv_head(byte_reader& in) {
    const auto magic_at = in.at();
    if (in.take<std::uint32_t>("kv magic") != kv_magic) {
        fail(errc::state_format, "kv magic", magic_at,
             "is not llama.cpp's; the blob is of another kind or version of llama.cpp");
    }
    in.take<std::int32_t>("sequence");  // any sequence is accepted
}

// ---- cells

struct cell_fields {
    std::int32_t position;
    std::optional<std::array<std::int32_t, 3>> extra;  // x, y, token
};

cell_fields read_cell(byte_reader& in, const kv_part& part) {
    cell_fields cell{in.take<std::int32_t>("position"), {}};
    take_only<std::uint32_t>(in, "n_seq_id", 1, blob_needs);
    if (part.has_extra) {
        cell.extra = {in.take<std::int32_t>("x"), in.take<std::int32_t>("y"),
                      in.take<std::int32_t>("cell token")};
    }
    in.take<std::int32_t>("cell sequence");  // llama.cpp writes the slot's own there
    return cell;
}

void check_extra(const cell_fields& cell, std::size_t at, const ses1_view& view,
                 const kv_layout& layout) {
    if (!cell.extra) return;
    const auto [x, y, id] = *cell.extra;
    const auto limit = static_cast<std::int32_t>(layout.n_ctx);
    if (x < 0 || x >= limit || y < 0 || y >= limit) {
        fail(errc::state_format, "x, y", at + 8, "lies outside the context", resave);
    }
    const auto expected = view.tokens[static_cast<std::size_t>(cell.position)];
    if (id != expected) {
        fail(errc::state_format, "cell token", at + 16, "is ", id, ", ", ids_have, " ", expected);
    }
}

// Checks that each position from 0 to the last token's occurs exactly once.
void read_cells(byte_reader& in, ses1_view& view, const kv_part& part, const kv_layout& layout) {
    const auto n_tokens = view.tokens.size();
    std::vector<bool> is_seen(n_tokens);
    for (std::size_t i = 0; i < n_tokens; ++i) {
        const auto at = in.at();
        const auto cell = read_cell(in, part);
        if (cell.position < 0 || static_cast<std::uint32_t>(cell.position) >= n_tokens) {
            fail(errc::state_format, "position", at, "is ", cell.position, ", 0..", n_tokens - 1,
                 " are needed", resave);
        }
        const auto position = static_cast<std::size_t>(cell.position);
        if (is_seen[position]) {
            fail(errc::state_format, "position", at, "is ", position, " for the second time",
                 resave);
        }
        is_seen[position] = true;
        view.is_in_order = view.is_in_order && position == i;
        check_extra(cell, at, view, layout);
    }
}

// ---- layers

struct block_names {
    const char* type;
    const char* unit;
    const char* numbers;
};
constexpr block_names key_names{"K type", "K row size", "K rows"};
constexpr block_names value_names{"V type", "V row size", "V rows"};
constexpr block_names column_names{"V type", "V element size", "V columns"};
constexpr block_names state_names{"state type", "state row size", "state rows"};

void read_block(byte_reader& in, const kv_block& wanted, std::size_t n_cells,
                const block_names& names, ses1_source source, float largest = kv_largest) {
    auto at = in.at();
    const auto type = in.take<std::int32_t>(names.type);
    if (type != static_cast<std::int32_t>(wanted.type)) {
        fail(errc::state_mismatch, names.type, at, "is ", name_of(static_cast<kv_type>(type)), ", ",
             engine_has, " ", name_of(wanted.type), "; open the engine with kv_type=\"",
             name_of(static_cast<kv_type>(type)), "\"");
    }
    if (wanted.n_columns == 0) {
        take_own<std::uint64_t>(in, names.unit, wanted.unit_bytes);
    } else {
        take_own<std::uint32_t>(in, names.unit, wanted.unit_bytes);
        take_own<std::uint32_t>(in, "V width", wanted.n_columns);
    }
    at = in.at();
    const auto numbers = in.skip(wanted.bytes_of(n_cells), names.numbers);
    if (source == ses1_source::own) return;
    if (const auto found = find_unsound(wanted.type, numbers, largest)) {
        fail(errc::state_format, names.numbers, at + *found, "hold a value that is not finite",
             largest == kv_largest ? " or above 65504" : "", "; it would spoil what is generated");
    }
}

void read_layers(byte_reader& in, std::size_t n_cells, const kv_part& part, ses1_source source) {
    const auto at = in.at();
    const auto is_transposed = in.take<std::uint32_t>("V transposed");
    if (is_transposed > 1) {
        fail(errc::state_format, "V transposed", at, "is ", is_transposed, ", 0 and 1 are known",
             resave);
    }
    if ((is_transposed == 1) != part.is_transposed) {
        fail(errc::state_mismatch, "V transposed", at,
             std::string(part.is_transposed ? "is 0: the slot was saved with flash attention; open "
                                              "the engine with flash_attn=True"
                                            : "is 1: the slot was saved without flash attention; "
                                              "open the engine with flash_attn=False"));
    }
    take_own<std::uint32_t>(in, "n_layer", part.n_layer);
    constexpr auto finite = std::numeric_limits<float>::max();
    for (const auto& block : part.keys) {
        if (part.is_recurrent) {
            read_block(in, block, n_cells, state_names, source, finite);
        } else {
            read_block(in, block, n_cells, key_names, source);
        }
    }
    const auto& names = part.is_transposed ? column_names : value_names;
    for (const auto& block : part.values) read_block(in, block, n_cells, names, source);
}

void read_cache(byte_reader& in, ses1_view& view, const kv_part& part, const kv_layout& layout,
                ses1_source source) {
    const auto n_at = in.at();
    auto n_left = in.take<std::uint32_t>("n_stream");
    if (n_left == 0) fail(errc::state_format, "n_stream", n_at, "is 0, 1 or more are needed");
    view.has_one_stream = view.has_one_stream && n_left == 1;
    std::uint32_t n_cells = 0;
    for (; n_cells == 0 && n_left > 0; --n_left) n_cells = in.take<std::uint32_t>("n_cells");
    if (n_cells != view.tokens.size()) {
        fail(errc::state_format, "n_cells", in.at() - sizeof(n_cells), "is ", n_cells, ", ",
             ids_have, " ", view.tokens.size(), resave);
    }
    const auto cells_at = in.at();
    if (n_cells > 0) {
        read_cells(in, view, part, layout);
        read_layers(in, n_cells, part, source);
    }
    view.payloads.push_back(in.since(cells_at));
    for (; n_left > 0; --n_left) {
        const auto at = in.at();
        if (const auto n = in.take<std::uint32_t>("n_cells"); n > 0) {
            fail(errc::state_format, "n_cells", at, "is ", n,
                 ", a second stream with cells; one is a slot's");
        }
    }
}

void read_state(byte_reader& in, ses1_view& view, const kv_part& part, ses1_source source) {
    const auto n_tokens = static_cast<std::int32_t>(view.tokens.size());
    take_only<std::uint32_t>(in, "n_cells", n_tokens == 0 ? 0 : 1, ids_have);
    const auto cell_at = in.at();
    if (n_tokens > 0) {
        take_only<std::int32_t>(in, "position", n_tokens - 1, "the last token's is");
        take_only<std::uint32_t>(in, "n_seq_id", 0, blob_needs);
        read_layers(in, 1, part, source);
    }
    view.payloads.push_back(in.since(cell_at));
}

}  // namespace

ses1_view read_ses1(std::span<const std::byte> blob, const kv_layout& layout, ses1_source source) {
    byte_reader in(blob);
    ses1_view view;
    view.tokens = read_tokens(in, layout);
    skip_kv_head(in);
    view.memory = blob.subspan(in.at());
    for (const auto& part : layout.parts) {
        if (part.is_recurrent) {
            read_state(in, view, part, source);
        } else {
            read_cache(in, view, part, layout, source);
        }
    }
    if (in.n_left() > 0) {
        fail(errc::state_format, "the end", in.at(), "has ", in.n_left(), " bytes behind it",
             resave);
    }
    return view;
}

// ---- learning a layout from llama.cpp's bytes

namespace {

// Some recurrent models have an R or an S of no size.
kv_block learn_block(byte_reader& in, std::uint64_t n_cells, const kv_part& part, bool is_column) {
    kv_block block;
    block.type = static_cast<kv_type>(in.take<std::int32_t>("type"));
    if (!is_known(block.type)) throw error(errc::state_format, "a type that is not known");
    if (is_column) {
        block.unit_bytes = in.take<std::uint32_t>("element size");
        block.n_columns = in.take<std::uint32_t>("width");
    } else {
        block.unit_bytes = in.take<std::uint64_t>("row size");
    }
    if (!part.is_recurrent && (block.unit_bytes == 0 || (is_column && block.n_columns == 0))) {
        throw error(errc::state_format, "rows without bytes");
    }
    in.skip(block.bytes_of(n_cells), "rows");
    return block;
}

void learn(byte_reader in, kv_part& part) {
    if (!part.is_recurrent) in.skip(sizeof(std::uint32_t), "n_stream");
    const auto n_cells = in.take<std::uint32_t>("n_cells");
    if (n_cells == 0) throw error(errc::state_format, "no cells");
    in.skip(std::uint64_t{n_cells} * cell_bytes(part), "cells");
    part.is_transposed = in.take<std::uint32_t>("V transposed") != 0;
    part.n_layer = in.take<std::uint32_t>("n_layer");
    const auto n_keys = part.is_recurrent ? 2 * std::uint64_t{part.n_layer} : part.n_layer;
    while (in.n_left() > 0 && part.keys.size() < n_keys) {
        part.keys.push_back(learn_block(in, n_cells, part, false));
    }
    while (in.n_left() > 0) {
        part.values.push_back(learn_block(in, n_cells, part, part.is_transposed));
    }
    if (part.values.size() > (part.is_recurrent ? 0 : part.keys.size())) {
        throw error(errc::state_format, "an end at another place");
    }
}

}  // namespace

kv_layout learn_layout(std::span<const std::span<const std::byte>> parts, kv_layout known) {
    try {
        for (std::size_t i = 0; i < parts.size(); ++i) learn(byte_reader(parts[i]), known.parts[i]);
        return known;
    } catch (const error& failure) {
        throw error(errc::unsupported_model,
                    "this model's slots cannot be saved: the bytes that llama.cpp writes for them "
                    "have an unknown form (",
                    failure.what(), ")");
    }
}

// ---- writing

namespace {

// Copies one cache's payload, each cell to the index given by its position.
void copy_sorted(std::span<const std::byte> from, std::span<std::byte> to, std::size_t n_cells,
                 const kv_part& part) {
    constexpr std::size_t n_layers_head = 8;  // is_transposed, n_layer
    constexpr std::size_t n_block_head = 12;  // type, then row bytes or element bytes, n_columns
    std::vector<std::size_t> position_of(n_cells);
    for (std::size_t i = 0; i < n_cells; ++i) {
        position_of[i] = static_cast<std::size_t>(
            byte_reader(from, i * cell_bytes(part)).take<std::int32_t>("position"));
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
    permute(cell_bytes(part));
    copy(n_layers_head);
    for (const auto* blocks : {&part.keys, &part.values}) {
        for (const auto& block : *blocks) {
            copy(n_block_head);
            const auto n_runs = std::max<std::uint32_t>(block.n_columns, 1);
            for (std::uint32_t j = 0; j < n_runs; ++j) {
                permute(static_cast<std::size_t>(block.unit_bytes));
            }
        }
    }
}

// Writes a number to the front of `out` and returns what is behind it.
template <class number>
std::span<std::byte> put(std::span<std::byte> out, number value) {
    std::memcpy(out.first(sizeof(value)).data(), &value, sizeof(value));
    return out.subspan(sizeof(value));
}

}  // namespace

void write_ses1_header(std::span<std::byte> blob, std::span<const token_id> tokens, slot_id slot) {
    for (const char letter : magic) blob = put(blob, letter);
    blob = put(blob, static_cast<std::uint32_t>(tokens.size()));
    for (const auto id : tokens) blob = put(blob, id);
    blob = put(blob, kv_magic);
    put(blob, slot);
}

std::vector<std::byte> to_plain(const ses1_view& view, const kv_layout& layout) {
    const auto n_tokens = view.tokens.size();
    const auto head_bytes = [](const kv_part& part) { return part.is_recurrent ? 4u : 8u; };
    std::size_t n_bytes = 0;
    for (std::size_t i = 0; i < layout.parts.size(); ++i) {
        n_bytes += head_bytes(layout.parts[i]) + view.payloads[i].size();
    }
    std::vector<std::byte> plain(n_bytes);
    auto out = std::span(plain);
    for (std::size_t i = 0; i < layout.parts.size(); ++i) {
        const auto& part = layout.parts[i];
        const auto& payload = view.payloads[i];
        if (!part.is_recurrent) out = put(out, std::uint32_t{1});  // streams
        const auto n_cells = part.is_recurrent ? std::min<std::size_t>(n_tokens, 1) : n_tokens;
        out = put(out, static_cast<std::uint32_t>(n_cells));
        if (part.is_recurrent || view.is_in_order) {
            std::ranges::copy(payload, out.begin());
        } else {
            copy_sorted(payload, out, n_cells, part);
        }
        out = out.subspan(payload.size());
    }
    return plain;
}

}  // namespace kqview
