#include "tap/hook_channel.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace kqview {

bool hook_channel::ask(int layer, int n_tokens, std::span<float> rows) {
    std::unique_lock lock(mutex_);
    if (failure_ || is_closed_) return false;
    question_ = {layer, n_tokens, {rows.begin(), rows.end()}};
    state_ = state::asked;
    changed_.notify_all();
    const bool is_done = changed_.wait_for(
        lock, limit_, [&] { return state_ == state::answered || failure_ || is_closed_; });
    if (!is_done) failure_ = text_of("took longer than its limit of ", limit_.count(), " s");
    if (failure_ || state_ != state::answered) return false;
    state_ = state::idle;
    if (question_.rows.size() == rows.size()) std::ranges::copy(question_.rows, rows.begin());
    return true;
}

std::optional<hook_channel::question> hook_channel::next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return state_ == state::asked || is_closed_ || failure_; });
    if (is_closed_ || failure_) return {};
    state_ = state::taken;
    return question_;
}

void hook_channel::answer(std::vector<float> rows) {
    const std::lock_guard lock(mutex_);
    if (state_ != state::taken) return;
    if (!rows.empty()) question_.rows = std::move(rows);
    state_ = state::answered;
    changed_.notify_all();
}

void hook_channel::fail(std::string why) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(why);
    changed_.notify_all();
}

void hook_channel::close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
}

std::optional<std::string> hook_channel::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

}  // namespace kqview
