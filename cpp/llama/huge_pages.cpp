// Huge pages for caches on the host. A decoded token reads all keys and values once, in the order
// of memory, and with pages of 4 KiB it waits at every one of them: with pages of 2 MiB the same
// attention takes about 0.8 times as long (bench/alone.py).
//
// vendor/llama.cmake calls this where llama.cpp clears a new cache, which is the first time that
// its memory is touched, so that Linux gives it out in huge pages from the start. A hint: what the
// system refuses changes nothing.
#include <ggml-backend.h>

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

// Only whole huge pages inside the buffer, so that no other memory is meant.
void ask_for_huge_pages(void* base, std::size_t n_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr std::uintptr_t page = 2u << 20;
    const auto begin = (reinterpret_cast<std::uintptr_t>(base) + page - 1) / page * page;
    const auto end = (reinterpret_cast<std::uintptr_t>(base) + n_bytes) / page * page;
    if (begin < end) (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)base, (void)n_bytes;
#endif
}

}  // namespace

extern "C" void kqview_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    if (ggml_backend_buffer_is_host(buffer)) {
        ask_for_huge_pages(ggml_backend_buffer_get_base(buffer),
                           ggml_backend_buffer_get_size(buffer));
    }
    ggml_backend_buffer_clear(buffer, value);
}
