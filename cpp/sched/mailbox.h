// Carries the tokens of one request, and rows of its prompt, from the engine thread to one
// consumer.
// Owner:   shared by the request and the consumer's handle.
// Threads: "producer" members on the engine thread, "consumer" members on one consumer at a time.
// Never:   blocks the producer, which calls has_room() before a token is computed.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "base/ids.h"
#include "sched/request.h"
#include "sched/wakeup.h"

namespace kqview {

class mailbox {
public:
    // Rings `engine` when the consumer makes room or starts to wait.
    explicit mailbox(std::shared_ptr<doorbell> engine) : engine_(std::move(engine)) {}

    // Producer: may another token, or run of prompt rows, be computed? True while fewer than
    // `run_ahead` are queued, and whenever the consumer waits on an empty mailbox. If it returns
    // false, the next change rings the engine.
    bool has_room(int run_ahead);

    // Producer: does the consumer wait on an empty mailbox? Then no view of this request can come
    // back. If it returns false, the next change rings the engine.
    bool is_starving();

    using event = std::variant<token_event, prompt_event, forward_event>;

    // Producer: adds a token or rows of the prompt, and the end if nothing follows. After the
    // consumer cancelled, drops the event, and the end becomes that of a cancelled request.
    void put(event content, std::optional<end_event> end = {});
    // Producer: sets the end; the first one wins.
    void finish(end_event end);

    // Producer, while the request is queued: every slot waits for the consumers of `holders`, so
    // the request cannot start before one of them acts. A waiting consumer is notified once per
    // distinct set. False: it began to wait after the producer last asked, and what it did before
    // that, as a consumer of `holders`, may not have been seen; look again and repeat the call.
    [[nodiscard]] bool stall(const std::vector<request_id>& holders);

    // Producer: bytes of the pool in rows that the consumer has not taken.
    std::size_t n_bytes_ahead() const;
    std::size_t n_ahead() const;  // items that were not taken

    // Producer: the number of tokens taken; final once the consumer cancelled.
    int n_taken() const;

    // Producer: the cancellation is complete and the slot is rolled back. Ends a request that has
    // no end yet.
    void settle(end_event end = {});

    struct item {
        std::optional<token_event> token;
        std::optional<prompt_event> prompt;
        std::optional<forward_event> forward;  // none of them: only `end` is set
        std::optional<end_event> end;          // with a token: it is the last one
    };
    // Consumer: the next item, or nothing yet. Returns the end again on every later call.
    std::optional<item> try_take();

    // Any thread: has the request ended, or been cancelled?
    bool is_over() const;
    // Consumer: the end, if known, without taking the items before it.
    std::optional<end_event> end() const;

    // Consumer: the requests that keep this one from starting, if not reported yet; otherwise
    // empty. After forget_stall() they are reported again if they still do.
    std::vector<request_id> take_stall();
    void forget_stall();

    // Consumer: registers `waiter` to be signalled at the next change. True: something is there
    // already. Several waiters are allowed: one for the next item, others for a cancellation.
    bool arm(std::shared_ptr<wake_handle> waiter);
    // As arm(), for a cancellation. True: it is complete.
    bool arm_settled(std::shared_ptr<wake_handle> waiter);
    void disarm(const wake_handle* waiter = nullptr);  // null: all of them

    // Consumer: drops all items not taken; the scheduler informs the engine. False: nothing is left
    // to do, because the request was already cancelled or its end was taken.
    bool cancel();

private:
    // The progress of each side. Neither ever goes back.
    enum class producing { open, ended, settled };
    enum class consuming { open, has_end, cancelled };

    bool has_something() const {
        return !events_.empty() || producer_ != producing::open || is_stall_new_;
    }
    bool is_awaited() const { return events_.empty() && !waiters_.empty(); }
    void set_end(end_event end);
    void add_waiter(std::shared_ptr<wake_handle> waiter);
    void wake_consumer();

    const std::shared_ptr<doorbell> engine_;

    mutable std::mutex mutex_;  // guards what follows
    std::deque<event> events_;
    producing producer_ = producing::open;
    consuming consumer_ = consuming::open;
    end_event end_;  // once the producer is not `open`
    int n_taken_ = 0;
    bool engine_waits_ = false;  // the producer saw no room, or no consumer to notify of a stall
    std::vector<std::shared_ptr<wake_handle>> waiters_;
    std::vector<request_id> stall_;  // last reported
    bool is_stall_new_ = false;
    bool is_wait_known_ = false;  // stall() has been called since the last waiter came
};

}  // namespace kqview
