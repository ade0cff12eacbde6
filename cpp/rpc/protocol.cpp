#include "rpc/protocol.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>

#include "base/error.h"

namespace kqview {

namespace {

// What there is of a number at this place: a shorter answer has a shorter number.
template <typename T>
T read_at(std::span<const std::byte> bytes, std::size_t offset) {
    T value{};
    const auto part = bytes.subspan(std::min(offset, bytes.size()));
    std::ranges::copy(part.first(std::min(part.size(), sizeof value)),
                      std::as_writable_bytes(std::span(&value, 1)).begin());
    return value;
}

void write_at(std::span<std::byte> bytes, std::size_t offset, std::uint64_t value) {
    const auto part = bytes.subspan(std::min(offset, bytes.size()));
    std::ranges::copy(
        std::as_bytes(std::span(&value, 1)).first(std::min(part.size(), sizeof value)),
        part.begin());
}

constexpr auto any_number = std::numeric_limits<std::uint64_t>::max();
// Of stand-in answers: any non-zero address that is aligned for every device.
constexpr std::uint64_t stand_in_address = 1 << 20;
constexpr std::uint64_t stand_in_memory_bytes = std::uint64_t{1} << 30;

// What answers a command: its length, and the limits of the number at its start. The limits are
// far above any device, so that sums of such sizes do not overflow.
struct answer_rule {
    rpc_command command;
    std::uint64_t n_bytes;
    std::uint64_t stand_in;  // the number in place of a lost server's
    std::uint64_t least = 0, most = any_number;
    const char* what = "";  // the number is
};
constexpr answer_rule answer_rules[] = {
    {rpc_command::hello, rpc_hello_answer_bytes, rpc_major_version | rpc_minor_version << 8},
    {rpc_command::device_count, 4, 0, 1, 64, "the number of its devices"},
    {rpc_command::get_alignment, 8, 256, 1, 1 << 20, "alignment"},
    {rpc_command::get_max_size, 8, any_number, 1, any_number, "its largest buffer"},
    {rpc_command::get_alloc_size, 8, 0, 0, std::uint64_t{1} << 46, "the size of a tensor"},
    {rpc_command::buffer_get_base, 8, stand_in_address, 1, any_number, "the address of a buffer"},
    {rpc_command::alloc_buffer, 16, stand_in_address},            // address (or 0), size
    {rpc_command::get_device_memory, 16, stand_in_memory_bytes},  // free, total
    {rpc_command::get_tensor, 0, 0},                              // the request says how many
    {rpc_command::set_tensor_hash, 1, 1},  // does the server have these bytes?
    {rpc_command::copy_tensor, 1, 0},
};

const answer_rule* rule_of(rpc_command command) {
    const auto* const rule = std::ranges::find(answer_rules, command, &answer_rule::command);
    return rule == std::end(answer_rules) ? nullptr : rule;
}

std::string nonsense(const char* what, std::uint64_t value) {
    return text_of("answered nonsense: ", value, " as ", what);
}

}  // namespace

rpc_request read_rpc_request(rpc_command command, std::span<const std::byte> payload) {
    rpc_request request{command, read_at<std::uint32_t>(payload, 0),
                        read_at<std::uint64_t>(payload, 4), std::nullopt};
    if (const auto* const rule = rule_of(command)) request.answer_bytes = rule->n_bytes;
    if (command == rpc_command::get_tensor) {  // tensor, offset, size
        const auto size_at = std::max<std::size_t>(payload.size(), 8) - 8;
        request.answer_bytes = read_at<std::uint64_t>(payload, size_at);
    }
    return request;
}

std::string rpc_answer_fault(const rpc_request& request, std::span<const std::byte> answer) {
    const auto* const rule = rule_of(request.command);
    if (!rule) return {};
    if (request.command == rpc_command::hello) {
        const auto major = read_at<std::uint8_t>(answer, 0);
        const auto minor = read_at<std::uint8_t>(answer, 1);
        if (major == rpc_major_version && minor <= rpc_minor_version) return {};
        return text_of("speaks version ", major, ".", minor, " of the RPC protocol, version ",
                       rpc_major_version, ".", rpc_minor_version, " is needed");
    }
    const auto n = read_at<std::uint64_t>(answer, 0);
    if (n < rule->least || n > rule->most ||
        (request.command == rpc_command::get_alignment && !std::has_single_bit(n))) {
        return nonsense(rule->what, n);
    }
    // A null address is a valid answer too: the server is out of memory.
    const auto n_allocated = read_at<std::uint64_t>(answer, 8);
    if (request.command == rpc_command::alloc_buffer && n != 0 && n_allocated < request.n_bytes) {
        return nonsense("the size of a buffer", n_allocated);
    }
    return {};
}

void write_stand_in(const rpc_request& request, std::span<std::byte> answer) {
    std::ranges::fill(answer, std::byte{0});
    const auto* const rule = rule_of(request.command);
    if (!rule) return;
    write_at(answer, 0, rule->stand_in);
    if (request.command == rpc_command::alloc_buffer) write_at(answer, 8, request.n_bytes);
    if (request.command == rpc_command::get_device_memory) {
        write_at(answer, 8, stand_in_memory_bytes);
    }
}

}  // namespace kqview
