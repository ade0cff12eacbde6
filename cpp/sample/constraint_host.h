// The helper processes in which llguidance runs. One call of it may take all memory, never end or
// overflow the stack, and a grammar that compiles well may do so at any later token. So each
// constraint has a process of its own, with limits on memory and CPU time; whatever becomes of it,
// this process only reads the end of a socket.
//
// The first process loads the library and builds the vocabulary's trie, up to a second, and then
// forks one child per constraint, which takes milliseconds. Windows forks none, so llguidance is
// refused there.
// Owner:   the engine's token_filters, and every constraint. With the last of them, or when this
//          process ends in any way, all of the helpers end.
// Threads: any.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/fork_guard.h"
#include "base/ids.h"
#include "llama/model.h"

namespace kqview {

// A socket of the other process of a pair. Closed with it.
class process_socket {
public:
    using clock = std::chrono::steady_clock;

    explicit process_socket(int fd = -1) noexcept : fd_(fd) {}
    ~process_socket();
    process_socket(process_socket&& from) noexcept : fd_(std::exchange(from.fd_, -1)) {}
    process_socket& operator=(process_socket&& from) noexcept;

    int fd() const { return fd_; }
    // False if the other side has gone, the time is over, or `is_stopped` says so.
    bool send(const void* data, std::size_t n, clock::time_point until,
              const std::function<bool()>& is_stopped) const;
    bool receive(void* data, std::size_t n, clock::time_point until,
                 const std::function<bool()>& is_stopped) const;

private:
    int fd_;
};

class constraint_host {
public:
    // Limits of one constraint; the rest of the memory is for what all of them take together.
    static constexpr std::size_t memory_bytes = std::size_t{256} << 20;
    static constexpr std::size_t all_memory_bytes = std::size_t{2} << 30;
    static constexpr double compile_cpu_s = 5.0;
    static constexpr double step_cpu_s = 2.0;

    // `command` runs kqview/constraint_child.py. Starts it; raises request if llguidance cannot be
    // used, invalid_sampling for a model without a vocabulary or without a token that ends the
    // text, and busy if the system starts no process.
    constraint_host(std::vector<std::string> command, std::shared_ptr<const model> source);
    ~constraint_host();

    struct child {
        std::uint32_t number;
        process_socket socket;
    };
    // Raises busy if the system starts no process.
    child open();
    // Kills a child. Which limit had ended it before, if any.
    enum class cause { other, cpu_time, memory, depth };
    cause end(std::uint32_t number);
    // Kills a child, without waiting for it or for who uses the helper: that one tells it then.
    void drop(std::uint32_t number) noexcept;

    const std::vector<std::string>& command() const { return command_; }
    std::uint32_t n_vocab() const { return n_vocab_; }
    bool is_end(token_id id) const { return is_end_[static_cast<std::size_t>(id)]; }
    // The memory of all constraints together.
    std::atomic<std::int64_t>& n_bytes() { return n_bytes_; }

private:
    void start();
    void stop() noexcept;
    bool try_fork(child& wanted);
    void send_dropped() noexcept;
    std::string vocabulary();

    const std::vector<std::string> command_;
    const std::shared_ptr<const model> source_;
    const std::uint32_t n_vocab_;
    std::vector<bool> is_end_;
    const fork_guard guard_;
    std::atomic<std::int64_t> n_bytes_{0};

    std::mutex mutex_;  // guards what follows
    pid_t pid_ = -1;
    process_socket control_;
    std::uint32_t n_children_ = 0;

    std::mutex dropped_mutex_;  // taken after mutex_, held for a moment; guards what follows
    std::vector<std::uint32_t> dropped_;
};

}  // namespace kqview
