#include "base/log.h"

#include <string_view>
#include <utility>

namespace kqview {

namespace {
constexpr std::size_t max_lines = 512;
}

log_ring& log_ring::instance() {
    // Never destroyed: llama.cpp may log while the process exits.
    static log_ring* const ring = new log_ring;
    return *ring;
}

void log_ring::write(log_level level, const char* text) {
    const std::lock_guard lock(mutex_);
    for (std::string_view rest = text; !rest.empty();) {
        if (partial_.text.empty()) {
            partial_.level = level;
            partial_.thread = std::this_thread::get_id();
        }
        const auto end = rest.find('\n');
        partial_.text += rest.substr(0, end);
        if (end == std::string_view::npos) break;
        rest.remove_prefix(end + 1);
        if (partial_.text.empty()) continue;
        partial_.sequence = next_sequence_++;
        lines_.push_back(std::move(partial_));
        partial_ = {};
        if (lines_.size() > max_lines) lines_.pop_front();
    }
}

std::vector<log_line> log_ring::drain() {
    const std::lock_guard lock(mutex_);
    std::vector<log_line> fresh;
    for (const auto& line : lines_) {
        if (line.sequence >= drained_) fresh.push_back(line);
    }
    drained_ = next_sequence_;
    return fresh;
}

std::uint64_t log_ring::position() const {
    const std::lock_guard lock(mutex_);
    return next_sequence_;
}

std::string log_ring::errors_since(std::uint64_t position, std::size_t n_lines) const {
    const std::lock_guard lock(mutex_);
    std::string joined;
    for (auto line = lines_.rbegin(); line != lines_.rend() && n_lines > 0; ++line) {
        if (line->sequence < position) break;
        if (line->thread != std::this_thread::get_id() || line->level < log_level::warning)
            continue;
        joined = joined.empty() ? line->text : line->text + "; " + joined;
        --n_lines;
    }
    return joined;
}

}  // namespace kqview
