// The RPC servers that this process is connected to. Engines that name the same server share its
// connection, because llama.cpp's server serves one client at a time.
// Threads: any.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/fork_guard.h"
#include "rpc/link.h"
#include "rpc/tcp_connection.h"

namespace kqview {

struct rpc_endpoint {
    std::string host;
    int port = 0;

    std::string text() const { return host + ":" + std::to_string(port); }
};

// One connection to a server. Users join and leave; the last one to leave hangs up.
class rpc_server {
public:
    rpc_server(const rpc_endpoint& endpoint, std::string name, std::shared_ptr<rpc_link> link)
        : endpoint_(endpoint.text()), name_(std::move(name)), link_(std::move(link)) {}

    const std::string& endpoint() const { return endpoint_; }  // "host:port", for people
    // "host#n:port", for llama.cpp, which caches device properties forever under this name. A
    // restarted server may have other devices, so each connection has its own name.
    const std::string& name() const { return name_; }
    rpc_link& link() const { return *link_; }

    // Two engines must not send graphs at the same time: llama.cpp records, without a lock, which
    // graph a device has, and would let the server compute the other engine's.
    std::mutex& turn() { return turn_; }

    bool is_forked() const { return fork_.is_forked(); }

private:
    friend std::shared_ptr<rpc_server> join_rpc_server(const rpc_endpoint&, tcp_connection::limit);
    friend void leave_rpc_server(rpc_server&) noexcept;

    const std::string endpoint_;
    const std::string name_;
    const std::shared_ptr<rpc_link> link_;
    const fork_guard fork_;
    std::mutex turn_;
    int n_users_ = 1;  // guarded by the table of servers
};

// Connects, if this process is not connected yet, within `wait` plus the time to resolve a host
// name. Raises model_load with endpoint and reason.
std::shared_ptr<rpc_server> join_rpc_server(const rpc_endpoint& endpoint,
                                            tcp_connection::limit wait);

// Call once for each join. The last user to leave hangs up, even if requests are in progress.
void leave_rpc_server(rpc_server& server) noexcept;

// The link of a server, by the parts of its name as llama.cpp splits it; a lost link if there is
// none.
std::shared_ptr<rpc_link> find_rpc_link(const std::string& host, int port);

}  // namespace kqview
