// ses1: what is read, what is refused and where, what is written. Blobs are built by hand.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>

#include "base/error.h"
#include "ses1_fixture.h"
#include "state/ses1.h"

using namespace kqview;
using namespace kqview::test;

namespace {

ses1_view read(const built_blob& blob, const kv_layout& layout = test_layout()) {
    return read_ses1(blob.bytes, layout, ses1_source::foreign);
}

// The error's code, and whether its message names the field and the offset.
void check_refused(const built_blob& blob, errc code, const std::string& field, std::size_t at,
                   const kv_layout& layout = test_layout()) {
    CAPTURE(field);
    try {
        read(blob, layout);
        FAIL("the blob was taken");
    } catch (const error& failure) {
        CAPTURE(failure.what());
        CHECK(failure.code() == code);
        const auto expected = field + " at byte " + std::to_string(at);
        CHECK(std::string(failure.what()).find(expected) != std::string::npos);
    }
}

blob_options shuffled(bool is_transposed) {
    blob_options options;
    options.positions = {1, 2, 0};
    options.is_transposed = is_transposed;
    return options;
}

std::vector<std::byte> memory_of(const built_blob& blob) {
    return {blob.bytes.begin() + static_cast<std::ptrdiff_t>(blob.at.at("n_stream")),
            blob.bytes.end()};
}

blob_options hybrid(bool is_transposed = false) {
    blob_options options;
    options.is_transposed = is_transposed;
    options.has_window = options.has_state = true;
    return options;
}

}  // namespace

TEST_CASE("ses1: a sound blob is read, with rows and with columns of V, with and without extras") {
    for (const bool is_transposed : {false, true}) {
        for (const bool has_extra : {false, true}) {
            blob_options options;
            options.is_transposed = is_transposed;
            options.has_extra = has_extra;
            const auto blob = build_blob(options);
            const auto view = read(blob, test_layout(options));
            CHECK(view.tokens == std::vector<token_id>{11, 12, 13});
            CHECK(view.is_in_order);
            CHECK(view.payloads.at(0).size() == blob.bytes.size() - blob.at.at("position"));
            CHECK(to_plain(view, test_layout(options)) == memory_of(blob));
        }
    }
}

TEST_CASE("ses1: a window's cache and a recurrent state are read behind the first cache") {
    for (const bool is_transposed : {false, true}) {
        for (const bool has_window : {false, true}) {
            auto options = hybrid(is_transposed);
            options.has_window = has_window;
            const auto blob = build_blob(options);
            const auto layout = test_layout(options);
            const auto view = read(blob, layout);
            CHECK(view.payloads.size() == layout.parts.size());
            CHECK(to_plain(view, layout) == memory_of(blob));
            for (const std::size_t i : {1u, 2u}) {  // a window's cell is one of the sequence too
                if (!has_window) break;
                const auto at = blob.at.at("second") + 8 + 12 * (i - 1);
                auto changed = blob;
                changed.bytes[at] = std::byte{15};
                check_refused(changed, errc::state_format, "position", at, layout);
            }
        }
    }
}

TEST_CASE("ses1: a recurrent state of another token, context or number is refused") {
    const auto options = hybrid();
    const auto layout = test_layout(options);
    const auto blob = build_blob(options);
    const auto refused = [&](const built_blob& changed, errc code, const char* field,
                             const char* name) {
        check_refused(changed, code, field, blob.at.at(name), layout);
    };
    const auto format = errc::state_format;
    const auto mismatch = errc::state_mismatch;
    refused(blob.with("n_states", 0u), format, "n_cells", "n_states");
    refused(blob.with("n_states", 2u), format, "n_cells", "n_states");
    refused(blob.with("state_position", 1), format, "position", "state_position");
    refused(blob.with("state_position", -1), format, "position", "state_position");
    refused(blob.with("state_n_seq_id", 1u), format, "n_seq_id", "state_n_seq_id");
    refused(blob.with("state_is_transposed", 1u), mismatch, "V transposed", "state_is_transposed");
    refused(blob.with("state_n_layer", 3u), mismatch, "n_layer", "state_n_layer");
    refused(blob.with("r_type", 1), mismatch, "state type", "r_type");
    refused(blob.with("s_row_bytes", std::uint64_t{8}), mismatch, "state row size", "s_row_bytes");
    for (const float value : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        refused(blob.with("r_value", value), format, "state rows", "r_value");
        refused(blob.with("s_value", value), format, "state rows", "s_value");
    }
}

TEST_CASE("ses1: a block without a type has that of the one before") {
    auto options = hybrid();
    options.has_untyped = true;
    const auto blob = build_blob(options);
    const auto layout = test_layout(options);
    const auto view = read(blob, layout);
    CHECK(to_plain(view, layout) == memory_of(blob));
    const auto state = std::span(blob.bytes).subspan(blob.at.at("n_states"));
    auto known = unlearned(layout);
    known.parts.erase(known.parts.begin(), known.parts.end() - 1);
    const auto learned = learn_layout({&state, 1}, known);
    CHECK(learned.parts[0].keys == layout.parts.back().keys);
    check_refused(blob.with("p_row_bytes", std::uint64_t{4}), errc::state_mismatch,
                  "state row size", blob.at.at("p_row_bytes"), layout);
    check_refused(blob.with("p_value", std::nanf("")), errc::state_format, "state rows",
                  blob.at.at("p_value"), layout);
    check_refused(blob, errc::state_mismatch, "state type", blob.at.at("p_row_bytes"),
                  test_layout(hybrid()));
}

TEST_CASE("ses1: a ring has the last tokens, in any order, and neither too few nor too many") {
    auto options = hybrid();
    options.n_ring = 2;
    options.tokens = {11, 12, 13, 14};
    options.positions = {0, 1, 2, 3};
    const auto blob = build_blob(options);
    const auto layout = test_layout(options);
    const auto view = read(blob, layout);
    CHECK(view.is_in_order);
    CHECK(view.n_cells == std::vector<std::uint32_t>{4, 2, 1});
    CHECK(to_plain(view, layout) == memory_of(blob));
    // The other cache's cells are sorted, its own are left as they are.
    auto shuffled = options;
    shuffled.positions = {2, 0, 1, 3};
    CHECK(to_plain(read(build_blob(shuffled), layout), layout) == memory_of(blob));
    const auto at = blob.at.at("second");
    const auto with = [&](std::size_t offset, std::int32_t value) {
        auto changed = blob;
        std::memcpy(&changed.bytes[at + offset], &value, sizeof(value));
        return changed;
    };
    check_refused(with(8, 1), errc::state_format, "position", at + 8, layout);   // hidden
    check_refused(with(8, 2), errc::state_format, "position", at + 20, layout);  // twice
    check_refused(with(4, 0), errc::state_format, "n_cells", at + 4, layout);
    check_refused(with(4, 5), errc::state_format, "n_cells", at + 4, layout);
    check_refused(with(4, 3), errc::state_mismatch, "n_cells", at + 4, layout);  // swa_full=True
    auto least = layout;
    least.parts[1].n_ring_least = 3;
    check_refused(blob, errc::state_format, "n_cells", at + 4, least);
    auto whole = options;
    whole.n_ring = 0;
    check_refused(blob, errc::state_mismatch, "n_cells", at + 4, test_layout(whole));
    check_refused(build_blob(whole), errc::state_mismatch, "n_cells", at + 4, layout);
}

// ---- checkpoints

TEST_CASE("ses1: checkpoints are read as they were written") {
    auto options = hybrid();
    options.n_ring = 2;
    const auto layout = test_layout(options);
    const std::vector<token_id> tokens{11, 12, 13};
    const auto saved = build_checkpoints(options, {1, 3});
    const auto found = read_checkpoints(saved.bytes, tokens, layout);
    REQUIRE(found.size() == 2);
    CHECK(found[0].n_tokens == 1);
    CHECK(found[1].n_tokens == 3);
    std::vector<std::byte> again(write_checkpoints({}, found));
    CHECK(write_checkpoints(again, found) == again.size());
    CHECK(again == saved.bytes);
    CHECK(read_checkpoints({}, tokens, layout).empty());
    CHECK(write_checkpoints({}, {}) == 0);
    for (std::size_t n = 1; n < saved.bytes.size(); ++n) {
        const std::vector<std::byte> cut(saved.bytes.begin(),
                                         saved.bytes.begin() + static_cast<std::ptrdiff_t>(n));
        CHECK_THROWS_AS(read_checkpoints(cut, tokens, layout), error);
    }
}

TEST_CASE("ses1: checkpoints that are not of this slot or engine are refused by name and offset") {
    auto options = hybrid();
    options.n_ring = 2;
    const auto layout = test_layout(options);
    const std::vector<token_id> tokens{11, 12, 13};
    const auto saved = build_checkpoints(options, {1, 3});
    const auto refused = [&](const built_blob& changed, errc code, const char* field,
                             const char* name, const kv_layout& wanted) {
        CAPTURE(field);
        try {
            read_checkpoints(changed.bytes, tokens, wanted);
            FAIL("they were taken");
        } catch (const error& failure) {
            CAPTURE(failure.what());
            CHECK(failure.code() == code);
            const auto expected = "checkpoints of a saved slot: " + std::string(field) +
                                  " at byte " + std::to_string(saved.at.at(name));
            CHECK(std::string(failure.what()).find(expected) != std::string::npos);
        }
    };
    const auto format = errc::state_format;
    refused(saved.with("magic", 'X'), format, "magic", "magic", layout);
    refused(saved.with("n_tokens", 0u), format, "n_tokens", "n_tokens", layout);
    refused(saved.with("n_tokens", 4u), format, "n_tokens", "n_tokens", layout);
    refused(saved.with("bytes", std::uint64_t{1} << 60), format, "bytes", "bytes", layout);
    refused(saved.with("n_stream", 0u), format, "n_stream", "n_stream", layout);
    refused(saved.with("state_position", 1), format, "position", "state_position", layout);
    refused(saved.with("r_value", std::nanf("")), format, "state rows", "r_value", layout);
    refused(saved.with("r_type", 1), errc::state_mismatch, "state type", "r_type", layout);
    refused(saved, errc::state_mismatch, "n", "n", test_layout());
    CHECK_THROWS_AS(read_checkpoints(saved.with("n", 3u).bytes, tokens, layout), error);
    CHECK_THROWS_AS(read_checkpoints(saved.with("n", 1u).bytes, tokens, layout), error);
    // In descending order.
    CHECK_THROWS_AS(read_checkpoints(build_checkpoints(options, {3, 1}).bytes, tokens, layout),
                    error);
}

TEST_CASE("ses1: every prefix of a sound blob is refused") {
    const auto blob = build_blob(hybrid());
    for (std::size_t n = 0; n < blob.bytes.size(); ++n) {
        // Exactly as long, so that a read past the end is one past an allocation.
        const std::vector<std::byte> cut(blob.bytes.begin(),
                                         blob.bytes.begin() + static_cast<std::ptrdiff_t>(n));
        CHECK_THROWS_AS(read_ses1(cut, test_layout(hybrid()), ses1_source::foreign), error);
    }
}

TEST_CASE("ses1: header fields out of range are refused by name and offset") {
    const auto blob = build_blob();
    const auto& at = blob.at;
    check_refused(blob.with("magic", 'X'), errc::state_format, "magic", 0);
    check_refused(blob.with("n_tokens", 17u), errc::state_mismatch, "n_tokens", 4);
    check_refused(blob.with("n_tokens", 0xffffffffu), errc::state_mismatch, "n_tokens", 4);
    check_refused(blob.with("n_tokens", 2u), errc::state_format, "kv magic", 16);
    check_refused(blob.with("token", -1), errc::state_format, "token id", 8);
    check_refused(blob.with("token", 100), errc::state_mismatch, "token id", 8);
    check_refused(blob.with("kv_magic", 1u), errc::state_format, "kv magic", at.at("kv_magic"));
    check_refused(blob.with("n_stream", 0u), errc::state_format, "n_stream", at.at("n_stream"));
    check_refused(blob.with("n_cells", 4u), errc::state_format, "n_cells", at.at("n_cells"));
    check_refused(blob.with("n_cells", 2u), errc::state_format, "n_cells", at.at("n_cells"));
}

TEST_CASE("ses1: a slot's own size limits n_tokens before anything is allocated") {
    auto small = test_layout();
    small.n_ctx = 2;
    check_refused(build_blob(), errc::state_mismatch, "n_tokens", 4, small);
}

TEST_CASE("ses1: positions other than 0..n-1 once each are refused") {
    const auto blob = build_blob();
    const auto at = blob.at.at("position");
    const auto low = std::numeric_limits<std::int32_t>::min();
    const auto high = std::numeric_limits<std::int32_t>::max();
    for (const std::int32_t position : {-1, -2, 3, low, high}) {
        check_refused(blob.with("position", position), errc::state_format, "position", at);
    }
    check_refused(blob.with("position", 1), errc::state_format, "position", at + 12);
    check_refused(blob.with("n_seq_id", 2u), errc::state_format, "n_seq_id", at + 4);
    check_refused(blob.with("n_seq_id", 0u), errc::state_format, "n_seq_id", at + 4);
}

TEST_CASE("ses1: extras of a cell must lie in the context and name the cell's own id") {
    blob_options options;
    options.has_extra = true;
    const auto blob = build_blob(options);
    const auto layout = test_layout(options);
    const auto at = blob.at.at("position");
    check_refused(blob.with("x", -1), errc::state_format, "x, y", at + 8, layout);
    check_refused(blob.with("y", 16), errc::state_format, "x, y", at + 8, layout);
    check_refused(blob.with("cell_token", 12), errc::state_format, "cell token", at + 16, layout);
}

TEST_CASE("ses1: layers of another context are refused by name and offset") {
    const auto blob = build_blob();
    const auto mismatch = [&](const built_blob& mutated, const char* field, const char* name) {
        check_refused(mutated, errc::state_mismatch, field, blob.at.at(name));
    };
    mismatch(blob.with("is_transposed", 1u), "V transposed", "is_transposed");
    mismatch(blob.with("n_layer", 1u), "n_layer", "n_layer");
    mismatch(blob.with("n_layer", 0xffffffffu), "n_layer", "n_layer");
    mismatch(blob.with("k_type", 1), "K type", "k_type");
    mismatch(blob.with("k_type", -1), "K type", "k_type");
    mismatch(blob.with("k_row_bytes", std::uint64_t{12}), "K row size", "k_row_bytes");
    mismatch(blob.with("k_row_bytes", ~std::uint64_t{0}), "K row size", "k_row_bytes");
    mismatch(blob.with("v_type", 1), "V type", "v_type");
    mismatch(blob.with("v_row_bytes", std::uint64_t{8}), "V row size", "v_row_bytes");
    check_refused(blob.with("is_transposed", 2u), errc::state_format, "V transposed",
                  blob.at.at("is_transposed"));
}

TEST_CASE("ses1: columns of another context are refused by name and offset") {
    blob_options options;
    options.is_transposed = true;
    const auto blob = build_blob(options);
    const auto layout = test_layout(options);
    check_refused(blob.with("v_element_bytes", 2u), errc::state_mismatch, "V element size",
                  blob.at.at("v_element_bytes"), layout);
    check_refused(blob.with("v_width", 5u), errc::state_mismatch, "V width", blob.at.at("v_width"),
                  layout);
    check_refused(build_blob(), errc::state_mismatch, "V transposed", blob.at.at("is_transposed"),
                  layout);
}

TEST_CASE("ses1: values that are not finite are refused at their offset, unless they are our own") {
    const auto blob = build_blob();
    const auto infinity = std::numeric_limits<float>::infinity();
    for (const float value : {std::nanf(""), infinity, -infinity}) {
        check_refused(blob.with("k_value", value), errc::state_format, "K rows",
                      blob.at.at("k_value"));
        check_refused(blob.with("v_value", value), errc::state_format, "V rows",
                      blob.at.at("v_value"));
    }
    const auto own = blob.with("v_value", infinity);
    CHECK_NOTHROW(read_ses1(own.bytes, test_layout(), ses1_source::own));
}

TEST_CASE("ses1: bytes behind the end are refused") {
    auto blob = build_blob();
    const auto end = blob.bytes.size();
    blob.bytes.push_back(std::byte{0});
    check_refused(blob, errc::state_format, "the end", end);
}

TEST_CASE("ses1: an empty blob is one without cells in any stream") {
    blob_options options;
    options.tokens = {};
    options.positions = {};
    for (const std::uint32_t n_stream : {1u, 3u}) {
        options.n_stream = n_stream;
        const auto view = read(build_blob(options));
        CHECK(view.tokens.empty());
        CHECK(view.payloads.at(0).empty());
    }
    options.has_window = options.has_state = true;
    CHECK(read(build_blob(options), test_layout(options)).payloads.size() == 3);
    options.has_window = options.has_state = false;
    options.tokens = {11};  // ids without cells: somebody else's cells would be taken for them
    check_refused(build_blob(options), errc::state_format, "n_cells", 12 + 12 + 2 * 4);
    auto cells = build_blob();
    cells.bytes.erase(cells.bytes.begin() + 8, cells.bytes.begin() + 20);
    cells = cells.with("n_tokens", 0u);  // and cells without ids
    check_refused(cells, errc::state_format, "n_cells", 8 + 12);
}

TEST_CASE("ses1: of a blob of 4 streams the one with cells is taken") {
    for (const bool is_hybrid : {false, true}) {
        auto four = is_hybrid ? hybrid() : blob_options();
        const auto layout = test_layout(four);
        auto expected = memory_of(build_blob(four));
        four.n_stream = 4;
        const auto whole = build_blob(four);
        const auto first = read(whole, layout);
        CHECK_FALSE(first.has_one_stream);
        CHECK(to_plain(first, layout) == expected);
        for (std::uint32_t i_stream = 1; i_stream < 4; ++i_stream) {
            four.i_stream = i_stream;
            const auto blob = build_blob(four);  // its cells name another sequence
            CHECK(to_plain(read(blob, layout), layout).size() == expected.size());
        }
    }
}

TEST_CASE("ses1: a second stream with cells is refused") {
    blob_options two;
    two.n_stream = 2;
    auto blob = build_blob(two);
    const auto last = blob.bytes.size() - 4;
    check_refused(blob.with("n_no_cells", 3u), errc::state_format, "n_cells", last);
}

TEST_CASE("ses1: cells in another order are put into that of their positions") {
    for (const bool is_transposed : {false, true}) {
        for (const bool is_hybrid : {false, true}) {
            auto options = shuffled(is_transposed);
            options.has_window = options.has_state = is_hybrid;
            auto sorted = options;
            sorted.positions = {0, 1, 2};
            const auto blob = build_blob(options);
            const auto layout = test_layout(options);
            const auto view = read(blob, layout);
            CHECK_FALSE(view.is_in_order);
            CHECK(to_plain(view, layout) == memory_of(build_blob(sorted)));
        }
    }
}

TEST_CASE("ses1: header and memory make the blob written by hand") {
    for (const bool is_empty : {false, true}) {
        blob_options options;
        if (is_empty) options.tokens = options.positions = {};
        const auto expected = build_blob(options);
        const auto n_header = ses1_header_bytes(options.tokens.size());
        CHECK(n_header == expected.at.at("n_stream"));
        std::vector<std::byte> header(n_header);
        write_ses1_header(header, options.tokens, 0);
        CHECK(std::equal(header.begin(), header.end(), expected.bytes.begin()));
    }
}

TEST_CASE("ses1: a layout is learned from what llama.cpp writes, part by part") {
    for (const bool is_transposed : {false, true}) {
        const auto options = hybrid(is_transposed);
        const auto expected = test_layout(options);
        const auto blob = build_blob(options);
        const auto bytes = std::span<const std::byte>(blob.bytes);
        const auto first = blob.at.at("n_stream");
        const auto second = blob.at.at("second");
        const auto third = blob.at.at("third");
        const std::vector parts{bytes.subspan(first, second - first),
                                bytes.subspan(second, third - second), bytes.subspan(third)};
        const auto learned = learn_layout(parts, unlearned(expected));
        for (std::size_t i = 0; i < 3; ++i) {
            CHECK(learned.parts[i].keys == expected.parts[i].keys);
            CHECK(learned.parts[i].values == expected.parts[i].values);
            CHECK(learned.parts[i].is_transposed == expected.parts[i].is_transposed);
            CHECK(learned.parts[i].n_layer == expected.parts[i].n_layer);
            auto cut = parts;
            cut[i] = cut[i].first(cut[i].size() - 1);
            CHECK_THROWS_AS(learn_layout(cut, unlearned(expected)), error);
        }
    }
}

TEST_CASE("ses1: random changes are refused or give a view within the blob") {
    std::mt19937 random(1);
    const auto blob = build_blob(hybrid());
    const auto layout = test_layout(hybrid());
    for (int round = 0; round < 20'000; ++round) {
        auto bytes = blob.bytes;
        for (auto n = 1 + random() % 4; n > 0; --n) {
            bytes[random() % bytes.size()] = static_cast<std::byte>(random());
        }
        if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
        try {
            const auto view = read_ses1(bytes, layout, ses1_source::foreign);
            CHECK(view.tokens.size() == 3);
            CHECK(to_plain(view, layout).size() == view.memory.size());
        } catch (const error& failure) {
            const bool is_typed =
                failure.code() == errc::state_format || failure.code() == errc::state_mismatch;
            CHECK(is_typed);
        }
    }
}
