// One forward pass of a steered request: its logits, the token that the request's picker chooses
// from them, and the consumer's decision. Meanwhile the engine continues with other slots.
// Owner:   the event in the mailbox, then the consumer's. Views of the logits share only the row.
// Threads: made on the engine thread; then the consumer's thread, one call at a time. So is the
//          request's picker used.
// Never:   touches a slot: the engine thread carries out the decision.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.h"
#include "sample/token_picker.h"
#include "sched/request.h"

namespace kqview {

// What becomes of a steered request's text after a forward pass.
struct pass_answer {
    int n_removed = 0;          // a backtrack: so many generated ids are taken back, from the end
    std::vector<token_id> ids;  // appended, as one chunk; none: the last token is evaluated again
    std::optional<finish_reason> end;  // the text ends behind them
    // In force for what is evaluated from then on; null: as before.
    std::shared_ptr<const edit_plan> edits{};
};

class forward_pass {
public:
    struct limits {
        int n_tokens;     // in the slot, all evaluated
        int n_removable;  // generated ids that can be taken back
        int n_left;       // ids that the request may still get
    };

    // Copies `logits`, the only time that they are copied. F32 ne=[n_vocab]. Picks from them ahead,
    // while they are in the cache of the engine thread's core; not if that may take long, or if the
    // consumer of `of` picked from adjusted ones last, or answered something else than its choice.
    forward_pass(const request& of, std::span<const float> logits, const limits& known);

    const std::shared_ptr<const std::vector<float>>& logits() const { return logits_; }
    const limits& known() const { return limits_; }
    // The token that the answer likely has. For the engine thread, before the event is handed out.
    std::optional<token_id> foreseen() const {
        return ahead_ ? std::optional(ahead_->id) : std::nullopt;
    }

    // The choice of the request's picker, from these logits or from `adjusted` ones, which stay as
    // they are. Raises what the picker raises, request for adjusted logits that leave nothing to
    // choose and for a second choice, closed once the request has ended.
    picked_token pick(const request& of, std::span<const float> adjusted,
                      std::optional<float> temperature);

    // Checks the answer and brings the request's picker to the state behind it. Raises request
    // and invalid_sampling without any effect, closed once the request has ended.
    void answer(const request& of, const pass_answer& given);

private:
    std::unique_lock<std::mutex> use(const request& of);
    void forget_choice(const request& of);
    void check(const pass_answer& given) const;

    const std::shared_ptr<const std::vector<float>> logits_;
    const limits limits_;
    std::mutex in_use_;                  // guards what follows, and the request's picker
    std::optional<picked_token> ahead_;  // the choice, until the consumer asks for it
    std::optional<token_id> picked_;
    bool is_answered_ = false;
};

}  // namespace kqview
