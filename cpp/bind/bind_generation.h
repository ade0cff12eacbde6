// The handle of one request; destroying it cancels the request.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "sched/engine.h"
#include "sched/request.h"

namespace kqview::bind {

struct generation_handle {
    generation_handle(std::shared_ptr<engine> owner, std::shared_ptr<request> one)
        : core(std::move(owner)), wanted(std::move(one)) {}
    ~generation_handle() { core->sched().cancel(wanted); }

    std::shared_ptr<engine> core;
    std::shared_ptr<request> wanted;
    std::optional<end_event> end;       // once seen: a forked child must not use the mailbox
    std::atomic<bool> is_taken{false};  // one consumer at a time
};

}  // namespace kqview::bind
