// Process-wide start of llama.cpp: backends, log and abort callbacks. Once, on first use, any thread.
#pragma once

namespace kqview {

void start_llama();

// Names what this thread is doing with llama.cpp while it lives, e.g. "loading model.gguf": should
// llama.cpp abort the process, the last line printed says it.
class llama_activity {
public:
    explicit llama_activity(const char* what) noexcept;
    ~llama_activity();
    llama_activity(const llama_activity&) = delete;
    llama_activity& operator=(const llama_activity&) = delete;

private:
    const char* previous_;
};

}  // namespace kqview
