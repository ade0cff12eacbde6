// What a backend in a package of its own exports, under the name kqview_backend: vendor/backends
// makes it, load_backend finds it.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

namespace kqview {

// The library has its own copy of ggml-base, and shares with kqview what ggml's headers of one
// commit define. The texts are read before anything of it is called, so they never move.
struct packaged_backend {
    const char* kqview_version;
    const char* llama_cpp_commit;
    // nullptr without a driver. Log and abort are for its copy of ggml-base.
    ggml_backend_reg_t (*open)(ggml_log_callback log, ggml_abort_callback_t abort);
};

}  // namespace kqview
