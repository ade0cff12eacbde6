// Tells a forked child from its parent, whose engine threads the child does not have and whose
// locks nobody in it will release. Cheap enough for every call: one relaxed load and a comparison.
#pragma once

#include "base/system.h"

namespace kqview {

class fork_guard {
public:
    fork_guard() noexcept : epoch_(n_forks()) {}

    // True in a child that was forked after this object was made.
    bool is_forked() const noexcept { return epoch_ != n_forks(); }

private:
    int epoch_;
};

}  // namespace kqview
