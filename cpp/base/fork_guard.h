// Tells a forked child that threads and locks of its parent's engines are not there.
// Cheap enough for every call: one relaxed load against a remembered number.
#pragma once

namespace kqview {

// Number of forks between this process and the first one that asked.
int fork_epoch() noexcept;

class fork_guard {
public:
    fork_guard() noexcept : epoch_(fork_epoch()) {}

    // True in a child that was forked after this object was made.
    bool is_forked() const noexcept { return epoch_ != fork_epoch(); }

private:
    int epoch_;
};

}  // namespace kqview
