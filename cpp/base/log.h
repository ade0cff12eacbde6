// Ring buffer between llama.cpp's log and Python's logging.
// Threads: any thread writes (llama.cpp logs from loaders and from the engine thread); a Python
//          thread drains. Never takes the GIL, so logging never holds up the engine thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace kqview {

// As Python's logging numbers them.
enum class log_level { debug = 10, info = 20, warning = 30, error = 40 };

struct log_line {
    std::uint64_t sequence;
    log_level level;
    std::thread::id thread;
    std::string text;  // one line, without its newline
};

class log_ring {
public:
    // The process-wide ring: llama.cpp has one log callback per process.
    static log_ring& instance();

    // Adds text; pieces without a newline are joined with the ones that follow from that thread.
    void write(log_level level, const char* text);

    // Lines not yet drained, oldest first; the ring keeps the last 512, older ones are lost.
    std::vector<log_line> drain();

    // A position for `errors_since`.
    std::uint64_t position() const;

    // What this thread logged as warning or error since `position`, joined by "; ", newest
    // `n_lines`.
    std::string errors_since(std::uint64_t position, std::size_t n_lines = 4) const;

private:
    mutable std::mutex mutex_;
    std::deque<log_line> lines_;
    std::uint64_t next_sequence_ = 0;
    std::uint64_t drained_ = 0;
    log_line partial_{};
};

}  // namespace kqview
