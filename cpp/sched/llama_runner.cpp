#include "sched/llama_runner.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "llama/pinned_memory.h"

namespace kqview {

llama_runner::llama_runner(std::shared_ptr<model> source, const context_options& options)
    : model_(std::move(source)),
      tap_(std::make_unique<tap>(std::max(options.n_threads, options.n_threads_batch),
                                 options.n_slots, std::min(options.n_ubatch, options.n_batch))) {
    check_memory(*model_, options);
    const tap::scope scope(*tap_);
    context_ = std::make_unique<context>(model_, options);
}

llama_runner::~llama_runner() {
    if (broken_) {
        // Of what an abort left nobody knows whether it can be freed: that waits for streams which
        // may be in the middle of something, and ggml would abort again, out of a destructor. So it
        // stays allocated. The model goes, as always, unless its devices failed.
        context_->abandon();
        (void)tap_.release();
        return;
    }
    const tap::scope scope(*tap_);
    context_.reset();
}

void llama_runner::break_down(const llama_abort& why, const char* activity) {
    constexpr auto remedy = "open a new Engine";
    broken_ = error(errc::decode, std::string("engine: llama.cpp could not go on while ") +
                                      activity + " earlier: " + why.message + "; " + remedy);
    if (!why.is_memory) {
        *is_device_lost_ = true;
        model_->abandon();
    }
    throw error_of(
        why, activity, errc::decode,
        why.is_memory ? "open a new Engine with a lower n_ctx, n_slots or n_gpu_layers" : remedy);
}

std::shared_ptr<host_allocator> llama_runner::host_memory() const {
    const auto device = tap_->device();
    return device ? pinned_allocator(device, is_device_lost_) : nullptr;
}

bool llama_runner::is_end_of_generation(token_id id) const {
    return model_->has_vocab() && llama_vocab_is_eog(model_->vocab(), id);
}

void llama_runner::want(const graph_plan& plan) {
    unbroken("reserving a graph", [&] {
        const tap::scope scope(*tap_);
        try {
            if (!tap_->want(plan)) return;
            context_->reserve();
        } catch (const llama_abort&) {
            throw;
        } catch (...) {
            // The requests that run on must not fail with this one: back to graphs without nodes.
            const auto why = tap_->take_failure();
            tap_->want({});
            context_->reserve();
            if (why.empty()) throw;
            throw error(errc::unsupported_model, "capture: " + why);
        }
    });
}

step_result llama_runner::decode(std::span<const step_token> tokens,
                                 std::span<const step_rows> rows, bool embeds) {
    batch_.clear();
    for (const auto& token : tokens) {
        batch_.push_back({token.slot, token.id, token.position, token.wants_logits});
    }
    std::vector<row_target> targets;
    targets.reserve(rows.size());
    for (const auto& row : rows) targets.push_back(target_of(tokens, row));

    return unbroken("decoding", [&] {
        const tap::scope scope(*tap_);
        tap_->begin_step(std::move(targets));
        try {
            context_->decode(batch_, embeds);
        } catch (...) {
            tap_->abandon_step();
            // A hook that refused says why; llama.cpp only knows that the call failed.
            const auto why = tap_->take_failure();
            if (why.empty()) throw;
            throw error(errc::unsupported_model, "capture: " + why);
        }
        publish_graphs();
        auto result = tap_->end_step();
        model_->rpc().check();  // rows that a lost server left are none
        if (tap_->copies()->are_awaited) tap_->await(std::exchange(result.transfer, 0));
        return result;
    });
}

void llama_runner::await(transfer_id rows) {
    unbroken("waiting for copies", [&] { tap_->await(rows); });
}

void llama_runner::copy(slot_id from, slot_id to) {
    unbroken("copying a slot", [&] { context_->copy(from, to); });
}

// Where llama.cpp puts the query of a batch token: a run of one slot is one stream with a query a
// token, one token each of several slots is a stream each.
row_target llama_runner::target_of(std::span<const step_token> tokens,
                                   const step_rows& rows) const {
    const bool is_one_slot = tokens.front().slot == tokens.back().slot;
    return {rows.plan,
            is_one_slot ? 0 : rows.i_token,
            is_one_slot ? rows.i_token : 0,
            rows.i_token,
            rows.n_visible,
            rows.layout,
            rows.data};
}

float* llama_runner::logits(int i_token) {
    return unbroken("waiting for logits", [&] {
        float* const row = context_->logits(i_token);
        tap_->note_computed();
        return row;
    });
}

text_embedding llama_runner::embedding(slot_id slot, int n_tokens) {
    return unbroken("waiting for an embedding", [&] {
        const int n_rows = context_->pooling() == "none" ? n_tokens : 1;
        return text_embedding{n_rows, context_->embedding(slot, n_tokens)};
    });
}

bool llama_runner::truncate(slot_id slot, int n_keep) {
    if (broken_) return true;  // of no consequence any more
    return context_->truncate(slot, n_keep);
}

void llama_runner::publish_graphs() {
    graphs_->n_built.store(tap_->n_graphs_built(), std::memory_order_relaxed);
    graphs_->n_reused.store(static_cast<std::uint64_t>(context_->n_graphs_reused()),
                            std::memory_order_relaxed);
    graphs_->n_nodes_added.store(tap_->n_nodes_added(), std::memory_order_relaxed);
}

}  // namespace kqview
