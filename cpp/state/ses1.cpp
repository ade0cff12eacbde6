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
constexpr std::array<char, 4> checkpoint_magic{'S', 'C', 'P', '1'};
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

void check_end(const byte_reader& in) {
    if (in.n_left() == 0) return;
    fail(errc::state_format, "the end", in.at(), "has ", in.n_left(), " bytes behind it", resave);
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

void check_extra(const cell_fields& cell, std::size_t at, std::span<const token_id> tokens,
                 const kv_layout& layout) {
    if (!cell.extra) return;
    const auto [x, y, id] = *cell.extra;
    const auto limit = static_cast<std::int32_t>(layout.n_ctx);
    if (x < 0 || x >= limit || y < 0 || y >= limit) {
        fail(errc::state_format, "x, y", at + 8, "lies outside the context", resave);
    }
    const auto expected = tokens[static_cast<std::size_t>(cell.position)];
    if (id != expected) {
        fail(errc::state_format, "cell token", at + 16, "is ", id, ", ", ids_have, " ", expected);
    }
}

// Checks that each of the last `n_cells` positions occurs exactly once. True: in their order.
bool read_cells(byte_reader& in, std::span<const token_id> tokens, std::size_t n_cells,
                const kv_part& part, const kv_layout& layout) {
    const auto first = tokens.size() - n_cells;
    std::vector<bool> is_seen(n_cells);
    bool is_in_order = true;
    for (std::size_t i = 0; i < n_cells; ++i) {
        const auto at = in.at();
        const auto cell = read_cell(in, part);
        if (cell.position < static_cast<std::int64_t>(first) ||
            cell.position >= static_cast<std::int64_t>(tokens.size())) {
            fail(errc::state_format, "position", at, "is ", cell.position, ", ", first, "..",
                 tokens.size() - 1, " are needed", resave);
        }
        const auto place = static_cast<std::size_t>(cell.position) - first;
        if (is_seen[place]) {
            fail(errc::state_format, "position", at, "is ", cell.position, " for the second time",
                 resave);
        }
        is_seen[place] = true;
        is_in_order = is_in_order && place == i;
        check_extra(cell, at, tokens, layout);
    }
    return is_in_order;
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
    const auto own = static_cast<std::int32_t>(wanted.type);
    const auto type = wanted.has_type ? in.take<std::int32_t>(names.type) : own;
    if (type != own) {
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

// How many cells a cache of `n_tokens` tokens may have: all, or in a ring the last ones.
void check_cell_count(std::uint32_t n_cells, std::size_t n_tokens, std::size_t at,
                      const kv_part& part) {
    constexpr auto other_window = "; open the engine with swa_full=";
    const bool is_ring = part.n_ring_cells > 0;
    const auto n_least = is_ring ? std::min<std::size_t>(n_tokens, part.n_ring_least) : n_tokens;
    if (n_cells > n_tokens ||
        (n_cells < n_least && (is_ring || !part.has_window || n_cells == 0))) {
        fail(errc::state_format, "n_cells", at, "is ", n_cells, ", ", ids_have, " ", n_tokens,
             resave);
    }
    if (n_cells < n_least) {
        fail(errc::state_mismatch, "n_cells", at, "is ", n_cells, " of ", n_tokens,
             ": the slot was saved without what its windows hide", other_window, "False");
    }
    if (is_ring && n_cells > part.n_ring_cells) {
        fail(errc::state_mismatch, "n_cells", at, "is ", n_cells, ", ", engine_has, " ",
             part.n_ring_cells, " for a window", other_window, "True");
    }
}

struct cache_view {
    std::span<const std::byte> payload;
    std::uint32_t n_cells;
    bool has_one_stream;
    bool is_in_order;
};

cache_view read_cache(byte_reader& in, std::span<const token_id> tokens, const kv_part& part,
                      const kv_layout& layout, ses1_source source) {
    const auto n_at = in.at();
    auto n_left = in.take<std::uint32_t>("n_stream");
    if (n_left == 0) fail(errc::state_format, "n_stream", n_at, "is 0, 1 or more are needed");
    cache_view view{{}, 0, n_left == 1, true};
    auto& n_cells = view.n_cells;
    for (; n_cells == 0 && n_left > 0; --n_left) n_cells = in.take<std::uint32_t>("n_cells");
    check_cell_count(n_cells, tokens.size(), in.at() - sizeof(n_cells), part);
    const auto cells_at = in.at();
    if (n_cells > 0) {
        const bool is_in_order = read_cells(in, tokens, n_cells, part, layout);
        view.is_in_order = is_in_order || part.n_ring_cells > 0;  // a ring has no order
        read_layers(in, n_cells, part, source);
    }
    view.payload = in.since(cells_at);
    for (; n_left > 0; --n_left) {
        const auto at = in.at();
        if (const auto n = in.take<std::uint32_t>("n_cells"); n > 0) {
            fail(errc::state_format, "n_cells", at, "is ", n,
                 ", a second stream with cells; one is a slot's");
        }
    }
    return view;
}

std::span<const std::byte> read_state(byte_reader& in, std::size_t n_tokens, const kv_part& part,
                                      ses1_source source) {
    take_only<std::uint32_t>(in, "n_cells", n_tokens == 0 ? 0 : 1, ids_have);
    const auto cell_at = in.at();
    if (n_tokens > 0) {
        take_only<std::int32_t>(in, "position", static_cast<std::int32_t>(n_tokens) - 1,
                                "the last token's is");
        take_only<std::uint32_t>(in, "n_seq_id", 0, blob_needs);
        read_layers(in, 1, part, source);
    }
    return in.since(cell_at);
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
            view.payloads.push_back(read_state(in, view.tokens.size(), part, source));
            view.n_cells.push_back(view.tokens.empty() ? 0 : 1);
            continue;
        }
        const auto cache = read_cache(in, view.tokens, part, layout, source);
        view.payloads.push_back(cache.payload);
        view.n_cells.push_back(cache.n_cells);
        view.has_one_stream = view.has_one_stream && cache.has_one_stream;
        view.is_in_order = view.is_in_order && cache.is_in_order;
    }
    check_end(in);
    return view;
}

// ---- checkpoints

namespace {

std::vector<saved_checkpoint> read_all(byte_reader in, std::span<const token_id> tokens,
                                       const kv_layout& layout) {
    const auto start = in.skip(checkpoint_magic.size(), "magic");
    if (std::memcmp(start.data(), checkpoint_magic.data(), start.size()) != 0) {
        fail(errc::state_format, "magic", 0, "is not 'SCP1'", resave);
    }
    std::vector<saved_checkpoint> found;
    auto n_left = in.take<std::uint32_t>("n");
    if (n_left > 0 && std::ranges::none_of(layout.parts, &kv_part::has_checkpoints)) {
        fail(errc::state_mismatch, "n", start.size(), "is ", n_left, ", ", engine_has,
             " a cache that needs none", same_model);
    }
    for (std::size_t n_before = 0; n_left > 0; --n_left) {
        auto at = in.at();
        const auto n_tokens = in.take<std::uint32_t>("n_tokens");
        if (n_tokens <= n_before || n_tokens > tokens.size()) {
            fail(errc::state_format, "n_tokens", at, "is ", n_tokens, ", ", n_before + 1, "..",
                 tokens.size(), " are needed", resave);
        }
        n_before = n_tokens;
        at = in.at();
        const auto n_bytes = in.take<std::uint64_t>("bytes");
        const auto parts_at = in.at();
        for (const auto& part : layout.parts) {
            const auto part_at = in.at();
            if (part.is_recurrent) {
                read_state(in, n_tokens, part, ses1_source::foreign);
            } else if (part.has_checkpoints() &&
                       !read_cache(in, tokens.first(n_tokens), part, layout, ses1_source::foreign)
                            .has_one_stream) {
                fail(errc::state_format, "n_stream", part_at, "is not 1", resave);
            }
        }
        found.push_back({n_tokens, in.since(parts_at)});
        if (n_bytes != found.back().parts.size()) {
            fail(errc::state_format, "bytes", at, "is ", n_bytes, ", the parts have ",
                 found.back().parts.size(), resave);
        }
    }
    check_end(in);
    return found;
}

}  // namespace

std::vector<saved_checkpoint> read_checkpoints(std::span<const std::byte> bytes,
                                               std::span<const token_id> tokens,
                                               const kv_layout& layout) {
    if (bytes.empty()) return {};
    try {
        return read_all(byte_reader(bytes), tokens, layout);
    } catch (const error& failure) {
        throw error(failure.code(), "checkpoints of a ", failure.what());
    }
}

// ---- learning a layout from llama.cpp's bytes

namespace {

// Some recurrent models have an R or an S of no size.
kv_block learn_block(byte_reader& in, std::uint64_t n_cells, const kv_part& part, bool is_column) {
    kv_block block;
    block.has_type = !std::ranges::binary_search(part.untyped, part.keys.size());
    block.type = block.has_type ? static_cast<kv_type>(in.take<std::int32_t>("type"))
                                : part.keys.back().type;
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
    const auto n_keys =
        part.is_recurrent ? 2 * std::uint64_t{part.n_layer} + part.untyped.size() : part.n_layer;
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

std::size_t write_checkpoints(std::span<std::byte> out,
                              std::span<const saved_checkpoint> checkpoints) {
    constexpr std::size_t n_head = 8, n_each = 12;
    std::size_t n_bytes = checkpoints.empty() ? 0 : n_head;
    for (const auto& one : checkpoints) n_bytes += n_each + one.parts.size();
    if (checkpoints.empty() || out.size() < n_bytes) return n_bytes;
    for (const char letter : checkpoint_magic) out = put(out, letter);
    out = put(out, static_cast<std::uint32_t>(checkpoints.size()));
    for (const auto& one : checkpoints) {
        out = put(out, static_cast<std::uint32_t>(one.n_tokens));
        out = put(out, std::uint64_t{one.parts.size()});
        std::ranges::copy(one.parts, out.begin());
        out = out.subspan(one.parts.size());
    }
    return n_bytes;
}

std::vector<std::byte> to_plain(const ses1_view& view, const kv_layout& layout) {
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
        out = put(out, view.n_cells[i]);
        if (part.has_checkpoints() || view.is_in_order) {
            std::ranges::copy(payload, out.begin());
        } else {
            copy_sorted(payload, out, view.n_cells[i], part);
        }
        out = out.subspan(payload.size());
    }
    return plain;
}

}  // namespace kqview
