// The states of a slot and which may follow which. The engine thread changes them, any thread may
// look.
#pragma once

#include <atomic>
#include <string>

#include "base/error.h"

namespace kqview {

enum class slot_state {
    idle,      // holds tokens of the past, works for nobody
    prefill,   // feeds the prompt in chunks
    decode,    // one token a step
    sampling,  // its next token is being picked in the sampler lane
    paused,    // its consumer is behind by run_ahead tokens
    starved,   // the block pool has no room for its next row
};

constexpr const char* name_of(slot_state state) {
    switch (state) {
        case slot_state::idle: return "idle";
        case slot_state::prefill: return "prefill";
        case slot_state::decode: return "decode";
        case slot_state::sampling: return "sampling";
        case slot_state::paused: return "paused";
        case slot_state::starved: return "starved";
    }
    return "?";
}

constexpr bool may_follow(slot_state from, slot_state to) {
    switch (from) {
        case slot_state::idle: return to == slot_state::prefill;
        // The prompt's last chunk produces a token and a row: it may have to wait for either.
        case slot_state::prefill: return to != slot_state::prefill;
        case slot_state::decode: return to != slot_state::prefill;
        case slot_state::sampling: return to == slot_state::decode || to == slot_state::idle;
        case slot_state::paused:
        case slot_state::starved: return to != slot_state::sampling;
    }
    return false;
}

inline void change(slot_state& state, slot_state to) {
    if (state == to) return;
    if (!may_follow(state, to)) {
        throw error(errc::internal,
                    std::string("slot: ") + name_of(state) + " cannot become " + name_of(to));
    }
    state = to;
}

inline void change(std::atomic<slot_state>& state, slot_state to) {
    auto next = state.load(std::memory_order_relaxed);
    change(next, to);
    state.store(next, std::memory_order_relaxed);
}

}  // namespace kqview
