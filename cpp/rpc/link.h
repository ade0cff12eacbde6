// A session with one RPC server that survives the loss of the server.
//
// The problem: llama.cpp's RPC client aborts the process if a server does not answer, and its
// destructors send requests too. The solution: kqview replaces the client's socket
// (llama/rpc_transport.cpp) with one that never fails. While the server is there, a link forwards
// requests and answers. Once the server is lost, for whatever reason, the link drops requests and
// makes up harmless answers (protocol.h, write_stand_in). So nothing aborts and nothing waits; code
// that uses a result checks `is_lost` first.
//
// The parts: tcp_connection (bytes, with a time limit), protocol (which requests are answered,
// which answers are valid), link (this file: one exchange at a time), servers (who uses which
// link).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rpc/protocol.h"
#include "rpc/tcp_connection.h"

namespace kqview {

// Owner:   shared by the server's entry (servers.h) and the sockets of llama.cpp that use it.
// Threads: llama.cpp's worker threads, one exchange at a time; `is_lost`, `loss`, `look`, `lose`,
//          `hang_up` and `raise_limit` from any.
class rpc_link {
public:
    // Connects and exchanges greetings with the server, both within `wait`. Raises connection_lost.
    rpc_link(std::string endpoint, const std::string& host, int port, tcp_connection::limit wait);
    // A link that was never connected.
    rpc_link(std::string endpoint, const std::string& why);

    bool is_lost() const noexcept { return is_lost_.load(std::memory_order_acquire); }
    std::string loss() const;  // the reason, phrased to follow "RPC server host:port "

    // Detects that the server is gone while no request is pending.
    void look() noexcept;

    // Marks the link as lost; the first reason wins. A thread that waits for an answer gets a
    // made-up one at once.
    void lose(const std::string& why) noexcept;
    // Call when this process does not need the server any more.
    void hang_up() noexcept { lose("is not in use any more"); }

    // Raises, and never lowers, the longest time that a server may take for one answer.
    void raise_limit(tcp_connection::limit wait) noexcept;

private:
    friend class rpc_session;

    // One exchange: a request and, if it is answered, both parts of the answer.
    void request(const rpc_request& request, std::span<const std::byte> payload) noexcept;
    void receive_size(const rpc_request& request) noexcept;
    void receive_answer(const rpc_request& request, std::span<std::byte> out) noexcept;

    bool is_answered(const rpc_request& request) const noexcept;
    void greet();
    void write(rpc_command command, std::span<const std::byte> payload);

    // A server keeps the last graph that a device computed, and drops it whenever any buffer is
    // freed. llama.cpp does not know that, so the link sends the graph again.
    struct kept_graph {
        std::vector<std::byte> payload;
        bool is_dropped = false;
    };

    const std::string endpoint_;
    std::unique_ptr<tcp_connection> connection_;  // null if never connected
    std::mutex exchange_mutex_;                   // held from a request to the end of its answer
    std::map<std::uint32_t, kept_graph> graphs_;  // by device
    std::atomic<bool> is_lost_{false};
    mutable std::mutex loss_mutex_;
    std::string loss_;
};

// llama.cpp's end of a link, one per socket. Turns its calls, which come in a fixed order (command,
// size, payload; then the answer's size, the answer), into exchanges.
// Threads: one.
class rpc_session {
public:
    explicit rpc_session(std::shared_ptr<rpc_link> link) : link_(std::move(link)) {}

    void send(std::span<const std::byte> data) noexcept;
    void receive(std::span<std::byte> out) noexcept;

private:
    enum class phase { command, size, payload, answer_size, answer };

    void send_payload(std::span<const std::byte> payload) noexcept;
    void end_exchange() noexcept;
    void lose_track() noexcept;

    std::shared_ptr<rpc_link> link_;
    std::unique_lock<std::mutex> exchange_;
    phase next_ = phase::command;
    rpc_command command_{};
    std::uint64_t payload_bytes_ = 0;
    rpc_request request_;
};

}  // namespace kqview
