// Starts llama.cpp for the process: backends, log and abort callbacks. Runs once, on first use, on
// any thread.
//
// ggml aborts the process when it cannot continue; its CUDA backend does so for every failed driver
// call. On a thread inside a llama_activity, an abort becomes an exception instead, which unwinds
// through ggml's C functions (vendor/llama.cmake compiles them for that) and llama.cpp's. The
// process still ends, with a line that says what it was doing, if ggml aborts
//   - on another thread, such as a compute thread of the CPU or a thread of llama.cpp's loader;
//   - while the CPU computes a graph: its threads wait for each other, so none may leave
//     (cpu_compute);
//   - while another exception is being thrown.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace kqview {

void start_llama();

// Registers the devices of the backend in the library at `path` (packaged_backend.h), for engines
// that are opened from then on. The library stays loaded. `version` and `commit` are kqview's and
// llama.cpp's of this build. Throws errc::unsupported_model if the backend is for others, and
// errc::model_load if it cannot be loaded, has no device here, or is already part of the build.
void load_backend(const std::string& path, std::string_view version, std::string_view commit);

// Thrown in place of ggml's abort, with its message. Not a std::exception, so that it passes
// llama.cpp's own handlers. The object it was thrown out of is in an undefined state: neither use
// nor free it.
struct llama_abort {
    std::string message;  // and the errors that were logged since the activity began
    bool is_memory;       // the message reports a failed allocation
};

// For its lifetime, records what this thread is doing with llama.cpp, such as "loading model.gguf".
// The code that creates the outermost one catches llama_abort.
class llama_activity {
public:
    explicit llama_activity(const char* what) noexcept;
    ~llama_activity();
    llama_activity(const llama_activity&) = delete;
    llama_activity& operator=(const llama_activity&) = delete;

private:
    const char* previous_;
    std::uint64_t previous_position_;
};

// The error to raise for an abort: out_of_memory, or `code`. `remedy` says what to do.
error error_of(const llama_abort& why, const char* what, errc code, const char* remedy);

// Runs `call` as an activity and turns an abort into an error: for one-time work that leaves
// nothing behind on failure.
template <typename Call>
auto guarded(const char* what, errc code, const char* remedy, Call&& call) {
    try {
        const llama_activity guard(what);
        return std::forward<Call>(call)();
    } catch (const llama_abort& why) {
        throw error_of(why, what, code, remedy);
    }
}

}  // namespace kqview
