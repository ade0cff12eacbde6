#include "sched/engine.h"

#include <algorithm>
#include <utility>

namespace kqview {
namespace {

double seconds(std::uint64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

}  // namespace

engine::engine(std::shared_ptr<model> source, const engine_options& options)
    : source_(std::move(source)), filters_(source_), embeddings_(embedding_facts_of(*source_)) {
    auto runner = std::make_unique<llama_runner>(source_, options);
    n_ctx_ = runner->n_ctx();
    n_chunk_ = runner->n_chunk();
    capture_ = runner->source();
    has_cache_ = runner->has_cache();
    can_split_embedding_ = runner->can_split_embedding();
    pooling_ = runner->pooling();
    shift_obstacle_ = runner->shift_obstacle();
    graphs_ = runner->graphs();
    copies_ = runner->copies();
    block_pool_options pool;
    pool.budget_bytes = options.attention_budget_bytes;
    pool.poison = options.poisons_blocks;
    pool.allocator = runner->host_memory();
    sched_.reset(new scheduler(std::move(runner), block_pool::create(std::move(pool))));
}

std::shared_ptr<request> engine::submit(request_options options) {
    check(options.sampling, source_->n_vocab());
    auto wanted = std::make_shared<request>(std::move(options));
    if (!wanted->only_attends) {
        wanted->picker =
            make_sampler_picker(*source_, wanted->sampling, wanted->prompt,
                                filters_.make(wanted->sampling, wanted->constraint_library));
    }
    sched_->submit(wanted);
    return wanted;
}

void engine::close(std::chrono::duration<double> limit) {
    source_->rpc().leave();
    sched_->close(limit);
}

engine_stats engine::stats() const {
    sched_->check_not_forked();
    const auto& counters = sched_->counters();
    engine_stats now;
    now.uptime_s = sched_->uptime_s();
    now.n_requests = counters.n_requests;
    now.n_finished = counters.n_finished;
    now.n_cancelled = counters.n_cancelled;
    now.n_failed = counters.n_failed;
    now.n_refused = counters.n_refused;
    now.n_tokens = counters.n_tokens;
    now.n_decodes = counters.n_decodes;
    now.prefill_tokens = counters.n_prompt_tokens;
    now.prefill_s = seconds(counters.prefill_ns);
    now.decode_tokens = counters.n_decoded_tokens;
    now.decode_s = seconds(counters.decode_ns);
    now.graph_builds = graphs_->n_built;
    now.graph_reuses = graphs_->n_reused;
    now.graph_nodes_added = graphs_->n_nodes_added;
    now.n_queued = sched_->n_queued();
    now.attention_bytes = counters.n_attention_bytes;
    now.dropped_rows = counters.n_dropped_rows;
    now.captured_steps = counters.n_captured_steps;
    now.step_to_view_s = seconds(counters.step_to_view_ns);
    now.device_copies = copies_->n_copies;
    now.device_copy_bytes = copies_->n_bytes;
    now.device_copy_s = seconds(copies_->copy_ns);
    now.slots = sched_->slots();
    now.pool = sched_->pool()->stats();
    now.copied_bytes = now.pool.copied_bytes;
    return now;
}

engine_health engine::health() const {
    const auto seen = sched_->health();
    const bool is_forked = sched_->is_forked();  // the thread belongs to the parent
    return {name_of(is_forked ? engine_phase::ended : seen.phase), seen.quiet_s, seen.n_steps,
            sched_->is_lost()};
}

}  // namespace kqview
