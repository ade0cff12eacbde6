// Process-wide start of llama.cpp: backends, log and abort callbacks. Once, on first use, any
// thread.
//
// ggml aborts the process when it cannot continue; CUDA's backend does so for every failed call of
// the driver. On a thread that is inside a llama_activity an abort becomes an exception instead,
// which crosses ggml's C functions (vendor/llama.cmake compiles them for it) and llama.cpp's. The
// process still ends, with a line that says what it was doing, if ggml aborts
//   - on another thread, such as a compute thread of the CPU or one of llama.cpp's loader;
//   - while the CPU computes a graph: its threads wait for each other, so none may leave
//     (cpu_compute);
//   - while another exception is being thrown.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/error.h"

namespace kqview {

void start_llama();

// What ggml said when it would have aborted. Not a std::exception, so that llama.cpp's own handlers
// let it pass. Whatever it was thrown out of is in no known state: it must be neither used nor
// freed.
struct llama_abort {
    std::string message;  // and the errors that were logged since the activity began
    bool is_memory;       // they speak of an allocation that failed
};

// Says, while it lives, what this thread is doing with llama.cpp, such as "loading model.gguf".
// Whoever makes the outermost one catches llama_abort.
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

// The error that the caller gets for an abort: out_of_memory, or `code`. `remedy` says what to do.
error error_of(const llama_abort& why, const char* what, errc code, const char* remedy);

// Runs `call` as an activity whose abort is an error: for one-time work that leaves nothing behind
// when it fails.
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
