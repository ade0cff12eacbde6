#include "rpc/protocol.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace kqview {

namespace {

// Plausibility limits, far above any device: sums of such sizes do not overflow.
constexpr std::uint64_t alignment_max = 1 << 20;
constexpr std::uint64_t alloc_bytes_max = std::uint64_t{1} << 46;
constexpr std::uint32_t n_devices_max = 64;

// For stand-in answers: any non-zero address that is aligned for every device.
constexpr std::uint64_t stand_in_address = 1 << 20;
constexpr std::uint64_t stand_in_alignment = 256;
constexpr std::uint64_t stand_in_memory_bytes = std::uint64_t{1} << 30;

template <typename T>
T read_at(std::span<const std::byte> bytes, std::size_t offset) {
    T value{};
    if (offset + sizeof value <= bytes.size()) {
        std::memcpy(&value, bytes.data() + offset, sizeof value);
    }
    return value;
}

template <typename T>
void write_at(std::span<std::byte> bytes, std::size_t offset, T value) {
    if (offset + sizeof value <= bytes.size()) {
        std::memcpy(bytes.data() + offset, &value, sizeof value);
    }
}

std::optional<std::uint64_t> answer_bytes_of(rpc_command command,
                                             std::span<const std::byte> payload) {
    switch (command) {
        case rpc_command::alloc_buffer:                  // address, size
        case rpc_command::get_device_memory: return 16;  // free, total
        case rpc_command::get_alignment:
        case rpc_command::get_max_size:
        case rpc_command::buffer_get_base:
        case rpc_command::get_alloc_size: return 8;
        case rpc_command::set_tensor_hash:  // does the server have these bytes?
        case rpc_command::copy_tensor: return 1;
        case rpc_command::device_count: return 4;
        case rpc_command::hello: return rpc_hello_answer_bytes;
        case rpc_command::get_tensor:  // tensor, offset, size
            return read_at<std::uint64_t>(payload, std::max<std::size_t>(payload.size(), 8) - 8);
        default: return std::nullopt;
    }
}

std::string nonsense(const char* what, std::uint64_t value) {
    return "answered nonsense: " + std::to_string(value) + " as " + what;
}

}  // namespace

rpc_request read_rpc_request(rpc_command command, std::span<const std::byte> payload) {
    return {command, read_at<std::uint32_t>(payload, 0), read_at<std::uint64_t>(payload, 4),
            answer_bytes_of(command, payload)};
}

std::string rpc_answer_fault(const rpc_request& request, std::span<const std::byte> answer) {
    switch (request.command) {
        case rpc_command::hello: {
            const auto major = read_at<std::uint8_t>(answer, 0);
            const auto minor = read_at<std::uint8_t>(answer, 1);
            if (major == rpc_major_version && minor <= rpc_minor_version) return {};
            return "speaks version " + std::to_string(major) + "." + std::to_string(minor) +
                   " of the RPC protocol, version " + std::to_string(rpc_major_version) + "." +
                   std::to_string(rpc_minor_version) + " is needed";
        }
        case rpc_command::device_count: {
            const auto n = read_at<std::uint32_t>(answer, 0);
            return n >= 1 && n <= n_devices_max ? "" : nonsense("the number of its devices", n);
        }
        case rpc_command::get_alignment: {
            const auto n = read_at<std::uint64_t>(answer, 0);
            return std::has_single_bit(n) && n <= alignment_max ? "" : nonsense("alignment", n);
        }
        case rpc_command::get_max_size: {
            const auto n = read_at<std::uint64_t>(answer, 0);
            return n > 0 ? "" : nonsense("its largest buffer", n);
        }
        case rpc_command::get_alloc_size: {
            const auto n = read_at<std::uint64_t>(answer, 0);
            return n <= alloc_bytes_max ? "" : nonsense("the size of a tensor", n);
        }
        case rpc_command::buffer_get_base: {
            const auto n = read_at<std::uint64_t>(answer, 0);
            return n != 0 ? "" : nonsense("the address of a buffer", n);
        }
        case rpc_command::alloc_buffer: {
            // A null address is a valid answer too: the server is out of memory.
            const auto n = read_at<std::uint64_t>(answer, 8);
            const bool is_sound = read_at<std::uint64_t>(answer, 0) == 0 || n >= request.n_bytes;
            return is_sound ? "" : nonsense("the size of a buffer", n);
        }
        default: return {};
    }
}

void write_stand_in(const rpc_request& request, std::span<std::byte> answer) {
    std::fill(answer.begin(), answer.end(), std::byte{0});
    switch (request.command) {
        case rpc_command::hello:
            write_at(answer, 0, static_cast<std::uint8_t>(rpc_major_version));
            write_at(answer, 1, static_cast<std::uint8_t>(rpc_minor_version));
            break;
        case rpc_command::alloc_buffer:
            write_at(answer, 0, stand_in_address);
            write_at(answer, 8, request.n_bytes);
            break;
        case rpc_command::get_alignment: write_at(answer, 0, stand_in_alignment); break;
        case rpc_command::get_max_size:
            write_at(answer, 0, std::numeric_limits<std::uint64_t>::max());
            break;
        case rpc_command::buffer_get_base: write_at(answer, 0, stand_in_address); break;
        case rpc_command::get_device_memory:
            write_at(answer, 0, stand_in_memory_bytes);
            write_at(answer, 8, stand_in_memory_bytes);
            break;
        case rpc_command::set_tensor_hash: write_at(answer, 0, std::uint8_t{1}); break;
        default: break;
    }
}

}  // namespace kqview
