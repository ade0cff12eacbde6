// Exceptions on the engine thread as errors that can be handed to another thread.
#pragma once

#include "base/error.h"

namespace kqview {

// The running exception, for use inside a catch block: an error as it is, bad_alloc as `no_memory`,
// any other as `other` with "<noun>: " before what it says. Allocates nothing where memory ran out.
error running_failure(const char* noun, errc other, const error& no_memory) noexcept;

}  // namespace kqview
