#include "fuzzing.h"

#include <cstdint>
#include <cstring>
#include <iterator>

namespace {

constexpr std::size_t n_counters = 1 << 16;
bool is_reached[n_counters];
std::size_t n_reached = 0;

std::uint64_t interesting(std::mt19937_64& random) {
    constexpr std::uint64_t values[] = {
        0,          1,          2,          3,           4,     6,         8,
        9,          16,         17,         0x7f,        0xff,  0x64,      0x7fffffff,
        0x80000000, 0xffffffff, 0xaf143cd8, 0x100000000, ~0ull, 1ull << 63};
    return values[random() % std::size(values)];
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
    const auto at = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)) % n_counters;
    n_reached += !is_reached[at];
    is_reached[at] = true;
}

namespace kqview::test {

std::size_t n_branches_reached() { return n_reached; }

void fail_fuzz(const char* what, const std::vector<std::byte>& bytes) {
    std::printf("fuzz: FAILED: %s; bytes:", what);
    for (const auto byte : bytes) std::printf(" %02x", static_cast<unsigned>(byte));
    std::printf("\n");
    std::exit(1);
}

void change_bytes(std::vector<std::byte>& bytes, std::mt19937_64& random) {
    const auto n = bytes.size();
    switch (n < 16 ? 5 : random() % 7) {
        case 0: bytes[random() % n] = static_cast<std::byte>(random()); break;
        case 1: bytes[random() % n] ^= static_cast<std::byte>(1u << random() % 8); break;
        case 2: {  // an aligned number
            const auto value = static_cast<std::uint32_t>(interesting(random));
            std::memcpy(bytes.data() + random() % (n / 4) * 4, &value, sizeof(value));
            break;
        }
        case 3: {  // any number
            const auto value = interesting(random);
            std::memcpy(bytes.data() + random() % (n - 8), &value, random() % 2 == 0 ? 4 : 8);
            break;
        }
        case 4: bytes.resize(random() % (n + 1)); break;
        case 5: bytes.resize(n + random() % 64); break;
        default: {  // a piece somewhere else
            const auto size = random() % (n / 2) + 1;
            std::memmove(bytes.data() + random() % (n - size + 1),
                         bytes.data() + random() % (n - size + 1), size);
        }
    }
}

}  // namespace kqview::test
