// Changes blobs at random and reads them, for as long as it is told: fuzz_ses1 SECONDS [SEED].
// Guided by coverage without a fuzzer's library: the compiler (-fsanitize-coverage=trace-pc) calls us at
// each branch of the code under test; a blob that reached a new one is kept and changed further. Built
// under AddressSanitizer and UBSan; anything but a typed refusal or a view within the blob ends it.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <unordered_set>

#include "base/error.h"
#include "ses1_fixture.h"
#include "state/ses1.h"

using namespace kqview;
using namespace kqview::test;

namespace {

constexpr std::size_t n_counters = 1 << 16;
bool is_reached[n_counters];
std::size_t n_reached = 0;

struct input {
    std::vector<std::byte> bytes;
    std::size_t i_layout;
};

[[noreturn]] void fail(const char* what, const input& from) {
    std::printf("fuzz: FAILED: %s; layout %zu, bytes:", what, from.i_layout);
    for (const auto byte : from.bytes) std::printf(" %02x", static_cast<unsigned>(byte));
    std::printf("\n");
    std::exit(1);
}

// True: it was sound.
bool read(const input& from, const kv_layout& layout) {
    // Exactly as long, so that a read past the end is one past an allocation.
    const std::vector<std::byte> bytes(from.bytes.begin(), from.bytes.end());
    try {
        const auto view = read_ses1(bytes, layout, ses1_source::foreign);
        if (view.tokens.size() > layout.shape.n_ctx) fail("more tokens than a slot holds", from);
        const auto native = to_native(view, layout);
        if (native.size() != 12 + 4 * layout.shape.n_stream + view.payload.size())
            fail("a native form of another size", from);
        if (!view.tokens.empty()) {
            const auto learned = learn_layout(view.kv_data, layout.shape);
            if (learned.keys != layout.keys || learned.values != layout.values)
                fail("a layout that is not the context's", from);
        }
        return true;
    } catch (const error& failure) {
        if (failure.code() != errc::state_format && failure.code() != errc::state_mismatch)
            fail(failure.what(), from);
        return false;
    }
}

std::uint32_t interesting(std::mt19937_64& random) {
    constexpr std::uint32_t values[] = {
        0, 1, 2, 3, 4, 16, 17, 0x7f, 0xff, 0x64, 0x7fffffff, 0x80000000, 0xffffffff, 0xaf143cd8};
    return values[random() % std::size(values)];
}

void change(std::vector<std::byte>& bytes, std::mt19937_64& random) {
    const auto n = bytes.size();
    switch (n < 8 ? 4 : random() % 6) {
        case 0: bytes[random() % n] = static_cast<std::byte>(random()); break;
        case 1: bytes[random() % n] ^= static_cast<std::byte>(1u << random() % 8); break;
        case 2: {
            const auto value = interesting(random);
            std::memcpy(bytes.data() + random() % (n / 4) * 4, &value, sizeof(value));
            break;
        }
        case 3: bytes.resize(random() % (n + 1)); break;
        case 4: bytes.resize(n + random() % 64); break;
        default: {  // a piece somewhere else
            const auto size = random() % (n / 2) + 1;
            std::memmove(bytes.data() + random() % (n - size + 1),
                         bytes.data() + random() % (n - size + 1), size);
        }
    }
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
    const auto at = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)) % n_counters;
    n_reached += !is_reached[at];
    is_reached[at] = true;
}

int main(int n_arguments, char** arguments) {
    const double limit_s = n_arguments > 1 ? std::atof(arguments[1]) : 10.0;
    const auto seed = n_arguments > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    std::mt19937_64 random(seed);
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
    for (const auto& one : corpus) {
        if (!read(one, layouts[one.i_layout])) fail("a sound blob was refused", one);
    }
    const auto start = std::chrono::steady_clock::now();
    const auto elapsed_s = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    std::size_t n_runs = 0, n_sound = 0;
    while (n_runs % 1024 != 0 || elapsed_s() < limit_s) {
        ++n_runs;
        auto next = corpus[random() % corpus.size()];
        for (auto n = 1 + random() % 4; n > 0; --n) change(next.bytes, random);
        const auto n_before = n_reached;
        n_sound += read(next, layouts[next.i_layout]);
        if (n_reached > n_before && next.bytes.size() < 4096) corpus.push_back(std::move(next));
    }
    std::printf("fuzz: %zu blobs in %.0f s, %zu sound, %zu kept, %zu branches, seed %llu\n", n_runs,
                elapsed_s(), n_sound, corpus.size(), n_reached,
                static_cast<unsigned long long>(seed));
    return 0;
}
