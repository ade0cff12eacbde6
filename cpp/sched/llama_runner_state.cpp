// The part of llama_runner that turns a slot's cache into bytes and back.
#include <ggml.h>

#include "base/error.h"
#include "sched/llama_runner.h"
#include "state/ses1.h"

namespace kqview {

namespace {

template <kv_type ours, ggml_type theirs>
constexpr bool is_same = static_cast<int>(ours) == static_cast<int>(theirs);

static_assert(is_same<kv_type::f32, GGML_TYPE_F32> && is_same<kv_type::f16, GGML_TYPE_F16> &&
              is_same<kv_type::bf16, GGML_TYPE_BF16> && is_same<kv_type::q8_0, GGML_TYPE_Q8_0> &&
              is_same<kv_type::q4_0, GGML_TYPE_Q4_0> && is_same<kv_type::q4_1, GGML_TYPE_Q4_1> &&
              is_same<kv_type::q5_0, GGML_TYPE_Q5_0> && is_same<kv_type::q5_1, GGML_TYPE_Q5_1> &&
              is_same<kv_type::iq4_nl, GGML_TYPE_IQ4_NL>);

}  // namespace

kv_shape llama_runner::state_shape() const {
    const auto facts = context_->cache();
    return {facts.n_stream, facts.has_cell_extra, static_cast<std::uint32_t>(model_->n_vocab()),
            static_cast<std::uint32_t>(context_->n_ctx())};
}

const kv_layout& llama_runner::layout_from(std::span<const std::byte> kv_data) {
    if (!layout_) {
        auto layout = learn_layout(kv_data, state_shape());
        layout.shape.n_stream = static_cast<std::uint32_t>(n_slots());
        layout_ = std::move(layout);
    }
    return *layout_;
}

// Learned from bytes that this context writes: the layers, which of them keep values, and the row
// sizes are then llama.cpp's own, whatever rules it has for them. An empty slot gets one token for
// that; once.
const kv_layout& llama_runner::layout_for(slot_id slot, bool is_empty) {
    if (layout_) return *layout_;
    (void)state_shape();  // a model that cannot be saved is not decoded for it
    std::vector<std::byte> kv_data;
    try {
        if (is_empty) {
            const step_token token{slot, 0, 0, true};
            decode({&token, 1}, {}, false);
        }
        kv_data.resize(state_bytes(slot));
        write_state(slot, kv_data);
    } catch (...) {
        if (is_empty) truncate(slot, 0);
        throw;
    }
    if (is_empty) truncate(slot, 0);
    return layout_from(kv_data);
}

bool llama_runner::discard(slot_id slot, std::span<const token_range> gone) {
    (void)state_shape();  // raises where cells could not be moved to their positions
    return unbroken("shifting a slot", [&] {
        const tap::scope scope(*tap_);
        return context_->discard(slot, gone);
    });
}

std::size_t llama_runner::state_bytes(slot_id slot) {
    (void)state_shape();
    return unbroken("saving a slot", [&] {
        const tap::scope scope(*tap_);
        context_->flush_shifts();
        return context_->state_bytes(slot);
    });
}

void llama_runner::write_state(slot_id slot, std::span<std::byte> out) {
    unbroken("saving a slot", [&] { context_->write_state(slot, out); });
}

bool llama_runner::read_state(slot_id slot, std::span<const std::byte> bytes, int n_tokens) {
    return unbroken("restoring a slot", [&] {
        const tap::scope scope(*tap_);
        context_->flush_shifts();
        return context_->read_state(slot, bytes, n_tokens);
    });
}

}  // namespace kqview
