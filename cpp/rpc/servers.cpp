#include "rpc/servers.h"

#include <map>
#include <utility>

#include "base/error.h"

namespace kqview {

namespace {

struct server_table {
    // Held while connecting: the second of two connections to one server would get no answer.
    std::mutex joining_mutex;
    std::mutex mutex;  // guards what follows, and the users of each server
    std::map<std::string, std::weak_ptr<rpc_server>> servers;  // by endpoint
    std::map<std::string, std::weak_ptr<rpc_link>> links;      // by name
    int n_connections = 0;
};

// Never destroyed: llama.cpp's threads may still use it during process exit.
server_table& table() {
    static auto* const instance = new server_table;
    return *instance;
}

std::shared_ptr<rpc_link> connect(const rpc_endpoint& endpoint, tcp_connection::limit wait) {
    try {
        return std::make_shared<rpc_link>(endpoint.text(), endpoint.host, endpoint.port, wait);
    } catch (const connection_lost& failure) {
        throw error(errc::model_load, "RPC server ", endpoint.text(), " ", failure.what(),
                    "; start llama.cpp's ggml-rpc-server there, or correct rpc_servers");
    }
}

}  // namespace

std::shared_ptr<rpc_server> join_rpc_server(const rpc_endpoint& endpoint,
                                            tcp_connection::limit wait) {
    auto& all = table();
    const std::lock_guard joining(all.joining_mutex);
    {
        const std::lock_guard lock(all.mutex);
        auto known = all.servers[endpoint.text()].lock();
        if (known && !known->is_forked()) known->link().look();
        // A forked child must not use its parent's connection.
        if (known && known->n_users_ > 0 && !known->link().is_lost() && !known->is_forked()) {
            ++known->n_users_;
            return known;
        }
    }
    auto link = connect(endpoint, wait);
    const std::lock_guard lock(all.mutex);
    const rpc_endpoint named{endpoint.host + "#" + std::to_string(++all.n_connections),
                             endpoint.port};
    std::erase_if(all.links, [](const auto& entry) { return entry.second.expired(); });
    all.links[named.text()] = link;
    auto server = std::make_shared<rpc_server>(endpoint, named.text(), std::move(link));
    all.servers[endpoint.text()] = server;
    return server;
}

void leave_rpc_server(rpc_server& server) noexcept {
    if (server.is_forked()) return;
    {
        const std::lock_guard lock(table().mutex);
        if (--server.n_users_ > 0) return;
    }
    server.link().hang_up();
}

std::shared_ptr<rpc_link> find_rpc_link(const std::string& host, int port) {
    const auto name = rpc_endpoint{host, port}.text();
    {
        auto& all = table();
        const std::lock_guard lock(all.mutex);
        const auto found = all.links.find(name);
        if (found != all.links.end()) {
            if (auto link = found->second.lock()) return link;
        }
    }
    return std::make_shared<rpc_link>(name, "is not connected");
}

}  // namespace kqview
