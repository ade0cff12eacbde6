#include "rpc/link.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace kqview {

rpc_link::rpc_link(std::string endpoint, const std::string& host, int port,
                   tcp_connection::limit wait)
    : endpoint_(std::move(endpoint)),
      connection_(std::make_unique<tcp_connection>(host, port, wait)) {
    greet();
}

rpc_link::rpc_link(std::string endpoint, const std::string& why)
    : endpoint_(std::move(endpoint)), is_lost_(true), loss_(why) {}

// This must be the first request of a session.
void rpc_link::greet() {
    const std::array<std::byte, rpc_hello_bytes> no_capabilities{};
    const auto request = read_rpc_request(rpc_command::hello, no_capabilities);
    std::array<std::byte, rpc_hello_answer_bytes> answer{};
    std::uint64_t n_bytes = 0;
    try {
        write(rpc_command::hello, no_capabilities);
        connection_->receive(std::as_writable_bytes(std::span(&n_bytes, 1)));
    } catch (const connection_lost& failure) {
        throw connection_lost(std::string("accepts connections, but ") + failure.what() +
                              " when it was greeted: it serves another client (llama.cpp's server "
                              "takes one at a time), or is not an RPC server of this version");
    }
    if (n_bytes != answer.size()) {
        throw connection_lost("does not speak ggml's RPC protocol");
    }
    connection_->receive(answer);
    if (const auto fault = rpc_answer_fault(request, answer); !fault.empty()) {
        throw connection_lost(fault);
    }
}

std::string rpc_link::loss() const {
    const std::lock_guard lock(loss_mutex_);
    return loss_;
}

void rpc_link::lose(const std::string& why) noexcept {
    {
        const std::lock_guard lock(loss_mutex_);
        if (is_lost()) return;
        loss_ = why;
        is_lost_.store(true, std::memory_order_release);
    }
    log_ring::instance().write(log_level::info,
                               text_of("RPC server ", endpoint_, " ", why, "\n").c_str());
    connection_->shut_down();
}

void rpc_link::look() noexcept {
    if (is_lost()) return;
    const std::unique_lock exchange(exchange_mutex_, std::try_to_lock);
    // Between exchanges, a server sends nothing.
    if (exchange.owns_lock() && !connection_->is_quiet()) lose("closed the connection");
}

void rpc_link::raise_limit(tcp_connection::limit wait) noexcept {
    if (connection_ && wait > connection_->wait_limit()) connection_->set_limit(wait);
}

void rpc_link::write(rpc_command command, std::span<const std::byte> payload) {
    std::array<std::byte, 9> head{static_cast<std::byte>(command)};
    const std::uint64_t n_bytes = payload.size();
    std::memcpy(head.data() + 1, &n_bytes, sizeof n_bytes);
    connection_->send(head, payload);
}

// llama.cpp sends a greeting for each of its sockets; the server expects only one.
bool rpc_link::is_answered(const rpc_request& request) const noexcept {
    return !is_lost() && request.command != rpc_command::hello;
}

void rpc_link::request(const rpc_request& request, std::span<const std::byte> payload) noexcept {
    if (!is_answered(request)) return;
    try {
        if (request.command == rpc_command::graph_compute) {
            graphs_[request.device] = {{payload.begin(), payload.end()}, false};
        } else if (request.command == rpc_command::free_buffer) {
            for (auto& [device, graph] : graphs_) graph.is_dropped = true;
        } else if (request.command == rpc_command::graph_recompute) {
            const auto kept = graphs_.find(request.device);
            if (kept != graphs_.end() && kept->second.is_dropped) {
                kept->second.is_dropped = false;
                return write(rpc_command::graph_compute, kept->second.payload);
            }
        }
        write(request.command, payload);
    } catch (const std::exception& failure) {
        lose(failure.what());
    }
}

void rpc_link::receive_size(const rpc_request& request) noexcept {
    if (!is_answered(request)) return;
    try {
        std::uint64_t n_bytes = 0;
        connection_->receive(std::as_writable_bytes(std::span(&n_bytes, 1)));
        if (n_bytes == request.answer_bytes) return;
        lose(text_of("answered nonsense: ", n_bytes, " bytes where ", *request.answer_bytes,
                     " are due"));
    } catch (const std::exception& failure) {
        lose(failure.what());
    }
}

void rpc_link::receive_answer(const rpc_request& request, std::span<std::byte> out) noexcept {
    if (is_answered(request)) {
        try {
            connection_->receive(out);
            const auto fault = rpc_answer_fault(request, out);
            if (fault.empty()) return;
            lose(fault);
        } catch (const std::exception& failure) {
            lose(failure.what());
        }
    }
    write_stand_in(request, out);
}

// ---- llama.cpp's end

void rpc_session::send(std::span<const std::byte> data) noexcept {
    if (next_ == phase::command && data.size() == sizeof command_) {
        exchange_ = std::unique_lock(link_->exchange_mutex_);
        std::memcpy(&command_, data.data(), sizeof command_);
        next_ = phase::size;
    } else if (next_ == phase::size && data.size() == sizeof payload_bytes_) {
        std::memcpy(&payload_bytes_, data.data(), sizeof payload_bytes_);
        next_ = phase::payload;
    } else if (next_ == phase::payload && data.size() == payload_bytes_) {
        send_payload(data);
    } else {
        lose_track();
    }
}

void rpc_session::send_payload(std::span<const std::byte> payload) noexcept {
    request_ = read_rpc_request(command_, payload);
    link_->request(request_, payload);
    if (request_.answer_bytes) {
        next_ = phase::answer_size;
    } else {
        end_exchange();
    }
}

void rpc_session::receive(std::span<std::byte> out) noexcept {
    if (next_ == phase::answer_size && out.size() == sizeof *request_.answer_bytes) {
        link_->receive_size(request_);
        std::memcpy(out.data(), &*request_.answer_bytes, out.size());
        next_ = phase::answer;
    } else if (next_ == phase::answer && out.size() == *request_.answer_bytes) {
        link_->receive_answer(request_, out);
        end_exchange();
    } else {
        lose_track();
        std::fill(out.begin(), out.end(), std::byte{0});
    }
}

void rpc_session::end_exchange() noexcept {
    next_ = phase::command;
    if (exchange_.owns_lock()) exchange_.unlock();
}

void rpc_session::lose_track() noexcept {
    link_->lose("was sent something by llama.cpp that this version of kqview does not know");
    end_exchange();
}

}  // namespace kqview
