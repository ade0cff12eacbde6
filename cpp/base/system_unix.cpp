#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/system.h"

namespace kqview {

// ---- files and memory

namespace {

struct descriptor {
    int number;
    ~descriptor() {
        if (number >= 0) ::close(number);
    }
};

}  // namespace

std::span<const std::byte> map_file(const std::string& path) {
    // Without O_NONBLOCK, opening a pipe would wait for its writer.
    const descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    struct stat facts {};
    if (file.number < 0 || ::fstat(file.number, &facts) != 0) {
        throw std::runtime_error(std::strerror(errno));
    }
    if (S_ISDIR(facts.st_mode)) throw std::runtime_error("is a directory");
    if (!S_ISREG(facts.st_mode)) throw std::runtime_error("is not a regular file");
    if (facts.st_size == 0) throw std::runtime_error("the file is empty");
    const auto size = static_cast<std::size_t>(facts.st_size);
    void* const start = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
    if (start == MAP_FAILED) {
        throw std::runtime_error(text_of("cannot be mapped: ", std::strerror(errno)));
    }
    return {static_cast<const std::byte*>(start), size};
}

void unmap_file(std::span<const std::byte> bytes) noexcept {
    ::munmap(const_cast<std::byte*>(bytes.data()), bytes.size());
}

namespace {

// The whole pages of this size inside a range, so that no other memory is meant.
struct whole_pages {
    std::byte* begin;
    std::byte* end;

    whole_pages(std::byte* base, std::size_t n_bytes, std::uintptr_t page)
        : begin(base + (page - reinterpret_cast<std::uintptr_t>(base) % page) % page),
          end(base + n_bytes - (reinterpret_cast<std::uintptr_t>(base) + n_bytes) % page) {}

    // False: the system refused, or there is none.
    bool advise(int advice) const {
        return begin < end && ::madvise(begin, static_cast<std::size_t>(end - begin), advice) == 0;
    }
};

}  // namespace

void ask_for_huge_pages([[maybe_unused]] std::byte* base,
                        [[maybe_unused]] std::size_t n_bytes) noexcept {
#ifdef MADV_HUGEPAGE
    whole_pages(base, n_bytes, 2u << 20).advise(MADV_HUGEPAGE);
#endif
}

bool try_empty([[maybe_unused]] std::byte* base, [[maybe_unused]] std::size_t n_bytes) noexcept {
#if defined(__linux__)  // elsewhere such pages may keep what they had
    const whole_pages pages(base, n_bytes, static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE)));
    if (!pages.advise(MADV_DONTNEED)) return false;
    std::memset(base, 0, static_cast<std::size_t>(pages.begin - base));
    std::memset(pages.end, 0, static_cast<std::size_t>(base + n_bytes - pages.end));
    return true;
#else
    return false;
#endif
}

void* open_library(const char* name, std::string* reason) {
    void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library && reason) *reason = ::dlerror();
    return library;
}

void* find_symbol(void* library, const char* name) noexcept {
    return library ? ::dlsym(library, name) : nullptr;
}

// ---- threads

unsigned n_cpus() noexcept {
#if defined(__linux__)
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
        return static_cast<unsigned>(std::max(1, CPU_COUNT(&allowed)));
    }
#endif
    return std::max(1U, std::thread::hardware_concurrency());
}

namespace {

struct exit_calls {
    std::vector<std::pair<void (*)(void*), void*>> of;
    ~exit_calls() {
        for (; !of.empty(); of.pop_back()) of.back().first(of.back().second);
    }
};

}  // namespace

void at_thread_exit(void (*end)(void* data), void* data) {
    static thread_local exit_calls mine;
    mine.of.emplace_back(end, data);
}

void name_this_thread([[maybe_unused]] const char* name) noexcept {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), name);
#endif
}

void enlarge_stacks() noexcept {
#if defined(__linux__) && !defined(__GLIBC__)
    constexpr std::size_t n_bytes = 8 << 20;
    std::size_t n_bytes_now = 0;
    pthread_attr_t attributes;
    if (pthread_getattr_default_np(&attributes) == 0 &&
        pthread_attr_getstacksize(&attributes, &n_bytes_now) == 0 && n_bytes_now < n_bytes &&
        pthread_attr_setstacksize(&attributes, n_bytes) == 0) {
        pthread_setattr_default_np(&attributes);
    }
#endif
}

// Not std::atomic::wait on Linux: that of libstdc++ yields its CPU first. Among busy processes a
// thread that yields waits for all of them, while one that slept goes first.
void sleep_while(std::atomic<std::uint32_t>& number, std::uint32_t old) noexcept {
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, old, nullptr);
#else
    number.wait(old);
#endif
}

void wake_sleepers(std::atomic<std::uint32_t>& number) noexcept {
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, INT_MAX);
#else
    number.notify_all();
#endif
}

signals_blocked::signals_blocked() noexcept {
    static_assert(sizeof(sigset_t) <= sizeof before_);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, ::new (before_.data()) sigset_t);
}

signals_blocked::~signals_blocked() {
    pthread_sigmask(SIG_SETMASK, reinterpret_cast<const sigset_t*>(before_.data()), nullptr);
}

int n_forks() noexcept {
    static std::atomic<int> n{0};
    [[maybe_unused]] static const int installed =
        pthread_atfork(nullptr, nullptr, [] { n.fetch_add(1, std::memory_order_relaxed); });
    return n.load(std::memory_order_relaxed);
}

// ---- waiting in the kernel

kernel_flag::kernel_flag() : ends_{-1, -1} {
#if defined(__linux__)
    ends_[0] = ends_[1] = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
#else
    int ends[2];
    if (::pipe(ends) == 0) {
        for (const int end : ends) {
            ::fcntl(end, F_SETFD, FD_CLOEXEC);
            ::fcntl(end, F_SETFL, O_NONBLOCK);
        }
        ends_[0] = ends[0];
        ends_[1] = ends[1];
    }
#endif
    if (ends_[0] < 0) {
        throw error(errc::internal, "wake_handle: no file descriptor: ", std::strerror(errno),
                    "; raise the limit of open files");
    }
}

kernel_flag::~kernel_flag() {
    ::close(static_cast<int>(ends_[0]));
    if (ends_[1] != ends_[0]) ::close(static_cast<int>(ends_[1]));
}

int kernel_flag::fd() const noexcept { return static_cast<int>(ends_[0]); }

void kernel_flag::set() noexcept {
    const std::uint64_t one = 1;
    // Cannot fail: the counter is at most one, and the pipe holds at most one write.
    [[maybe_unused]] const auto written = ::write(static_cast<int>(ends_[1]), &one, sizeof one);
}

void kernel_flag::clear() noexcept {
    std::uint64_t count;
    [[maybe_unused]] const auto n_read = ::read(fd(), &count, sizeof count);
}

wait_end kernel_flag::wait(int timeout_ms) const noexcept {
    pollfd waiting{fd(), POLLIN, 0};
    const int n = ::poll(&waiting, 1, timeout_ms);
    if (n < 0 && errno == EINTR) return wait_end::interrupted;
    return n == 0 ? wait_end::timeout : wait_end::is_set;
}

}  // namespace kqview
