// Pages of caches on the host: huge ones, given out by Linux as cells are used.
//
// A decoded token reads all keys and values once, in the order of memory, and with pages of 4 KiB
// it waits at every one of them: with pages of 2 MiB the same attention takes about 0.8 times as
// long (bench/alone.py).
//
// vendor/llama.cmake calls this where llama.cpp clears a new cache. Writing zeros would take as
// much memory as the whole context, and seconds for a large one, though most cells are never used.
// Pages that are handed back to Linux read as zeros too, and take no memory before they are
// written: opening costs nearly the same for every n_ctx (bench/opening.py). Without flash
// attention values lie transposed, so that the first token writes to all their pages. What the
// system refuses is written as llama.cpp does.
#include <ggml-backend.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

#ifdef __linux__

// The whole pages of this size inside a range, so that no other memory is meant.
struct whole_pages {
    std::byte* begin;
    std::byte* end;

    whole_pages(std::byte* base, std::size_t n_bytes, std::uintptr_t page)
        : begin(base + (page - reinterpret_cast<std::uintptr_t>(base) % page) % page),
          end(base + n_bytes - (reinterpret_cast<std::uintptr_t>(base) + n_bytes) % page) {}

    // False: the system refused, or there is none.
    bool advise(int advice) const {
        return begin < end && ::madvise(begin, static_cast<std::size_t>(end - begin), advice) == 0;
    }
};

void ask_for_huge_pages(std::byte* base, std::size_t n_bytes) {
#ifdef MADV_HUGEPAGE
    whole_pages(base, n_bytes, 2u << 20).advise(MADV_HUGEPAGE);
#else
    (void)base, (void)n_bytes;
#endif
}

// Makes the range read as zeros without taking memory for it; false, without effect, if the system
// cannot. The memory must be private and of no file, as malloc's is.
bool empty(std::byte* base, std::size_t n_bytes) {
    const whole_pages pages(base, n_bytes, static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE)));
    if (!pages.advise(MADV_DONTNEED)) return false;
    std::memset(base, 0, static_cast<std::size_t>(pages.begin - base));
    std::memset(pages.end, 0, static_cast<std::size_t>(base + n_bytes - pages.end));
    return true;
}

#else

void ask_for_huge_pages(std::byte*, std::size_t) {}
bool empty(std::byte*, std::size_t) { return false; }

#endif

}  // namespace

extern "C" void kqview_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    auto* const base = static_cast<std::byte*>(ggml_backend_buffer_get_base(buffer));
    const auto n_bytes = ggml_backend_buffer_get_size(buffer);
    if (ggml_backend_buffer_is_host(buffer)) ask_for_huge_pages(base, n_bytes);
    // Other host memory may be a device's.
    const bool is_plain = ggml_backend_buffer_get_type(buffer) == ggml_backend_cpu_buffer_type();
    if (value == 0 && is_plain && empty(base, n_bytes)) return;
    ggml_backend_buffer_clear(buffer, value);
}
