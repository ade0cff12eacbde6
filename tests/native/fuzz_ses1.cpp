// Changes blobs at random and reads them, for as long as it is told: fuzz_ses1 SECONDS [SEED].
// Anything but a typed refusal or a view within the blob ends it.
#include <string>

#include "base/error.h"
#include "fuzzing.h"
#include "ses1_fixture.h"
#include "state/ses1.h"

using namespace kqview;
using namespace kqview::test;

namespace {

struct input {
    std::vector<std::byte> bytes;
    std::size_t i_layout;
    bool is_checkpoints = false;
};
const std::vector<token_id> tokens{11, 12, 13};

// True: it was sound.
bool read(const input& from, const kv_layout& layout) {
    // Exactly as long, so that a read past the end is one past an allocation.
    const std::vector<std::byte> bytes(from.bytes.begin(), from.bytes.end());
    try {
        if (from.is_checkpoints) {
            const auto found = read_checkpoints(bytes, tokens, layout);
            std::vector<std::byte> again(write_checkpoints({}, found));
            write_checkpoints(again, found);
            for (const auto& one : found) {
                if (one.n_tokens > tokens.size()) fail_fuzz("one of more tokens", from.bytes);
            }
            if (!found.empty() && again != bytes) fail_fuzz("other checkpoints", from.bytes);
            return true;
        }
        const auto view = read_ses1(bytes, layout, ses1_source::foreign);
        if (view.tokens.size() > layout.n_ctx)
            fail_fuzz("more tokens than a slot holds", from.bytes);
        const auto plain = to_plain(view, layout);
        std::vector<std::span<const std::byte>> parts;
        auto rest = std::span<const std::byte>(plain);
        for (std::size_t i = 0; i < layout.parts.size(); ++i) {
            const auto n_head = layout.parts[i].is_recurrent ? 4u : 8u;
            parts.push_back(rest.first(n_head + view.payloads.at(i).size()));
            rest = rest.subspan(parts.back().size());
        }
        if (!rest.empty()) fail_fuzz("a plain form of another size", from.bytes);
        if (view.tokens.empty()) return true;
        const auto learned = learn_layout(parts, unlearned(layout));
        for (std::size_t i = 0; i < layout.parts.size(); ++i) {
            if (learned.parts[i].keys != layout.parts[i].keys ||
                learned.parts[i].values != layout.parts[i].values)
                fail_fuzz("a layout that is not the context's", from.bytes);
        }
        return true;
    } catch (const error& failure) {
        if (failure.code() != errc::state_format && failure.code() != errc::state_mismatch)
            fail_fuzz(failure.what(), from.bytes);
        return false;
    }
}

}  // namespace

int main(int n_arguments, char** arguments) {
    std::vector<kv_layout> layouts;
    std::vector<input> corpus;
    for (const bool is_transposed : {false, true}) {
        for (const bool has_extra : {false, true}) {
            for (const std::uint32_t n_stream : {1u, 3u}) {
                blob_options options;
                options.is_transposed = is_transposed;
                options.has_extra = has_extra;
                options.n_stream = n_stream;
                options.positions = {2, 0, 1};
                corpus.push_back({build_blob(options).bytes, layouts.size()});
                layouts.push_back(test_layout(options));
            }
        }
    }
    for (const bool has_window : {false, true}) {
        for (const bool is_transposed : {false, true}) {
            blob_options options;
            options.has_window = has_window;
            options.has_state = true;
            options.is_transposed = is_transposed;
            options.n_stream = has_window ? 2 : 1;
            corpus.push_back({build_blob(options).bytes, layouts.size()});
            layouts.push_back(test_layout(options));
        }
    }
    for (const bool has_extra : {false, true}) {
        for (const bool has_state : {false, true}) {
            blob_options options;
            options.has_window = true;
            options.n_ring = 2;
            options.has_extra = has_extra;
            options.has_state = has_state;
            options.has_untyped = has_extra;
            corpus.push_back({build_blob(options).bytes, layouts.size()});
            corpus.push_back({build_checkpoints(options, {1, 3}).bytes, layouts.size(), true});
            corpus.push_back({build_checkpoints(options, {2}).bytes, layouts.size(), true});
            layouts.push_back(test_layout(options));
        }
    }
    const auto add_quantised = [&](kv_type type, std::uint32_t block_bytes) {
        blob_options options;
        options.type = type;
        options.block_bytes = block_bytes;
        corpus.push_back({build_blob(options).bytes, layouts.size()});
        layouts.push_back(test_layout(options));
    };
    add_quantised(kv_type::q4_0, 18);
    add_quantised(kv_type::q4_1, 20);
    add_quantised(kv_type::q5_0, 22);
    add_quantised(kv_type::q5_1, 24);
    add_quantised(kv_type::q8_0, 34);
    add_quantised(kv_type::iq4_nl, 18);
    return fuzz(
        "blobs", std::move(corpus), n_arguments, arguments,
        [&](const input& one) { return read(one, layouts[one.i_layout]); },
        [](input& one, std::mt19937_64& random) { change_bytes(one.bytes, random); });
}
