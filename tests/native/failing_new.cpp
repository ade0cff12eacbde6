// operator new and delete of the whole test program; new[] and the aligned ones stay the library's.
#include "failing_new.h"

#include <cstdlib>
#include <new>

namespace kqview::test {

thread_local long n_allocations_left = -1;
std::atomic<int> n_allocations_failed{0};

namespace {

void* allocate(std::size_t n_bytes) noexcept {
    if (n_allocations_left >= 0 && n_allocations_left-- == 0) {
        ++n_allocations_failed;
        return nullptr;
    }
    return std::malloc(n_bytes > 0 ? n_bytes : 1);
}

}  // namespace

}  // namespace kqview::test

void* operator new(std::size_t n_bytes) {
    if (void* const made = kqview::test::allocate(n_bytes)) return made;
    throw std::bad_alloc();
}
void* operator new(std::size_t n_bytes, const std::nothrow_t&) noexcept {
    return kqview::test::allocate(n_bytes);
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, std::size_t) noexcept { std::free(made); }
void operator delete(void* made, const std::nothrow_t&) noexcept { std::free(made); }
