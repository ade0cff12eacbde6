// One model, one context and the engine thread, as callers see them: turns calls into requests and
// the engine's state into statistics.
// Threads: any; calls that may take time run without the GIL.
// Never:   touches the llama_context after the constructor; it belongs to the engine thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "llama/context.h"
#include "llama/context_params.h"
#include "llama/model.h"
#include "sample/token_filter.h"
#include "sched/forward_pass.h"
#include "sched/llama_runner.h"
#include "sched/request.h"
#include "sched/scheduler.h"
#include "tap/plan.h"
#include "tap/step_result.h"

namespace kqview {

struct engine_options : context_options {
    std::size_t attention_budget_bytes = 0;
    std::size_t pinned_bytes = 0;  // the page-locked part of it, where devices hold layers
    double max_gap_ms = 0;  // between two tokens of a text while a prompt is evaluated; 0: see pace
    // Of checkpoints, see there; empty: n_snapshots_each of each slot, an eighth of the machine's
    // memory at most.
    std::optional<std::size_t> checkpoint_bytes;
    std::size_t checkpoint_every = 0;  // tokens of a prompt; 0: none for its length
    // Guesses how texts go on; the engine's own model: its layers for that do; null: none does.
    std::shared_ptr<model> draft;
    bool poisons_blocks = false;  // for tests of views: overwrites blocks that were given back
};

struct engine_health {
    const char* phase;
    double quiet_s;  // since the last sign of life
    std::uint64_t n_steps;
    bool is_lost;  // close() gave up on the thread
};

// What an opened engine is like.
struct engine_facts {
    int n_ctx;
    int n_chunk;  // the most prompt tokens per step
    capture_source capture;
    bool has_cache;
    bool can_split_embedding;
    std::string pooling;
    std::size_t memory_bytes;  // as of context
    embedding_facts embeddings;
    std::string shift_obstacle;
    bool can_take_back;  // so it can guess tokens
};

class engine {
public:
    // Creates the context and starts the engine thread.
    engine(std::shared_ptr<model> source, const engine_options& options);
    ~engine() { source_->rpc().leave(); }

    const engine_facts& facts() const { return facts_; }
    int n_slots() const { return sched_->n_slots(); }
    int n_vocab() const { return source_->n_vocab(); }

    // Creates the sampler, which a grammar or DRY can make slow, and queues the request. Raises
    // invalid_sampling, invalid_token, queue_full, closed.
    std::shared_ptr<request> submit(request_options wanted);

    // As request::end_by.
    std::optional<finish_reason> end_by(const request& of, token_id id) const {
        return of.end_by(*source_, id);
    }

    // As scheduler::answer. Raises invalid_token for ids outside the vocabulary.
    void answer(const std::shared_ptr<request>& wanted, forward_pass& pass, pass_answer given);

    // Also ends a step that waits for an RPC server, at once.
    void close(std::chrono::duration<double> limit);

    engine_health health() const;  // also after close(); takes no lock
    // Counters, besides those of sched(); also after close().
    const graph_counters& graphs() const { return *graphs_; }
    const copy_counters& copies() const { return *copies_; }
    // For copy benchmarks: if true, a step ends only once its rows have left their devices.
    void await_copies(bool wanted) { copies_->are_awaited = wanted; }

    scheduler& sched() { return *sched_; }
    const scheduler& sched() const { return *sched_; }

private:
    const std::shared_ptr<model> source_;
    token_filters filters_;
    engine_facts facts_;
    std::shared_ptr<const graph_counters> graphs_;
    std::shared_ptr<copy_counters> copies_;
    scheduler_handle sched_;
};

}  // namespace kqview
