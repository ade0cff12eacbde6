#include "llama/backend.h"

#include <ggml.h>
#include <llama.h>

#include <cstdio>
#include <mutex>

#include "base/log.h"

namespace kqview {

namespace {

thread_local const char* current_activity = nullptr;

void on_log(ggml_log_level level, const char* text, void*) {
    static thread_local log_level last = log_level::info;
    switch (level) {
        case GGML_LOG_LEVEL_DEBUG: last = log_level::debug; break;
        case GGML_LOG_LEVEL_WARN: last = log_level::warning; break;
        case GGML_LOG_LEVEL_ERROR: last = log_level::error; break;
        case GGML_LOG_LEVEL_CONT: break;  // continues the line before
        default: last = log_level::info;
    }
    log_ring::instance().write(last, text);
}

void on_abort(const char* message) {
    std::fprintf(stderr, "%s\nkqview: llama.cpp aborted the process%s%s; please report this\n",
                 message, current_activity ? " while " : "",
                 current_activity ? current_activity : "");
}

}  // namespace

void start_llama() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
        llama_backend_init();
    });
}

llama_activity::llama_activity(const char* what) noexcept : previous_(current_activity) {
    current_activity = what;
}

llama_activity::~llama_activity() { current_activity = previous_; }

}  // namespace kqview
