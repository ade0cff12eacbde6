#define NOMINMAX 1  // as in libstdc++
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
// After it.
#include <synchapi.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/system.h"

namespace kqview {

// ---- files and memory

namespace {

std::string last_error() {
    return std::system_category().message(static_cast<int>(GetLastError()));
}

std::filesystem::path wide(const char* utf8) {
    return std::filesystem::path(reinterpret_cast<const char8_t*>(utf8));
}

struct handle {
    HANDLE of;
    ~handle() {
        if (of != nullptr && of != INVALID_HANDLE_VALUE) CloseHandle(of);
    }
};

}  // namespace

std::span<const std::byte> map_file(const std::string& path) {
    const auto name = wide(path.c_str());
    const auto attributes = GetFileAttributesW(name.c_str());
    if (attributes != INVALID_FILE_ATTRIBUTES && (attributes & FILE_ATTRIBUTE_DIRECTORY) != 0) {
        throw std::runtime_error("is a directory");
    }
    const handle file{CreateFileW(name.c_str(), GENERIC_READ,
                                  FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr,
                                  OPEN_EXISTING, 0, nullptr)};
    LARGE_INTEGER size{};
    if (file.of == INVALID_HANDLE_VALUE) throw std::runtime_error(last_error());
    if (GetFileType(file.of) != FILE_TYPE_DISK || !GetFileSizeEx(file.of, &size)) {
        throw std::runtime_error("is not a regular file");
    }
    if (size.QuadPart == 0) throw std::runtime_error("the file is empty");
    const handle mapping{CreateFileMappingW(file.of, nullptr, PAGE_READONLY, 0, 0, nullptr)};
    void* const start = mapping.of ? MapViewOfFile(mapping.of, FILE_MAP_READ, 0, 0, 0) : nullptr;
    if (!start) throw std::runtime_error(text_of("cannot be mapped: ", last_error()));
    return {static_cast<const std::byte*>(start), static_cast<std::size_t>(size.QuadPart)};
}

void unmap_file(std::span<const std::byte> bytes) noexcept { UnmapViewOfFile(bytes.data()); }

// Large pages need a right that users have not.
void ask_for_huge_pages(std::byte*, std::size_t) noexcept {}
bool try_empty(std::byte*, std::size_t) noexcept { return false; }

void* open_library(const char* name, std::string* reason) {
    void* const library = LoadLibraryW(wide(name).c_str());
    if (!library && reason) *reason = text_of(name, ": ", last_error());
    return library;
}

void* find_symbol(void* library, const char* name) noexcept {
    if (!library) return nullptr;
    return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

// ---- threads

unsigned n_cpus() noexcept {
    DWORD_PTR allowed = 0;
    DWORD_PTR all = 0;
    // Zero for a process in several groups of 64.
    if (GetProcessAffinityMask(GetCurrentProcess(), &allowed, &all) && allowed != 0) {
        return static_cast<unsigned>(std::popcount(allowed));
    }
    return std::max(1U, std::thread::hardware_concurrency());
}

namespace {

struct exit_call {
    void (*end)(void*);
    void* data;
    exit_call* before;
};

void WINAPI call_all(void* last) {
    for (auto* one = static_cast<exit_call*>(last); one;) {
        one->end(one->data);
        delete std::exchange(one, one->before);
    }
}

}  // namespace

// A destructor would come too late, see per_thread.h.
void at_thread_exit(void (*end)(void* data), void* data) {
    static const auto index = FlsAlloc(call_all);
    auto* const before = static_cast<exit_call*>(FlsGetValue(index));
    FlsSetValue(index, new exit_call{end, data, before});
}

void name_this_thread(const char*) noexcept {}

void enlarge_stacks() noexcept {}

void sleep_while(std::atomic<std::uint32_t>& number, std::uint32_t old) noexcept {
    WaitOnAddress(&number, &old, sizeof old, INFINITE);
}

void wake_sleepers(std::atomic<std::uint32_t>& number) noexcept { WakeByAddressAll(&number); }

// No signal is delivered to a thread: Ctrl-C gets one of its own.
signals_blocked::signals_blocked() noexcept : before_{} {}
signals_blocked::~signals_blocked() = default;

int n_forks() noexcept { return 0; }

// ---- waiting in the kernel

namespace {

// How soon a wait lets Python see Ctrl-C, which interrupts none.
constexpr DWORD between_looks_ms = 50;

HANDLE event_of(std::intptr_t value) { return reinterpret_cast<HANDLE>(value); }

}  // namespace

kernel_flag::kernel_flag()
    : ends_{reinterpret_cast<std::intptr_t>(CreateEventW(nullptr, TRUE, FALSE, nullptr)), 0} {
    if (ends_[0] == 0) throw error(errc::internal, "wake_handle: no event: ", last_error());
}

kernel_flag::~kernel_flag() { CloseHandle(event_of(ends_[0])); }

int kernel_flag::fd() const noexcept { return -1; }

void kernel_flag::set() noexcept { SetEvent(event_of(ends_[0])); }

void kernel_flag::clear() noexcept { ResetEvent(event_of(ends_[0])); }

wait_end kernel_flag::wait(int timeout_ms) const noexcept {
    const bool is_cut = timeout_ms < 0 || static_cast<DWORD>(timeout_ms) > between_looks_ms;
    const auto limit = is_cut ? between_looks_ms : static_cast<DWORD>(timeout_ms);
    if (WaitForSingleObject(event_of(ends_[0]), limit) != WAIT_TIMEOUT) return wait_end::is_set;
    return is_cut ? wait_end::interrupted : wait_end::timeout;
}

}  // namespace kqview
