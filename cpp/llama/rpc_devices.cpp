#include "llama/rpc_devices.h"

#include <ggml-rpc.h>

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "base/system.h"
#include "llama/devices.h"

namespace kqview {

namespace {

// For the handshake and the few queries about devices; a step may take much longer.
constexpr std::chrono::milliseconds set_up_limit{10'000};

// ggml's scheduler supports 16 backends; one of them is the CPU's.
constexpr std::size_t n_backends_max = 16;

}  // namespace

rpc_devices::rpc_devices(const std::vector<rpc_endpoint>& endpoints,
                         std::chrono::milliseconds wait) {
    try {
        for (const auto& endpoint : endpoints) {
            open(join_rpc_server(endpoint, std::min(wait, set_up_limit)));
            servers_.back().server->link().raise_limit(wait);
        }
        check_loading();
        std::size_t n_devices = local_gpus().size();
        for (const auto& one : servers_) n_devices += one.devices.size();
        const auto n_other = 1 + local_devices(GGML_BACKEND_DEVICE_TYPE_ACCEL).size();
        if (!empty() && n_devices + n_other > n_backends_max) {
            throw error(errc::request, "rpc_servers and this machine have ", n_devices,
                        " devices together, the limit is ", n_backends_max - n_other,
                        "; name fewer servers");
        }
    } catch (...) {
        leave();
        for (const auto& one : servers_) ggml_backend_free(one.anchor);
        throw;
    }
}

void rpc_devices::open(const std::shared_ptr<rpc_server>& server) {
    servers_.push_back({server, {}, nullptr});
    auto& added = servers_.back();
    const signals_blocked guard;
    auto* const registry = ggml_backend_rpc_add_server(server->name().c_str());
    check_loading();  // without an answer there is no registry
    if (!registry) {
        throw error(errc::internal, "RPC server ", server->endpoint(), " has no devices");
    }
    for (std::size_t i = 0; i < ggml_backend_reg_dev_count(registry); ++i) {
        added.devices.push_back(ggml_backend_reg_dev_get(registry, i));
    }
    added.anchor = ggml_backend_dev_init(added.devices.front(), nullptr);
    // llama.cpp asks once about each device's memory; here the answer is due within the set-up
    // limit.
    for (auto* const device : added.devices) (void)ggml_backend_dev_buffer_type(device);
    check_loading();
}

rpc_devices::~rpc_devices() {
    if (is_forked()) return;
    leave();
    for (const auto& one : servers_) ggml_backend_free(one.anchor);
}

std::vector<ggml_backend_dev_t> rpc_devices::list() const {
    std::vector<ggml_backend_dev_t> all;
    for (const auto& one : servers_) {
        all.insert(all.end(), one.devices.begin(), one.devices.end());
    }
    for (auto* const device : local_gpus()) all.push_back(device);
    all.push_back(nullptr);
    return all;
}

const rpc_server* rpc_devices::first_lost() const {
    const auto lost = std::find_if(servers_.begin(), servers_.end(),
                                   [](const member& one) { return one.server->link().is_lost(); });
    return lost == servers_.end() ? nullptr : lost->server.get();
}

void rpc_devices::check() const {
    const auto* const lost = first_lost();
    if (!lost) return;
    if (has_left_) throw error(errc::closed, "the engine was closed; open a new Engine");
    throw error(errc::decode, "RPC server ", lost->endpoint(), " ", lost->link().loss(),
                "; start it again and open a new Engine");
}

void rpc_devices::check_loading() const {
    if (const auto* const lost = first_lost()) {
        throw error(errc::model_load, "RPC server ", lost->endpoint(), " ", lost->link().loss(),
                    " while the engine was opened; check the server and try again");
    }
}

rpc_devices::turn rpc_devices::take_turn() const {
    turn taken;
    if (empty()) return taken;
    std::vector<rpc_server*> ordered;
    for (const auto& one : servers_) ordered.push_back(one.server.get());
    std::sort(ordered.begin(), ordered.end(),
              std::less<>{});  // two engines may name the same servers in different orders
    for (auto* const server : ordered) taken.emplace_back(server->turn());
    return taken;
}

void rpc_devices::leave() noexcept {
    if (is_forked() || has_left_.exchange(true)) return;
    for (const auto& one : servers_) leave_rpc_server(*one.server);
}

std::vector<rpc_devices::state> rpc_devices::states() const {
    std::vector<state> all;
    for (const auto& one : servers_) {
        auto& link = one.server->link();
        if (!is_forked()) link.look();
        all.push_back({one.server->endpoint(), one.devices.size(), link.loss()});
    }
    return all;
}

}  // namespace kqview
