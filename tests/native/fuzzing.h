// What fuzzers share: coverage without a fuzzer's library, changes of bytes, and the loop. The
// compiler (-fsanitize-coverage=trace-pc) calls us at each branch of the code under test; an input
// that reached a new one is kept and changed further. Built under AddressSanitizer and UBSan.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

namespace kqview::test {

// Different branches reached since the program began.
std::size_t n_branches_reached();

// Changes one thing: a byte, a bit, a number, the length, or puts a piece somewhere else.
void change_bytes(std::vector<std::byte>& bytes, std::mt19937_64& random);

// Ends the program with the input that did it.
[[noreturn]] void fail_fuzz(const char* what, const std::vector<std::byte>& bytes);

// Runs `is_sound(input)` on changed inputs of `corpus`, all of which have to be sound, for SECONDS
// with SEED: the program's two arguments. `input` has `bytes`; `change(input, random)` changes one
// thing of it.
template <class input, class test, class changer>
int fuzz(const char* what, std::vector<input> corpus, int n_arguments, char** arguments,
         test&& is_sound, changer&& change) {
    const double limit_s = n_arguments > 1 ? std::atof(arguments[1]) : 10.0;
    const auto seed = n_arguments > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    std::mt19937_64 random(seed);
    for (const auto& one : corpus) {
        if (!is_sound(one)) fail_fuzz("a sound input was refused", one.bytes);
    }
    const auto start = std::chrono::steady_clock::now();
    const auto elapsed_s = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    std::size_t n_runs = 0, n_sound = 0;
    while (n_runs % 1024 != 0 || elapsed_s() < limit_s) {
        ++n_runs;
        auto next = corpus[random() % corpus.size()];
        for (auto n = 1 + random() % 4; n > 0; --n) change(next, random);
        const auto n_before = n_branches_reached();
        n_sound += is_sound(next);
        if (n_branches_reached() > n_before && next.bytes.size() < 16384) {
            corpus.push_back(std::move(next));
        }
    }
    std::printf("fuzz: %zu %s in %.0f s, %zu sound, %zu kept, %zu branches, seed %llu\n", n_runs,
                what, elapsed_s(), n_sound, corpus.size(), n_branches_reached(),
                static_cast<unsigned long long>(seed));
    return 0;
}

}  // namespace kqview::test
