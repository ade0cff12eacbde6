// One T for each thread that asks for it, destroyed when that thread ends. Not a thread_local with
// a destructor: where gcc emulates thread-local storage (mingw-w64), its memory is freed before
// that runs.
// Threads: any.
#pragma once

#include <memory>

#include "base/system.h"

namespace kqview {

// Raises std::bad_alloc, at a thread's first call.
template <class T>
T& per_thread() {
    static thread_local T* mine = nullptr;
    if (!mine) {
        auto made = std::make_unique<T>();
        at_thread_exit([](void* one) { delete static_cast<T*>(one); }, made.get());
        mine = made.release();
    }
    return *mine;
}

}  // namespace kqview
