#include <utility>

#include "base/error.h"
#include "sample/constraint_host.h"

namespace kqview {

constraint_host::constraint_host(std::vector<std::string>, std::shared_ptr<const model>)
    : n_vocab_(0) {
    throw error(errc::request,
                "json_schema, regex and %llguidance need helper processes that fork, which Windows "
                "has not; use a grammar in GBNF");
}

// There is none: nothing below is ever called.
constraint_host::~constraint_host() = default;
constraint_host::child constraint_host::open() { return {0, process_socket()}; }
constraint_host::cause constraint_host::end(std::uint32_t) { return cause::other; }
void constraint_host::drop(std::uint32_t) noexcept {}

process_socket::~process_socket() = default;
process_socket& process_socket::operator=(process_socket&&) noexcept { return *this; }
bool process_socket::send(const void*, std::size_t, clock::time_point,
                          const std::function<bool()>&) const {
    return false;
}
bool process_socket::receive(void*, std::size_t, clock::time_point,
                             const std::function<bool()>&) const {
    return false;
}

}  // namespace kqview
