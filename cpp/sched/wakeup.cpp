#include "sched/wakeup.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#if defined(__linux__)
#include <sys/eventfd.h>
#endif

#include "base/error.h"

namespace kqview {

wake_handle::wake_handle() {
#if defined(__linux__)
    read_fd_ = write_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
#else
    int ends[2];
    if (::pipe(ends) == 0) {
        for (const int end : ends) {
            ::fcntl(end, F_SETFD, FD_CLOEXEC);
            ::fcntl(end, F_SETFL, O_NONBLOCK);
        }
        read_fd_ = ends[0];
        write_fd_ = ends[1];
    }
#endif
    if (read_fd_ < 0) {
        throw error(errc::internal, "wake_handle: no file descriptor: ", std::strerror(errno),
                    "; raise the limit of open files");
    }
}

wake_handle::~wake_handle() {
    ::close(read_fd_);
    if (write_fd_ != read_fd_) ::close(write_fd_);
}

void wake_handle::signal() noexcept {
    if (is_signalled_.exchange(true, std::memory_order_acq_rel)) return;
    const std::uint64_t one = 1;
    // Cannot fail: the counter is at most one, and the pipe holds at most one write.
    [[maybe_unused]] const auto written = ::write(write_fd_, &one, sizeof one);
}

void wake_handle::drain() noexcept {
    std::uint64_t count;
    [[maybe_unused]] const auto n_read = ::read(read_fd_, &count, sizeof count);
    is_signalled_.store(false, std::memory_order_release);
}

bool wake_handle::wait(int timeout_ms) noexcept {
    pollfd waiting{read_fd_, POLLIN, 0};
    return ::poll(&waiting, 1, timeout_ms) >= 0 || errno != EINTR;
}

}  // namespace kqview
