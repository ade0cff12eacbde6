// rpc_link and rpc_session: what llama.cpp's RPC client gets while a server is there, and once it
// is not.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "rpc/link.h"
#include "rpc/servers.h"

using namespace kqview;
using namespace std::chrono_literals;

namespace {

using bytes = std::vector<std::byte>;

template <typename... T>
bytes pack(const T&... values) {
    bytes all;
    const auto add = [&](const auto& value) {
        const auto* const from = reinterpret_cast<const std::byte*>(&value);
        all.insert(all.end(), from, from + sizeof value);
    };
    (add(values), ...);
    return all;
}

struct message {
    rpc_command command{};
    bytes payload;
};

// The server's end of one connection; greets, then talks as the test says, on a thread of its own.
class fake_server {
public:
    using talk = std::function<void(fake_server&)>;

    explicit fake_server(talk say) : listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof address;
        auto* const generic = reinterpret_cast<sockaddr*>(&address);
        REQUIRE(::bind(listener_, generic, size) == 0);
        REQUIRE(::listen(listener_, 4) == 0);
        REQUIRE(::getsockname(listener_, generic, &size) == 0);
        port_ = ntohs(address.sin_port);
        thread_ = std::thread([this, say = std::move(say)] {
            connection_ = ::accept(listener_, nullptr, nullptr);
            if (connection_ < 0 || !read()) return;
            std::array<std::byte, rpc_hello_answer_bytes> hello{std::byte{rpc_major_version}};
            answer({hello.begin(), hello.end()});
            say(*this);
            ::shutdown(connection_, SHUT_RDWR);
        });
    }
    ~fake_server() {
        ::shutdown(listener_, SHUT_RDWR);
        thread_.join();
        ::close(connection_);
        ::close(listener_);
    }

    int port() const { return port_; }

    std::optional<message> read() {
        message got;
        std::uint64_t size = 0;
        if (!take(&got.command, 1) || !take(&size, sizeof size)) return {};
        got.payload.resize(size);
        if (!take(got.payload.data(), size)) return {};
        return got;
    }
    void answer(const bytes& payload) {
        auto all = pack(std::uint64_t{payload.size()});
        all.insert(all.end(), payload.begin(), payload.end());
        send(all);
    }
    void send(const bytes& data) {
        (void)::send(connection_, data.data(), data.size(), MSG_NOSIGNAL);
    }

private:
    bool take(void* out, std::size_t size) {
        return size == 0 ||
               ::recv(connection_, out, size, MSG_WAITALL) == static_cast<ssize_t>(size);
    }

    int listener_;
    int connection_ = -1;
    int port_ = 0;
    std::thread thread_;
};

std::shared_ptr<rpc_link> link_to(const fake_server& server, std::chrono::milliseconds wait = 5s) {
    return std::make_shared<rpc_link>("here", "127.0.0.1", server.port(), wait);
}

// As llama.cpp's client does it.
void ask(rpc_session& session, rpc_command command, const bytes& payload) {
    session.send(pack(command));
    session.send(pack(std::uint64_t{payload.size()}));
    session.send(payload);
}

bytes ask(rpc_session& session, rpc_command command, const bytes& payload, std::size_t n_answer) {
    ask(session, command, payload);
    std::uint64_t size = 0;
    session.receive(std::as_writable_bytes(std::span(&size, 1)));
    CHECK(size == n_answer);
    bytes answer(n_answer, std::byte{0xee});
    session.receive(answer);
    return answer;
}

const bytes no_payload;
const bytes device_0 = pack(std::uint32_t{0});

}  // namespace

TEST_CASE("rpc_link: requests and answers pass unchanged") {
    std::vector<message> seen;
    {
        fake_server server([&](fake_server& self) {
            for (int i = 0; i < 2; ++i) seen.push_back(*self.read());
            self.answer(pack(std::uint64_t{64}));
        });
        rpc_session session(link_to(server));
        ask(session, rpc_command::set_tensor, bytes(100'000, std::byte{7}));
        CHECK(ask(session, rpc_command::get_alignment, device_0, 8) == pack(std::uint64_t{64}));
    }
    REQUIRE(seen.size() == 2);
    CHECK(seen[0].command == rpc_command::set_tensor);
    CHECK(seen[0].payload == bytes(100'000, std::byte{7}));
    CHECK(seen[1].payload == device_0);
}

TEST_CASE("rpc_link: a session's own greeting is answered without the server") {
    std::atomic<int> n_seen{0};
    fake_server server([&](fake_server& self) {
        while (self.read()) ++n_seen;
    });
    const auto link = link_to(server);
    rpc_session session(link);
    const auto answer =
        ask(session, rpc_command::hello, bytes(rpc_hello_bytes), rpc_hello_answer_bytes);
    CHECK(answer[0] == std::byte{rpc_major_version});
    CHECK_FALSE(link->is_lost());
    CHECK(n_seen == 0);
    link->hang_up();
}

TEST_CASE("rpc_link: a server that leaves is replaced by answers that stop nothing") {
    fake_server server([](fake_server& self) { (void)self.read(); });
    const auto link = link_to(server);
    rpc_session session(link);
    CHECK(ask(session, rpc_command::device_count, no_payload, 4) == pack(std::uint32_t{0}));
    CHECK(link->is_lost());
    CHECK(link->loss() == "closed the connection");

    ask(session, rpc_command::set_tensor, bytes(1'000'000));
    ask(session, rpc_command::graph_compute, device_0);
    ask(session, rpc_command::free_buffer, pack(std::uint64_t{1}));
    const auto tensor = pack(std::array<char, 200>{}, std::uint64_t{0}, std::uint64_t{12});
    CHECK(ask(session, rpc_command::get_tensor, tensor, 12) == bytes(12));
    const auto buffer =
        ask(session, rpc_command::alloc_buffer, pack(std::uint32_t{0}, std::uint64_t{12345}), 16);
    CHECK(bytes(buffer.begin(), buffer.begin() + 8) != bytes(8));
    CHECK(bytes(buffer.begin() + 8, buffer.end()) == pack(std::uint64_t{12345}));
    CHECK(ask(session, rpc_command::buffer_get_base, pack(std::uint64_t{1}), 8) != bytes(8));
    CHECK(ask(session, rpc_command::get_alignment, device_0, 8) == pack(std::uint64_t{256}));
    CHECK(ask(session, rpc_command::get_device_memory, device_0, 16) != bytes(16));
    CHECK(ask(session, rpc_command::set_tensor_hash, bytes(300), 1) == pack(std::uint8_t{1}));
    CHECK(ask(session, rpc_command::copy_tensor, bytes(600), 1) == pack(std::uint8_t{0}));
}

TEST_CASE("rpc_link: answer cut short is made up as a whole") {
    fake_server server([](fake_server& self) {
        (void)self.read();
        self.send(pack(std::uint64_t{12}, std::uint32_t{0xffffffff}));
    });
    const auto link = link_to(server);
    rpc_session session(link);
    const auto tensor = pack(std::array<char, 200>{}, std::uint64_t{0}, std::uint64_t{12});
    CHECK(ask(session, rpc_command::get_tensor, tensor, 12) == bytes(12));
    CHECK(link->is_lost());
}

TEST_CASE("rpc_link: server that is silent is lost after the limit, and a longer one counts") {
    std::atomic<bool> is_over{false};
    fake_server server([&](fake_server& self) {
        (void)self.read();
        while (!is_over) std::this_thread::sleep_for(1ms);
    });
    const auto link = link_to(server, 50ms);
    link->raise_limit(200ms);
    link->raise_limit(10ms);
    rpc_session session(link);
    const auto began = std::chrono::steady_clock::now();
    ask(session, rpc_command::device_count, no_payload, 4);
    CHECK(std::chrono::steady_clock::now() - began >= 190ms);
    CHECK(link->loss() == "did not answer within 0.2 s");
    is_over = true;
}

TEST_CASE("rpc_link: hanging up ends a wait on another thread") {
    fake_server server([](fake_server& self) {
        while (self.read()) {
        }
    });
    const auto link = link_to(server, 1h);
    std::thread waiter([&] {
        rpc_session session(link);
        ask(session, rpc_command::device_count, no_payload, 4);
    });
    std::this_thread::sleep_for(50ms);
    link->hang_up();
    waiter.join();
    CHECK(link->loss() == "is not in use any more");
}

TEST_CASE("rpc_link: looking notices that an idle server is gone") {
    std::atomic<bool> is_over{false};
    fake_server server([&](fake_server&) {
        while (!is_over) std::this_thread::sleep_for(1ms);
    });
    const auto link = link_to(server);
    link->look();
    CHECK_FALSE(link->is_lost());
    is_over = true;
    for (int i = 0; i < 5000 && !link->is_lost(); ++i) {
        std::this_thread::sleep_for(1ms);
        link->look();
    }
    CHECK(link->is_lost());
}

TEST_CASE("rpc_link: graph that the server dropped with a buffer is sent again, once") {
    std::vector<message> seen;
    {
        fake_server server([&](fake_server& self) {
            while (auto got = self.read()) seen.push_back(std::move(*got));
        });
        const auto link = link_to(server);
        rpc_session session(link);
        const auto graph_0 = pack(std::uint32_t{0}, std::uint64_t{111});
        const auto graph_1 = pack(std::uint32_t{1}, std::uint64_t{222});
        ask(session, rpc_command::graph_compute, graph_0);
        ask(session, rpc_command::graph_compute, graph_1);
        ask(session, rpc_command::graph_recompute, device_0);
        ask(session, rpc_command::free_buffer, pack(std::uint64_t{9}));
        ask(session, rpc_command::graph_recompute, device_0);
        ask(session, rpc_command::graph_recompute, device_0);
        ask(session, rpc_command::graph_recompute, pack(std::uint32_t{1}));
        link->hang_up();
    }
    REQUIRE(seen.size() == 7);
    using enum rpc_command;
    const std::array expected{graph_compute, graph_compute,   graph_recompute, free_buffer,
                              graph_compute, graph_recompute, graph_compute};
    for (std::size_t i = 0; i < seen.size(); ++i) CHECK(seen[i].command == expected[i]);
    CHECK(seen[4].payload == seen[0].payload);
    CHECK(seen[6].payload == seen[1].payload);
}

TEST_CASE("rpc_link: exchanges of two sessions do not mix") {
    fake_server server([](fake_server& self) {
        while (auto got = self.read()) {
            if (got->command != rpc_command::get_tensor) continue;
            self.answer(bytes(8, got->payload.front()));
        }
    });
    const auto link = link_to(server);
    const auto work = [&](std::byte mark) {
        rpc_session session(link);
        auto tensor = pack(mark, std::uint64_t{0}, std::uint64_t{8});
        for (int i = 0; i < 300; ++i) {
            ask(session, rpc_command::set_tensor, bytes(3, mark));
            CHECK(ask(session, rpc_command::get_tensor, tensor, 8) == bytes(8, mark));
        }
    };
    std::thread first(work, std::byte{1});
    std::thread second(work, std::byte{2});
    first.join();
    second.join();
    CHECK_FALSE(link->is_lost());
    link->hang_up();
}

TEST_CASE("rpc_session: calls in another order than the protocol's lose the server") {
    fake_server server([](fake_server& self) { (void)self.read(); });
    const auto link = link_to(server);
    rpc_session session(link);
    session.send(bytes(5));
    CHECK(link->is_lost());
    bytes out(3, std::byte{1});
    session.receive(out);
    CHECK(out == bytes(3));
    CHECK(ask(session, rpc_command::get_max_size, device_0, 8) != bytes(8));
}

TEST_CASE("rpc_server: joined twice it is one connection, and the last who leaves hangs up") {
    std::atomic<int> n_connections{0};
    fake_server server([&](fake_server& self) {
        ++n_connections;
        while (self.read()) {
        }
    });
    const rpc_endpoint endpoint{"127.0.0.1", server.port()};
    const auto first = join_rpc_server(endpoint, 5s);
    const auto second = join_rpc_server(endpoint, 5s);
    CHECK(first == second);
    const auto colon = first->name().find(':');
    CHECK(find_rpc_link(first->name().substr(0, colon), server.port()).get() == &first->link());
    leave_rpc_server(*first);
    CHECK_FALSE(first->link().is_lost());
    leave_rpc_server(*second);
    CHECK(first->link().is_lost());
    // The server's thread may still be about to take the connection that has been closed.
    for (int i = 0; i < 500 && n_connections == 0; ++i) std::this_thread::sleep_for(10ms);
    CHECK(n_connections == 1);
    CHECK(find_rpc_link("nobody", 1)->loss() == "is not connected");
}

TEST_CASE("rpc_server: a port without a listener raises model_load with the endpoint") {
    int port = 0;
    {
        fake_server gone([](fake_server&) {});
        port = gone.port();
        (void)link_to(gone);
    }
    const rpc_endpoint endpoint{"127.0.0.1", port};
    try {
        (void)join_rpc_server(endpoint, 5s);
        FAIL("nothing was raised");
    } catch (const error& failure) {
        CHECK(failure.code() == errc::model_load);
        CHECK(std::string(failure.what()).find(endpoint.text()) != std::string::npos);
    }
}
