// The RPC servers of one model, and the devices of llama.cpp that stand for them.
// Owner:   the model. Threads: made on the loading thread; `check`, `take_turn` on the engine
//          thread; `leave` and `states` on any.
#pragma once

#include <ggml-backend.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "rpc/servers.h"

namespace kqview {

class rpc_devices {
public:
    // No servers: nothing here does anything.
    rpc_devices() = default;
    // Raises model_load, naming endpoint and reason, and request where llama.cpp has no room for so
    // many devices. `wait`: the longest time that a server may take over one answer.
    rpc_devices(const std::vector<rpc_endpoint>& endpoints, std::chrono::milliseconds wait);
    ~rpc_devices();
    rpc_devices(const rpc_devices&) = delete;
    rpc_devices& operator=(const rpc_devices&) = delete;

    bool empty() const { return servers_.empty(); }

    // What a model is spread over: the servers' devices, then this machine's GPUs, then null.
    std::vector<ggml_backend_dev_t> list() const;

    // Raise decode, or model_load, naming the lost server; closed after `leave`. Nothing that was
    // computed may be used before one of these was called.
    void check() const;
    void check_loading() const;

    // While it lives no other engine computes on these servers.
    using turn = std::vector<std::unique_lock<std::mutex>>;
    turn take_turn() const;

    // Hangs up, so that a step which waits for a server ends. Idempotent.
    void leave() noexcept;

    // The threads that talk to the servers are the parent's, so nothing may be done that needs
    // them.
    bool is_forked() const { return fork_.is_forked(); }

    struct state {
        std::string endpoint;
        std::size_t n_devices;
        std::string loss;  // empty while it is there
    };
    std::vector<state> states() const;

private:
    struct member {
        std::shared_ptr<rpc_server> server;
        std::vector<ggml_backend_dev_t> devices;
        ggml_backend_t anchor;  // keeps the thread that llama.cpp talks to the server with
    };

    void open(const std::shared_ptr<rpc_server>& server);
    const rpc_server* first_lost() const;

    std::vector<member> servers_;  // as the caller named them
    std::atomic<bool> has_left_{false};
    const fork_guard fork_;
};

}  // namespace kqview
