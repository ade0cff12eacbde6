#include "sched/llama_runner.h"

#include <ggml.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "llama/devices.h"
#include "llama/memory_plan.h"
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

llama_runner::llama_runner(std::shared_ptr<model> source, const context_options& options)
    : model_(std::move(source)),
      tap_(std::make_unique<tap>(
          tap_options{.n_threads = std::max(options.n_threads, options.n_threads_batch),
                      .n_slots = options.n_slots,
                      .n_chunk = std::min(options.n_ubatch, options.n_batch),
                      .attends = options.attends,
                      .has_window = model_->has_window(),
                      .device_rows = options.device_rows})) {
    check_memory(*model_, options);
    const tap::scope scope(*tap_);
    context_ = std::make_unique<context>(model_, options);
    if (const auto n_cells = context_->n_ring_cells(); n_cells > 0) {
        tap_->read_rings(model_->window_layers(), n_cells, n_slots(),
                         [this](slot_id slot, std::span<std::int32_t> positions) {
                             context_->read_ring(slot, positions);
                         });
    }
    // Of the graphs that were reserved: it is known before the first step.
    graphs_->n_attended.store(tap_->n_attended(), std::memory_order_relaxed);
}

llama_runner::~llama_runner() {
    if (broken_) {
        // After an abort, the context may be impossible to free: that waits for streams which may
        // be in the middle of an operation, and ggml would abort again, inside a destructor. So it
        // stays allocated. The model is freed as usual, unless its devices failed.
        context_->abandon();
        (void)tap_.release();
        return;
    }
    const tap::scope scope(*tap_);
    context_.reset();
}

void llama_runner::break_down(const llama_abort& why, const char* activity) {
    constexpr auto remedy = "open a new Engine";
    broken_ = error(errc::decode, "llama.cpp failed while ", activity, " earlier: ", why.message,
                    "; ", remedy);
    if (!why.is_memory) {
        *is_device_lost_ = true;
        model_->abandon();
    }
    throw error_of(
        why, activity, errc::decode,
        why.is_memory ? "open a new Engine with a lower n_ctx, n_slots or n_gpu_layers" : remedy);
}

std::shared_ptr<host_allocator> llama_runner::host_memory() const {
    const auto device = tap_->devices().layers().device();
    return device ? pinned_allocator(device, is_device_lost_) : nullptr;
}

// Where layers gather their keys (minimax-m3), a graph of several queries each of several streams
// tells no stream from the next one.
bool llama_runner::can_draft_rows(std::size_t n_slots) const {
    const auto is_plain = [](const auto& layer) { return layer.edits_scores; };
    return reads_on_host() && (n_slots == 1 || std::ranges::all_of(source().attention, is_plain));
}

bool llama_runner::is_end_of_generation(token_id id) const {
    return model_->is_end_of_generation(id);
}

void llama_runner::want(const graph_plan& plan) {
    unbroken("reserving a graph", [&] {
        if (tap_->serves(plan)) return;
        const tap::scope scope(*tap_);
        const auto before = tap_->wanted();
        // A chunk of a prompt, whose logits nobody waits for, may still run.
        context_->synchronize();
        try {
            tap_->want(plan);
            context_->reserve();
            tap_->devices().check_room(tap_->wanted());
        } catch (const llama_abort&) {
            throw;
        } catch (...) {
            // Running requests must not fail with the new one.
            const auto why = tap_->take_failure();
            go_back_to(before);
            if (!why) throw;
            throw error(*why);
        }
    });
}

// Graphs with the nodes of the requests that run or, where memory no longer suffices, without any.
void llama_runner::go_back_to(const graph_plan& plan) {
    tap_->want({});
    try {
        tap_->want(plan);
        context_->reserve();
        return;
    } catch (const llama_abort&) {
        throw;
    } catch (...) {
        (void)tap_->take_failure();
    }
    tap_->want({});
    context_->reserve();
}

void llama_runner::use(const lora_scales& scales) {
    unbroken("changing LoRA scales", [&] { context_->use(scales); });
}

step_result llama_runner::decode(std::span<const step_token> tokens,
                                 std::span<const step_rows> rows, step_output output) {
    std::vector<row_target> targets;
    targets.reserve(rows.size());
    for (const auto& row : rows) targets.push_back(target_of(tokens, row));

    return unbroken("decoding", [&] {
        const tap::scope scope(*tap_);
        tap_->begin_step(std::move(targets), tokens, output == step_output::logits);
        try {
            context_->decode(tokens, output == step_output::embeddings);
        } catch (...) {
            tap_->abandon_step();
            // The hook that refused has the reason; llama.cpp only knows that the call failed.
            const auto why = tap_->take_failure();
            if (!why) throw;
            throw error(*why);
        }
        publish_graphs();
        auto result = tap_->end_step();
        model_->rpc().check();  // rows from a lost server are invalid
        if (output != step_output::embeddings) tell_states(tokens);
        auto& devices = tap_->devices();
        if (devices.layers().counters()->are_awaited)
            devices.await(std::exchange(result.transfer, 0));
        return result;
    });
}

void llama_runner::await(transfer_id rows) {
    unbroken("waiting for copies", [&] { tap_->devices().await(rows); });
}

void llama_runner::copy(slot_id from, slot_id to) {
    unbroken("copying a slot", [&] {
        tap_->devices().settle();
        keep_states(to, 0);
        context_->copy(from, to);
    });
}

// Where llama.cpp puts the query of a batch token: adjacent slots are streams, with as many queries
// each.
row_target llama_runner::target_of(std::span<const step_token> tokens,
                                   const step_rows& rows) const {
    const auto n_tokens = static_cast<int>(tokens.size());
    const int i_stream = tokens[static_cast<std::size_t>(rows.i_token)].slot - tokens.front().slot;
    const int n_each = n_tokens / (tokens.back().slot - tokens.front().slot + 1);
    return {rows.plan,
            i_stream,
            rows.i_token - i_stream * n_each,
            n_tokens - rows.i_token - rows.layout.n_queries,
            rows.n_visible,
            rows.layout,
            rows.data};
}

float* llama_runner::logits(int i_token) {
    return unbroken("waiting for logits", [&] {
        float* const row = context_->logits(i_token);
        tap_->devices().note_computed();
        return row;
    });
}

token_id llama_runner::likeliest(int i_token) {
    const float* const row = logits(i_token);
    return static_cast<token_id>(std::max_element(row, row + n_vocab()) - row);
}

token_score llama_runner::score(int i_token, token_id id, int n_top) {
    const float* const row = logits(i_token);
    scan_.read(row, n_vocab(), n_top);
    return scan_.score(row, id);
}

text_embedding llama_runner::embedding(slot_id slot, int i_token, int n_tokens) {
    return unbroken("waiting for an embedding", [&] {
        const int n_rows = context_->pooling() == "none" ? n_tokens : 1;
        return text_embedding{n_rows, context_->embedding(slot, i_token, n_tokens)};
    });
}

bool llama_runner::truncate(slot_id slot, int n_keep) {
    if (broken_) return true;  // irrelevant: every call raises
    // What fails in here is kept for await(), which ends the engine; this call may not.
    const llama_activity guard("removing tokens");
    tap_->devices().settle();
    keep_states(slot, static_cast<std::size_t>(n_keep));
    return context_->truncate(slot, n_keep);
}

// ---- what layers that predict start from

void llama_runner::tell_states(std::span<const step_token> tokens) {
    auto* const states = draft_ ? draft_->context_->states() : nullptr;
    for (std::size_t i = 0; states && i < tokens.size(); ++i) {
        states->put(tokens[i].slot, static_cast<std::size_t>(tokens[i].position),
                    context_->state(static_cast<int>(i)));
    }
}

// The slot holds no more of the tokens whose states were told.
void llama_runner::keep_states(slot_id slot, std::size_t n_tokens) {
    auto* const states = draft_ ? draft_->context_->states() : nullptr;
    if (states) states->keep(slot, n_tokens);
}

std::size_t llama_runner::n_untold(slot_id slot, std::size_t n_tokens) {
    auto* const states = context_->states();
    if (!states) return 0;
    states->keep(slot, n_tokens);
    return states->n_before(slot, n_tokens);
}

void llama_runner::publish_graphs() {
    graphs_->n_built.store(tap_->n_graphs_built(), std::memory_order_relaxed);
    graphs_->n_reused.store(static_cast<std::uint64_t>(context_->n_graphs_reused()),
                            std::memory_order_relaxed);
    graphs_->n_nodes_added.store(tap_->n_nodes_added(), std::memory_order_relaxed);
    graphs_->n_attended.store(tap_->n_attended(), std::memory_order_relaxed);
}

// ---- snapshots of what cannot be cut back

std::size_t llama_runner::snapshot_bytes(slot_id slot) {
    return unbroken("taking a checkpoint", [&] { return context_->snapshot_bytes(slot); });
}

void llama_runner::write_snapshot(slot_id slot, std::span<std::byte> out) {
    unbroken("taking a checkpoint", [&] {
        const tap::scope scope(*tap_);
        context_->flush_shifts();  // and copies, which llama.cpp defers as well
        context_->write_snapshot(slot, out);
    });
}

void llama_runner::read_snapshot(slot_id slot, std::span<const std::byte> bytes, int n_tokens) {
    unbroken("going back to a checkpoint", [&] {
        const tap::scope scope(*tap_);
        tap_->devices().settle();
        context_->flush_shifts();
        keep_states(slot, static_cast<std::size_t>(n_tokens));
        context_->read_snapshot(slot, bytes, n_tokens);
    });
}

// ---- a slot's cache as bytes

const kv_layout& llama_runner::layout_from(slot_id slot, std::span<const std::byte> memory) {
    if (layout_) return *layout_;
    kv_layout known{static_cast<std::uint32_t>(model_->n_vocab()),
                    static_cast<std::uint32_t>(context_->n_ctx()),
                    {}};
    for (const auto& part : context_->parts()) {
        auto& one = known.parts.emplace_back();
        one.is_recurrent = part.state != nullptr;
        one.has_extra = part.has_extra();
        one.has_window = part.has_window;
        one.untyped = part.untyped();
        if (!part.is_ring) continue;
        one.n_ring_cells = static_cast<std::uint32_t>(part.n_cells());
        one.n_ring_least = context_->n_seen_least();
    }
    std::vector<std::span<const std::byte>> parts;
    for (const auto n_bytes : context_->part_bytes(slot)) {
        parts.push_back(memory.first(n_bytes));
        memory = memory.subspan(n_bytes);
    }
    return layout_.emplace(learn_layout(parts, std::move(known)));
}

// Learned from bytes that this context writes, so that the layers, which of them keep values, and
// the row sizes are llama.cpp's own, by whatever rules. An empty slot decodes one token for that,
// once.
const kv_layout& llama_runner::layout_for(slot_id slot, bool is_empty) {
    if (layout_) return *layout_;
    (void)context_->parts();  // raises first for a model that cannot be saved
    try {
        if (is_empty) {
            const step_token token{slot, 0, 0, true};
            decode({&token, 1}, {}, step_output::none);
        }
        std::vector<std::byte> memory(state_bytes(slot));
        write_state(slot, memory);
        layout_from(slot, memory);
    } catch (...) {
        if (is_empty) truncate(slot, 0);
        throw;
    }
    if (is_empty) truncate(slot, 0);
    return *layout_;
}

bool llama_runner::discard(slot_id slot, std::span<const token_range> gone) {
    return unbroken("shifting a slot", [&] {
        const tap::scope scope(*tap_);
        tap_->devices().settle();
        keep_states(slot, gone.empty() ? 0 : gone.front().start);
        return context_->discard(slot, gone);
    });
}

std::size_t llama_runner::state_bytes(slot_id slot) {
    return unbroken("saving a slot", [&] {
        const tap::scope scope(*tap_);
        context_->flush_shifts();
        const auto sizes = context_->part_bytes(slot);
        return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
    });
}

void llama_runner::write_state(slot_id slot, std::span<std::byte> out) {
    unbroken("saving a slot", [&] { context_->write_state(slot, out); });
}

void llama_runner::read_state(slot_id slot, std::span<const std::byte> memory, int n_tokens) {
    unbroken("restoring a slot", [&] {
        const tap::scope scope(*tap_);
        tap_->devices().settle();
        context_->flush_shifts();
        keep_states(slot, 0);
        context_->read_state(slot, memory, n_tokens);
    });
}

}  // namespace kqview
