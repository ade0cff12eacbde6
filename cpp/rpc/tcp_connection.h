// A TCP connection that never keeps its caller waiting longer than a limit.
// Owner:   rpc_link. Threads: one at a time sends and receives; `set_limit` and `shut_down` from
//          any.
// Never:   raises SIGPIPE; is inherited by a program that this process starts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace kqview {

// Why there is no connection, in words that follow "RPC server host:port ".
class connection_lost : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

class tcp_connection {
public:
    using limit = std::chrono::milliseconds;

    // Raises connection_lost. `wait` is the limit of this call and, until set_limit(), of every
    // later one. A host name is looked up first, which takes as long as the system takes.
    tcp_connection(const std::string& host, int port, limit wait);
    ~tcp_connection();
    tcp_connection(const tcp_connection&) = delete;
    tcp_connection& operator=(const tcp_connection&) = delete;

    // How long the server may make no progress.
    void set_limit(limit wait) noexcept { limit_ms_.store(wait.count()); }
    limit wait_limit() const noexcept { return limit(limit_ms_.load()); }

    // All of both, one behind the other; all of `out`. Raise connection_lost.
    void send(std::span<const std::byte> head, std::span<const std::byte> body);
    void receive(std::span<std::byte> out);

    // Nothing has come in, not even an end. While no answer is due, false means that the connection
    // is gone.
    bool is_quiet() const noexcept;

    // Ends the connection, also for a call waiting on another thread and for forked children.
    void shut_down() noexcept;

private:
    void wait_for(short events, const char* what) const;

    int fd_ = -1;
    std::atomic<std::int64_t> limit_ms_;
};

}  // namespace kqview
