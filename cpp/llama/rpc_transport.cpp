// The socket of llama.cpp's RPC client, with rpc/link.h behind it. vendor/llama.cmake compiles
// ggml-rpc.cpp with `socket_t` renamed to `kqview_rpc_socket_t`, so that it finds this class and
// not its own.
#include <ggml-rpc.h>
#include <cstddef>
#include <cstdint>
#include "rpc/link.h"
#include "rpc/protocol.h"

#define socket_t kqview_rpc_socket_t
#include <transport.h>  // of llama.cpp's ggml/src/ggml-rpc
#undef socket_t

#include <algorithm>
#include <memory>
#include <utility>

#include "rpc/servers.h"

static_assert(RPC_PROTO_MAJOR_VERSION == kqview::rpc_major_version &&
                  RPC_PROTO_MINOR_VERSION == kqview::rpc_minor_version,
              "llama.cpp speaks another RPC protocol: go through cpp/rpc/protocol.h");
static_assert(RPC_CONN_CAPS_SIZE == kqview::rpc_hello_bytes);

struct kqview_rpc_socket_t::impl {
    explicit impl(std::shared_ptr<kqview::rpc_link> link) : session(std::move(link)) {}

    kqview::rpc_session session;
};

kqview_rpc_socket_t::kqview_rpc_socket_t(std::unique_ptr<impl> p) : pimpl(std::move(p)) {}

kqview_rpc_socket_t::~kqview_rpc_socket_t() = default;

// Returning false would make llama.cpp abort the process.
bool kqview_rpc_socket_t::send_data(const void* data, size_t size) {
    pimpl->session.send({static_cast<const std::byte*>(data), size});
    return true;
}

bool kqview_rpc_socket_t::recv_data(void* data, size_t size) {
    pimpl->session.receive({static_cast<std::byte*>(data), size});
    return true;
}

bool kqview_rpc_socket_t::flush() { return true; }

void kqview_rpc_socket_t::get_caps(uint8_t* local_caps) {
    std::fill_n(local_caps, RPC_CONN_CAPS_SIZE, uint8_t{0});
}

void kqview_rpc_socket_t::update_caps(const uint8_t*) {}

socket_ptr kqview_rpc_socket_t::connect(const char* host, int port) {
    return socket_ptr(
        new kqview_rpc_socket_t(std::make_unique<impl>(kqview::find_rpc_link(host, port))));
}

// For llama.cpp's server, which this process never runs.
socket_ptr kqview_rpc_socket_t::accept() { return nullptr; }

socket_ptr kqview_rpc_socket_t::create_server(const char*, int) { return nullptr; }
