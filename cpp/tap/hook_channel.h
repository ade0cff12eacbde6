// Hands the activations of a step to a function of the caller's, and what it makes of them back.
// The function runs on a thread of the caller's, so that no thread of the engine takes the GIL.
// Owner:   the edits of one request, through a hook_lease, and the thread that answers.
// Threads: a compute thread asks and waits, for a limited time; one thread answers.
// Never:   waits for a caller after its first failure: the request ends with the step.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kqview {

class hook_channel {
public:
    // F32 ne=[n_embd, n_tokens], of one layer.
    struct question {
        int layer;
        int n_tokens;
        std::vector<float> rows;
    };

    explicit hook_channel(std::chrono::duration<double> limit) : limit_(limit) {}

    // Replaces `rows` by the answer. Returns false, with `rows` as they were, if there is none:
    // failure() says why.
    bool ask(int layer, int n_tokens, std::span<float> rows);

    // The next question; empty once nobody will ask any more.
    std::optional<question> next();
    // Rows of the same size, or none to leave them as they are. Too late, it has no effect.
    void answer(std::vector<float> rows);
    void fail(std::string why);

    void close();
    std::optional<std::string> failure() const;

private:
    enum class state { idle, asked, taken, answered };

    const std::chrono::duration<double> limit_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    state state_ = state::idle;
    question question_{};
    bool is_closed_ = false;
    std::optional<std::string> failure_;
};

// Closes the channel when no request will ask any more.
struct hook_lease {
    std::shared_ptr<hook_channel> channel;
    explicit hook_lease(std::shared_ptr<hook_channel> of) : channel(std::move(of)) {}
    ~hook_lease() { channel->close(); }
    hook_lease(const hook_lease&) = delete;
    hook_lease& operator=(const hook_lease&) = delete;
};

}  // namespace kqview
