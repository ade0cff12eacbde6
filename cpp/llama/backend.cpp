#include "llama/backend.h"

#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <llama.h>

#include <cstdio>
#include <exception>
#include <mutex>
#include <string>

#include "base/cpu_variant.h"
#include "base/log.h"
#include "base/system.h"
#include "llama/packaged_backend.h"
#include "memory/device_need.h"

namespace kqview {

namespace {

thread_local const char* current_activity = nullptr;
thread_local std::uint64_t activity_position = 0;  // log position when it began
thread_local bool computes_on_cpu = false;

void on_log(ggml_log_level level, const char* text, void*) {
    static thread_local log_level last = log_level::info;
    switch (level) {
        case GGML_LOG_LEVEL_DEBUG: last = log_level::debug; break;
        case GGML_LOG_LEVEL_WARN: last = log_level::warning; break;
        case GGML_LOG_LEVEL_ERROR: last = log_level::error; break;
        case GGML_LOG_LEVEL_CONT: break;  // continues the previous line
        default: last = log_level::info;
    }
    log_ring::instance().write(last, text);
}

void on_abort(const char* message) {
    if (current_activity && !computes_on_cpu && std::uncaught_exceptions() == 0) {
        const auto log = log_ring::instance().errors_since(activity_position);
        throw llama_abort{log.empty() ? message : log + "; " + message, says_out_of_memory(log)};
    }
    std::fprintf(stderr, "%s\nkqview: llama.cpp aborted the process%s%s; please report this\n",
                 message, current_activity ? " while " : "",
                 current_activity ? current_activity : "");
}

}  // namespace

void start_llama() {
    static std::once_flag once;
    std::call_once(once, [] {
        choose_cpu_variant();
        enlarge_stacks();
        llama_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
        llama_backend_init();
    });
}

void load_backend(const std::string& path, std::string_view version, std::string_view commit) {
    start_llama();
    std::string reason;
    auto* const library = open_library(path.c_str(), &reason);
    if (!library) throw error(errc::model_load, reason);
    const auto* const backend =
        static_cast<const packaged_backend*>(find_symbol(library, "kqview_backend"));
    if (!backend) throw error(errc::model_load, path, " is no backend of kqview");
    if (backend->kqview_version != version || backend->llama_cpp_commit != commit) {
        throw error(errc::unsupported_model, path, " is for kqview ", backend->kqview_version,
                    " with llama.cpp ", backend->llama_cpp_commit, ", and this is kqview ", version,
                    " with llama.cpp ", commit,
                    "; install its package in this version, or uninstall it");
    }
    const auto began = log_ring::instance().position();
    auto* const registry =
        guarded("starting a backend", errc::model_load, "uninstall its package to go without it",
                [&] { return backend->open(on_log, on_abort); });
    if (!registry || ggml_backend_reg_dev_count(registry) == 0) {
        const auto log = log_ring::instance().errors_since(began);
        throw error(errc::model_load, path, " finds no device", log.empty() ? "" : ": ", log);
    }
    const auto* const name = ggml_backend_reg_name(registry);
    if (auto* const known = ggml_backend_reg_by_name(name); known && known != registry) {
        throw error(errc::model_load, path, " is not needed: this build itself has ", name);
    }
    ggml_backend_register(registry);
}

llama_activity::llama_activity(const char* what) noexcept
    : previous_(std::exchange(current_activity, what)), previous_position_(activity_position) {
    if (!previous_) activity_position = log_ring::instance().position();
}

llama_activity::~llama_activity() {
    current_activity = previous_;
    activity_position = previous_position_;
}

error error_of(const llama_abort& why, const char* what, errc code, const char* remedy) {
    return {why.is_memory ? errc::out_of_memory : code,
            "llama.cpp failed while ",
            what,
            ": ",
            why.message,
            "; ",
            remedy};
}

namespace {

struct cpu_compute {
    cpu_compute() noexcept : previous(std::exchange(computes_on_cpu, true)) {}
    ~cpu_compute() { computes_on_cpu = previous; }
    cpu_compute(const cpu_compute&) = delete;
    cpu_compute& operator=(const cpu_compute&) = delete;
    const bool previous;
};

}  // namespace

}  // namespace kqview

// ggml's CPU backend computes graphs through this name (vendor/llama.cmake).
extern "C" ggml_status kqview_cpu_graph_compute(ggml_cgraph* graph, ggml_cplan* plan) {
    const kqview::cpu_compute scope;
    return ggml_graph_compute(graph, plan);
}
