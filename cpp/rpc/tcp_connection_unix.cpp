#include "rpc/tcp_connection.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <memory>
#include <sstream>
#include <system_error>
#include <utility>

namespace kqview {

namespace {

#ifdef MSG_NOSIGNAL
constexpr int send_flags = MSG_NOSIGNAL;
#else
constexpr int send_flags = 0;  // macOS: SO_NOSIGPIPE below
#endif

// If a host disappears (power, cable) while an answer is due, the kernel drops the connection after
// about half a minute, before the limit. A host that is merely busy is not affected.
constexpr int idle_before_probe_s = 15;
constexpr int between_probes_s = 5;
constexpr int n_probes = 4;

std::string to_seconds(tcp_connection::limit wait) {
    std::ostringstream text;
    text << std::chrono::duration<double>(wait).count() << " s";
    return text.str();
}

std::string reason_of(int code) {
    switch (code) {
        case ECONNREFUSED: return "refuses connections: nothing listens on that port";
        case ECONNRESET:
        case EPIPE: return "closed the connection";
        case ETIMEDOUT:
        case EHOSTUNREACH:
        case ENETUNREACH: return "cannot be reached over the network";
        default:
            return "has a broken connection: " +
                   std::error_code(code, std::generic_category()).message();
    }
}

void set_option(int fd, int level, int name, int value) {
    (void)::setsockopt(fd, level, name, &value, sizeof value);  // failure is harmless
}

void set_options(int fd) {
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, between_probes_s);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, n_probes);
#ifdef TCP_KEEPIDLE
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle_before_probe_s);
#endif
#ifdef SO_NOSIGPIPE
    set_option(fd, SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
}

struct descriptor {
    int fd;
    ~descriptor() {
        if (fd >= 0) ::close(fd);
    }
    int release() { return std::exchange(fd, -1); }
};

}  // namespace

tcp_connection::tcp_connection(const std::string& host, int port, limit wait)
    : limit_ms_(wait.count()) {
    addrinfo hints{};
    hints.ai_family = AF_INET;  // what llama.cpp's server listens on
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (status != 0) {
        throw connection_lost("has an unknown host name: " + std::string(gai_strerror(status)));
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
    std::string why = "has no address";
    for (const auto* one = found; one != nullptr; one = one->ai_next) {
        descriptor made{::socket(one->ai_family, one->ai_socktype, one->ai_protocol)};
        if (made.fd < 0) throw connection_lost(reason_of(errno));
        (void)::fcntl(made.fd, F_SETFD, FD_CLOEXEC);
        (void)::fcntl(made.fd, F_SETFL, O_NONBLOCK);
        set_options(made.fd);
        fd_ = made.fd;
        try {
            int code = ::connect(made.fd, one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
            if (code == EINPROGRESS || code == EINTR) {
                wait_for(POLLOUT, "cannot be connected to");
                socklen_t size = sizeof code;
                (void)::getsockopt(made.fd, SOL_SOCKET, SO_ERROR, &code, &size);
            }
            if (code != 0) throw connection_lost(reason_of(code));
        } catch (const connection_lost& failure) {
            why = failure.what();
            continue;
        }
        fd_ = made.release();
        return;
    }
    throw connection_lost(why);
}

tcp_connection::~tcp_connection() { ::close(fd_); }

void tcp_connection::send(std::span<const std::byte> head, std::span<const std::byte> body) {
    std::array parts{head, body};
    std::size_t i_part = 0;
    while (i_part < parts.size()) {
        std::array<iovec, 2> rest{};
        std::size_t n_rest = 0;
        for (std::size_t i = i_part; i < parts.size(); ++i) {
            // The kernel only reads; the C struct lacks const.
            rest[n_rest++] = {const_cast<std::byte*>(parts[i].data()), parts[i].size()};
        }
        msghdr message{};
        message.msg_iov = rest.data();
        message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(n_rest);
        const auto n = ::sendmsg(fd_, &message, send_flags);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) throw connection_lost(reason_of(errno));
            wait_for(POLLOUT, "accepted no more data");
            continue;
        }
        auto n_sent = static_cast<std::size_t>(n);
        while (i_part < parts.size() && n_sent >= parts[i_part].size()) {
            n_sent -= parts[i_part++].size();
        }
        if (i_part < parts.size()) parts[i_part] = parts[i_part].subspan(n_sent);
    }
}

void tcp_connection::receive(std::span<std::byte> out) {
    while (!out.empty()) {
        const auto n = ::recv(fd_, out.data(), out.size(), 0);
        if (n == 0) throw connection_lost("closed the connection");
        if (n > 0) {
            out = out.subspan(static_cast<std::size_t>(n));
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            wait_for(POLLIN, "did not answer");
        } else if (errno != EINTR) {
            throw connection_lost(reason_of(errno));
        }
    }
}

bool tcp_connection::is_quiet() const noexcept {
    pollfd waiting{fd_, POLLIN, 0};
    return ::poll(&waiting, 1, 0) <= 0;
}

void tcp_connection::shut_down() noexcept { (void)::shutdown(fd_, SHUT_RDWR); }

void tcp_connection::wait_for(short events, const char* what) const {
    using clock = std::chrono::steady_clock;
    const auto wait = wait_limit();
    const auto deadline = clock::now() + wait;
    for (;;) {
        const auto left = std::chrono::ceil<limit>(deadline - clock::now()).count();
        const auto left_ms = std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max());
        pollfd waiting{fd_, events, 0};
        const int n = ::poll(&waiting, 1, static_cast<int>(left_ms));
        if (n > 0) return;  // also on an error, which the next call reports
        if (n < 0 && errno != EINTR) throw connection_lost(reason_of(errno));
        if (n == 0 || clock::now() >= deadline) {
            throw connection_lost(std::string(what) + " within " + to_seconds(wait));
        }
    }
}

}  // namespace kqview
