#include "sched/forward_pass.h"

#include <cstddef>
#include <string>
#include <utility>

#include "base/error.h"
#include "sched/mailbox.h"

namespace kqview {

forward_pass::forward_pass(const request& of, std::span<const float> logits, const limits& known)
    : logits_(std::make_shared<const std::vector<float>>(logits.begin(), logits.end())),
      limits_(known) {
    if (!of.takes_own_choices || of.picker->is_slow()) return;
    try {
        ahead_ = of.picker->propose(*logits_, {});
    } catch (const error&) {  // pick() raises it
    }
}

picked_token forward_pass::pick(const request& of, std::span<const float> adjusted,
                                std::optional<float> temperature) {
    const auto lock = use(of);
    if (picked_) {
        throw error(errc::request,
                    "this forward pass has been picked from; answer it, and pick from the next");
    }
    if (temperature && !(*temperature >= 0.0F)) {
        throw error(errc::request, "temperature is ", *temperature,
                    ", allowed are 0 (the most likely token) and above");
    }
    if (!adjusted.empty() && adjusted.size() != logits_->size()) {
        throw error(errc::request, "logits has ", adjusted.size(),
                    " values, but the vocabulary has ", logits_->size());
    }
    of.takes_own_choices = adjusted.empty() && !temperature;
    if (ahead_ && of.takes_own_choices) {
        picked_ = ahead_->id;
        return *std::exchange(ahead_, std::nullopt);
    }
    forget_choice(of);
    try {
        auto picked = of.picker->propose(adjusted.empty() ? *logits_ : adjusted, temperature);
        picked_ = picked.id;
        return picked;
    } catch (const error& failure) {
        if (adjusted.empty() || failure.code() != errc::decode) throw;
        throw error(errc::request, "the adjusted logits cannot be sampled: ", failure.what());
    }
}

void forward_pass::answer(const request& of, const pass_answer& given) {
    const auto lock = use(of);
    check(given);
    forget_choice(of);
    of.picker->revise(static_cast<std::size_t>(given.n_removed), given.ids);
    is_answered_ = true;
    const bool is_choice = picked_ && given.ids.size() == 1 && given.ids[0] == *picked_;
    if (!is_choice || given.n_removed > 0) of.takes_own_choices = false;
}

// What the consumer did not ask for was never chosen.
void forward_pass::forget_choice(const request& of) {
    if (std::exchange(ahead_, std::nullopt)) of.picker->revise(0, {});
}

std::unique_lock<std::mutex> forward_pass::use(const request& of) {
    std::unique_lock lock(in_use_, std::try_to_lock);
    if (!lock) {
        throw error(errc::busy,
                    "another thread picks from this forward pass or answers it; use it from one");
    }
    if (is_answered_) {
        throw error(errc::request,
                    "this forward pass has been answered; take the next event of its generation");
    }
    if (of.box->is_over()) {
        throw error(errc::closed, "the generation of this forward pass has ended");
    }
    return lock;
}

void forward_pass::check(const pass_answer& given) const {
    if (given.n_removed < 0 || given.n_removed > limits_.n_removable) {
        throw error(errc::request, "n_removed is ", given.n_removed, ", but 0..",
                    limits_.n_removable, " generated ids can be taken back");
    }
    const int n_allowed = limits_.n_left + given.n_removed;
    if (static_cast<int>(given.ids.size()) > n_allowed) {
        throw error(errc::request, "ids has ", given.ids.size(),
                    " tokens, but the generation may get ", n_allowed,
                    " more, by max_tokens and the room in its slot; pass fewer");
    }
}

}  // namespace kqview
