#include "rpc/tcp_connection.h"

namespace kqview {

tcp_connection::tcp_connection(const std::string&, int, limit) {
    throw connection_lost("cannot be connected to from Windows");
}

// There is none: nothing below is ever called.
tcp_connection::~tcp_connection() = default;
void tcp_connection::send(std::span<const std::byte>, std::span<const std::byte>) {}
void tcp_connection::receive(std::span<std::byte>) {}
bool tcp_connection::is_quiet() const noexcept { return false; }
void tcp_connection::shut_down() noexcept {}

}  // namespace kqview
