// What a model made of the last tokens of each slot: the state before its output matrix. Layers
// that predict later tokens take a token with the state of the one before it.
// Owner:   the context of those layers; filled from steps of the model's own.
// Threads: the engine thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/ids.h"

namespace kqview {

class token_states {
public:
    // `n_values`: of a state; `n_most`: states that are kept of a slot, the latest ones.
    token_states(int n_slots, std::size_t n_values, std::size_t n_most)
        : known_(static_cast<std::size_t>(n_slots)),
          n_values_(n_values),
          n_most_(n_most),
          values_(std::make_unique_for_overwrite<float[]>(known_.size() * n_most * n_values)),
          unknown_(n_values) {}

    // The state of the slot's token at `position`. Drops those of later ones, and all others if
    // that of the token before is not known.
    void put(slot_id slot, std::size_t position, const float* state) {
        auto& known = of(slot);
        if (position < known.begin || position > known.end) known.begin = position;
        known.end = position + 1;
        known.begin = std::max(known.begin, known.end - std::min(known.end, n_most_));
        std::copy_n(state, n_values_, row(slot, position));
    }

    // Forgets all but those of the slot's first `n_tokens`.
    void keep(slot_id slot, std::size_t n_tokens) {
        auto& known = of(slot);
        known.end = std::min(known.end, n_tokens);
        known.begin = std::min(known.begin, known.end);
    }

    // How many tokens come before the first whose state is known; `n_tokens` if none is.
    std::size_t n_before(slot_id slot, std::size_t n_tokens) const {
        const auto& known = of(slot);
        return known.begin == known.end ? n_tokens : known.begin;
    }

    // F32 ne=[n_values] of the token before `position`; zeros if it is not known.
    const float* before(slot_id slot, std::size_t position) const {
        const auto& known = of(slot);
        const bool is_known = position > known.begin && position <= known.end;
        return is_known ? row(slot, position - 1) : unknown_.data();
    }

private:
    struct range {
        std::size_t begin = 0, end = 0;
    };

    range& of(slot_id slot) { return known_[static_cast<std::size_t>(slot)]; }
    const range& of(slot_id slot) const { return known_[static_cast<std::size_t>(slot)]; }
    float* row(slot_id slot, std::size_t position) const {
        const auto i = static_cast<std::size_t>(slot) * n_most_ + position % n_most_;
        return values_.get() + i * n_values_;
    }

    std::vector<range> known_;
    std::size_t n_values_, n_most_;
    std::unique_ptr<float[]> values_;
    std::vector<float> unknown_;
};

}  // namespace kqview
