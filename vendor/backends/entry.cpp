// The one symbol of a backend in a package of its own.
#include "llama/packaged_backend.h"

extern "C" ggml_backend_reg_t KQVIEW_REGISTER();  // ggml_backend_vk_reg or ggml_backend_cuda_reg

namespace {

ggml_backend_reg_t open_backend(ggml_log_callback log, ggml_abort_callback_t abort) {
    ggml_log_set(log, nullptr);
    ggml_set_abort_callback(abort);
    return KQVIEW_REGISTER();
}

}  // namespace

extern "C" __attribute__((visibility("default")))
const kqview::packaged_backend kqview_backend{KQVIEW_VERSION, KQVIEW_LLAMA_COMMIT, open_backend};
