// What differs between operating systems, as few plain functions: system_unix.cpp or
// system_windows.cpp, which CMake chooses by the ends of their names. What a system lacks is absent
// by rule: advice about memory is refused, no process was ever forked. A caller who asks for
// RPC servers or llguidance on Windows gets an error (rpc/tcp_connection_windows.cpp and
// sample/constraint_host_windows.cpp).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kqview {

// ---- files and memory

// The bytes of a file, at least one, mapped read-only: pages that are not accessed are not read.
// `path` is UTF-8. Raises std::runtime_error with the reason alone.
std::span<const std::byte> map_file(const std::string& path);
void unmap_file(std::span<const std::byte> bytes) noexcept;

void ask_for_huge_pages(std::byte* base, std::size_t n_bytes) noexcept;

// Makes the range read as zeros without taking memory for it; false, without effect, if the system
// cannot. The memory must be private and of no file, as malloc's is.
bool try_empty(std::byte* base, std::size_t n_bytes) noexcept;

// A library that stays open, since unloading is not safe; null if it cannot be loaded, with the
// reason if wanted. And a function or variable of it; null if it has none.
void* open_library(const char* name, std::string* reason = nullptr);
void* find_symbol(void* library, const char* name) noexcept;

// ---- threads

// CPUs that the calling thread may run on, at least 1.
unsigned n_cpus() noexcept;

// Calls `end` with `data` when the calling thread ends, what came last first. Raises
// std::bad_alloc. See per_thread.h.
void at_thread_exit(void (*end)(void* data), void* data);

// For debuggers, at most 15 characters; no effect where threads have no names.
void name_this_thread(const char* name) noexcept;

// Stacks of 8 MiB, glibc's size, for all threads of the process that start from now on and ask for
// no other. musl gives them 128 KiB, which llama.cpp's threads may overrun; no effect elsewhere.
void enlarge_stacks() noexcept;

// Sleeps while `number` is `old`; may return early.
void sleep_while(std::atomic<std::uint32_t>& number, std::uint32_t old) noexcept;
void wake_sleepers(std::atomic<std::uint32_t>& number) noexcept;

// Blocks every signal on this thread, and on those that start meanwhile, for its lifetime. Signals
// belong to Python's main thread: one that another thread gets would not interrupt the wait that it
// is meant for.
class signals_blocked {
public:
    signals_blocked() noexcept;
    ~signals_blocked();
    signals_blocked(const signals_blocked&) = delete;
    signals_blocked& operator=(const signals_blocked&) = delete;

private:
    alignas(std::uint64_t) std::array<std::byte, 128> before_;  // a sigset_t
};

// How many forks lie between the first process that asked and this one.
int n_forks() noexcept;

// ---- waiting in the kernel

enum class wait_end { is_set, timeout, interrupted };

// A flag that a thread, or an event loop, waits for in the kernel and so notices signals, through
// which a condition variable would sleep. Threads: any.
class kernel_flag {
public:
    // An eventfd on Linux, else a pipe; on Windows an event. Raises internal when they ran out.
    kernel_flag();
    ~kernel_flag();
    kernel_flag(const kernel_flag&) = delete;
    kernel_flag& operator=(const kernel_flag&) = delete;

    // Readable while it is set; -1 on Windows.
    int fd() const noexcept;
    void set() noexcept;  // once before each clear()
    void clear() noexcept;
    // Blocks until it is set, or for `timeout_ms` unless that is -1. interrupted: a signal handler
    // ran or, on Windows, may want to: handle that and wait again.
    wait_end wait(int timeout_ms) const noexcept;

private:
    std::intptr_t ends_[2];  // of a pipe; or both the same
};

}  // namespace kqview
