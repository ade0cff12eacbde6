// Process-wide start of llama.cpp: backends, log and abort callbacks. Once, on first use, any
// thread. ggml ends the process where it cannot go on; CUDA does so for every failed call of the
// driver. On a thread that is inside a llama_activity that is an exception instead, which crosses
// ggml's C functions (vendor/llama.cmake compiles them for it) and llama.cpp's. The process still
// ends, with a line that says what it was doing, where ggml aborts
//   - on another thread, such as a compute thread of the CPU or one of llama.cpp's loader;
//   - while the CPU computes a graph: its threads wait for each other, and none may leave (cpu_compute);
//   - while another exception is thrown, which it cannot pass.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/error.h"

namespace kqview {

void start_llama();

// What ggml said when it would have ended the process. No std::exception: llama.cpp's own handlers
// let it pass. What it was thrown out of is in no known state: neither to be used again, nor to be
// freed.
struct llama_abort {
    std::string message;  // and the errors that were logged since the activity began
    bool is_memory;       // they speak of an allocation that failed
};

// Names what this thread is doing with llama.cpp while it lives, e.g. "loading model.gguf". Who
// makes the outermost one catches llama_abort.
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

// The error that a caller gets for it: out_of_memory, or `code`. `remedy` says what to do.
error error_of(const llama_abort& why, const char* what, errc code, const char* remedy);

// `call` as an activity whose abort is an error, for what is done once and leaves nothing behind
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
