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

#include "base/system.h"

extern "C" void kqview_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    auto* const base = static_cast<std::byte*>(ggml_backend_buffer_get_base(buffer));
    const auto n_bytes = ggml_backend_buffer_get_size(buffer);
    if (ggml_backend_buffer_is_host(buffer)) kqview::ask_for_huge_pages(base, n_bytes);
    // Other host memory may be a device's.
    const bool is_plain = ggml_backend_buffer_get_type(buffer) == ggml_backend_cpu_buffer_type();
    if (value == 0 && is_plain && kqview::try_empty(base, n_bytes)) return;
    ggml_backend_buffer_clear(buffer, value);
}
