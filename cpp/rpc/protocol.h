// The part of ggml's RPC protocol (ggml/src/ggml-rpc of llama.cpp) that kqview depends on. Pure
// functions: no sockets, no state.
//
// A request is a command (1 byte), the size of its payload (8 bytes) and the payload. Some requests
// are answered with a size (8 bytes) and that many bytes; numbers are in the machine's byte order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace kqview {

// llama.cpp's client accepts servers of this major version and at most this minor version.
inline constexpr int rpc_major_version = 7;
inline constexpr int rpc_minor_version = 0;

enum class rpc_command : std::uint8_t {
    alloc_buffer,
    get_alignment,
    get_max_size,
    buffer_get_base,
    free_buffer,
    buffer_clear,
    set_tensor,
    set_tensor_hash,
    get_tensor,
    copy_tensor,
    graph_compute,
    get_device_memory,
    init_tensor,
    get_alloc_size,
    hello,
    device_count,
    graph_recompute,
    memset_tensor,
};

inline constexpr std::size_t rpc_hello_bytes = 24;         // capabilities of the transport: none
inline constexpr std::size_t rpc_hello_answer_bytes = 28;  // version, padding, capabilities

// The fields of a request that determine its answer.
struct rpc_request {
    rpc_command command{};
    std::uint32_t device = 0;   // of alloc_buffer, graph_compute and graph_recompute
    std::uint64_t n_bytes = 0;  // of alloc_buffer: requested size
    std::optional<std::uint64_t> answer_bytes;  // none: the request is not answered
};

rpc_request read_rpc_request(rpc_command command, std::span<const std::byte> payload);

// What is wrong with an answer, phrased to follow "RPC server host:port "; empty if llama.cpp can
// use it. Some invalid answers would make llama.cpp abort the process.
std::string rpc_answer_fault(const rpc_request& request, std::span<const std::byte> answer);

// Writes an answer in place of a lost server: values are 0, memory exists, nothing stops llama.cpp.
// Code that reads results asks the link before it uses them.
void write_stand_in(const rpc_request& request, std::span<std::byte> answer);

}  // namespace kqview
