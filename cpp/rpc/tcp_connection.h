// A TCP connection on which no call waits longer than a limit.
// Owner:   rpc_link.
// Threads: one at a time sends and receives; `set_limit` and `shut_down`: any.
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

// Why there is no connection, phrased to follow "RPC server host:port ".
class connection_lost : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

class tcp_connection {
public:
    using limit = std::chrono::milliseconds;

    // Raises connection_lost. `wait` is the limit of this call and, until set_limit(), of every
    // later one. It does not cover resolving a host name, which takes as long as the system needs.
    tcp_connection(const std::string& host, int port, limit wait);
    ~tcp_connection();

    // The longest time without progress by the server.
    void set_limit(limit wait) noexcept { limit_ms_.store(wait.count()); }
    limit wait_limit() const noexcept { return limit(limit_ms_.load()); }

    // send: all of `head`, then all of `body`. receive: all of `out`. Both raise connection_lost.
    void send(std::span<const std::byte> head, std::span<const std::byte> body);
    void receive(std::span<std::byte> out);

    // True if nothing has arrived, not even the end of the connection. While no answer is due,
    // false means that the connection is gone.
    bool is_quiet() const noexcept;

    // Ends the connection, also for a call that waits on another thread and for forked children.
    void shut_down() noexcept;

private:
    void wait_for(short events, const char* what) const;

    int fd_ = -1;
    std::atomic<std::int64_t> limit_ms_;
};

}  // namespace kqview
