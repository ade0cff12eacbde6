// The RPC servers of one model, and the llama.cpp devices that represent them.
// Owner:   the model.
// Threads: created on the loading thread; `check`, `take_turn` on the engine thread; `leave` and
//          `states` on any.
#pragma once

#include <ggml-backend.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "rpc/servers.h"

namespace kqview {

class rpc_devices {
public:
    // No servers: every member does nothing.
    rpc_devices() = default;
    // Raises model_load, naming endpoint and reason, and request if llama.cpp has no room for so
    // many devices. `wait`: the longest time that a server may take for one answer.
    rpc_devices(const std::vector<rpc_endpoint>& endpoints, std::chrono::milliseconds wait);
    ~rpc_devices();

    bool empty() const { return servers_.empty(); }

    // The devices that a model is distributed over: the servers', then this machine's GPUs, then
    // null.
    std::vector<ggml_backend_dev_t> list() const;

    // Raise decode, or model_load, naming the lost server; closed after `leave`. Call one of these
    // before using any computed result.
    void check() const;
    void check_loading() const;

    // While the result lives, no other engine computes on these servers.
    using turn = std::vector<std::unique_lock<std::mutex>>;
    turn take_turn() const;

    // Hangs up, which ends a step that waits for a server. Idempotent.
    void leave() noexcept;

    // True in a forked child: the threads that talk to the servers belong to the parent, so nothing
    // that needs them may be done.
    bool is_forked() const { return fork_.is_forked(); }

    struct state {
        std::string endpoint;
        std::size_t n_devices;
        std::string loss;  // empty while it is connected
    };
    std::vector<state> states() const;

private:
    struct member {
        std::shared_ptr<rpc_server> server;
        std::vector<ggml_backend_dev_t> devices;
        ggml_backend_t anchor;  // keeps llama.cpp's connection thread alive
    };

    void open(const std::shared_ptr<rpc_server>& server);
    const rpc_server* first_lost() const;

    std::vector<member> servers_;  // in the caller's order
    std::atomic<bool> has_left_{false};
    const fork_guard fork_;
};

}  // namespace kqview
