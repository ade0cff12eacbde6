#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "bind/bind.h"
#include "sample/params.h"
#include "sched/llama_runner.h"

namespace kqview::bind {

namespace {

flash_attention flash_of(std::optional<bool> value) {
    if (!value) return flash_attention::automatic;
    return *value ? flash_attention::on : flash_attention::off;
}

std::shared_ptr<engine_core> open_engine(std::shared_ptr<model> source, int n_ctx, int n_slots,
                                         int n_batch, int n_ubatch, int n_threads,
                                         std::optional<bool> flash_attn, const std::string& kv_type,
                                         bool swa_full, const std::string& pooling,
                                         std::size_t attention_budget_bytes,
                                         std::size_t host_memory_bytes, bool poison,
                                         std::vector<std::uint64_t> aborted_decodes) {
    const nb::gil_scoped_release release;
    context_options options;
    options.n_ctx = n_ctx;
    options.n_slots = n_slots;
    options.n_batch = n_batch;
    options.n_ubatch = n_ubatch;
    options.n_threads = n_threads;
    options.flash = flash_of(flash_attn);
    options.kv_type = kv_type;
    options.swa_full = swa_full;
    options.pooling = pooling;
    options.host_memory_bytes = host_memory_bytes;
    options.aborted_decodes = std::move(aborted_decodes);
    auto runner = std::make_unique<llama_runner>(source, options);
    auto core = std::make_shared<engine_core>();
    core->embeddings = embedding_facts_of(*source);
    core->filters = std::make_unique<token_filters>(source);
    core->source = std::move(source);
    core->n_ctx = runner->n_ctx();
    core->n_chunk = runner->n_chunk();
    core->capture = runner->source();
    core->has_cache = runner->has_cache();
    core->can_split_embedding = runner->can_split_embedding();
    core->pooling = runner->pooling();
    core->shift_obstacle = runner->shift_obstacle();
    core->graphs = runner->graphs();
    core->copies = runner->copies();
    block_pool_options pool;
    pool.budget_bytes = attention_budget_bytes;
    pool.poison = poison;
    pool.allocator = runner->host_memory();
    core->sched =
        scheduler_handle(new scheduler(std::move(runner), block_pool::create(std::move(pool))));
    return core;
}

std::shared_ptr<generation_handle> submit(
    const std::shared_ptr<engine_core>& self, std::vector<token_id> prompt,
    const sampling_params& sampling, int max_tokens, std::vector<token_id> stop_tokens,
    const capture_plan* capture, full_policy on_full, double wait_s, int run_ahead, int priority,
    int n_prompt_rows, bool only_attends, bool embeds, slot_id slot,
    const std::string& constraint_library, int n_reuse_min, int n_keep, int n_discard) {
    check(sampling, self->source->n_vocab());
    request_options options;
    options.prompt = std::move(prompt);
    options.max_tokens = max_tokens;
    options.stop_tokens = std::move(stop_tokens);
    // A copy: the engine thread drops it, and Python's own would take the GIL for that.
    if (capture) options.capture = std::make_shared<const capture_plan>(*capture);
    options.on_full = on_full;
    options.wait_limit = std::chrono::duration<double>(wait_s);
    options.run_ahead = run_ahead;
    options.priority = priority;
    options.n_prompt_rows = n_prompt_rows;
    options.only_attends = only_attends || embeds;
    options.embeds = embeds;
    options.wanted_slot = slot;
    options.n_reuse_min = n_reuse_min;
    options.n_keep = n_keep;
    options.n_discard = n_discard;
    auto wanted = std::make_shared<request>(std::move(options));
    if (!wanted->only_attends) {
        const nb::gil_scoped_release release;  // a grammar or DRY takes its time
        wanted->picker = make_sampler_picker(*self->source, sampling, wanted->prompt,
                                             self->filters->make(sampling, constraint_library));
    }
    self->sched->submit(wanted);
    auto handle = std::make_shared<generation_handle>();
    handle->core = self;
    handle->wanted = std::move(wanted);
    return handle;
}

double seconds(std::uint64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

nb::dict stats_of(const engine_core& self) {
    self.sched->check_not_forked();
    const auto& counters = self.sched->counters();
    const auto& graphs = *self.graphs;
    const auto& copies = *self.copies;
    const auto pool = self.sched->pool()->stats();
    nb::dict pool_stats;
    pool_stats["budget_bytes"] = pool.budget_bytes;
    pool_stats["allocated_bytes"] = pool.allocated_bytes;
    pool_stats["leased_bytes"] = pool.leased_bytes;
    pool_stats["peak_leased_bytes"] = pool.peak_leased_bytes;
    pool_stats["pinned_bytes"] = pool.n_pinned_bytes;
    pool_stats["n_leased"] = pool.n_leased;
    pool_stats["n_blocks"] = pool.n_blocks;
    pool_stats["n_allocations"] = pool.n_allocations;
    pool_stats["n_reused"] = pool.n_reused;
    pool_stats["plain_fallbacks"] = pool.plain_fallbacks;
    nb::list slots;
    for (const auto& slot : self.sched->slots()) {
        slots.append(nb::make_tuple(name_of(slot.state), slot.n_tokens, slot.active));
    }
    nb::dict stats;
    stats["uptime_s"] = self.sched->uptime_s();
    stats["n_requests"] = counters.n_requests.load();
    stats["n_finished"] = counters.n_finished.load();
    stats["n_cancelled"] = counters.n_cancelled.load();
    stats["n_failed"] = counters.n_failed.load();
    stats["n_refused"] = counters.n_refused.load();
    stats["n_tokens"] = counters.n_tokens.load();
    stats["n_decodes"] = counters.n_decodes.load();
    stats["prefill_tokens"] = counters.n_prompt_tokens.load();
    stats["prefill_s"] = seconds(counters.prefill_ns.load());
    stats["decode_tokens"] = counters.n_decoded_tokens.load();
    stats["decode_s"] = seconds(counters.decode_ns.load());
    stats["slots"] = slots;
    stats["graph_builds"] = graphs.n_built.load();
    stats["graph_reuses"] = graphs.n_reused.load();
    stats["graph_nodes_added"] = graphs.n_nodes_added.load();
    stats["attention_bytes"] = counters.n_attention_bytes.load();
    stats["copied_bytes"] = pool.copied_bytes;
    stats["dropped_rows"] = counters.n_dropped_rows.load();
    stats["captured_steps"] = counters.n_captured_steps.load();
    stats["step_to_view_s"] = seconds(counters.step_to_view_ns.load());
    stats["device_copies"] = copies.n_copies.load();
    stats["device_copy_bytes"] = copies.n_bytes.load();
    stats["device_copy_s"] = seconds(copies.copy_ns.load());
    stats["n_queued"] = self.sched->n_queued();
    stats["pool"] = pool_stats;
    return stats;
}

nb::dict health_of(const engine_core& self) {
    const auto seen = self.sched->health();
    const bool is_forked = self.sched->is_forked();  // the thread is the parent's
    nb::dict health;
    health["phase"] = name_of(is_forked ? engine_phase::ended : seen.phase);
    health["quiet_s"] = seen.quiet_s;
    health["n_steps"] = seen.n_steps;
    health["is_lost"] = self.sched->is_lost();
    return health;
}

}  // namespace

void bind_engine(nb::module_& module) {
    nb::class_<engine_core>(module, "Engine")
        .def_static("open", &open_engine, nb::arg("model"), nb::arg("n_ctx"), nb::arg("n_slots"),
                    nb::arg("n_batch"), nb::arg("n_ubatch"), nb::arg("n_threads"),
                    nb::arg("flash_attn").none(), nb::arg("kv_type"), nb::arg("swa_full"),
                    nb::arg("pooling"), nb::arg("attention_budget_bytes"),
                    nb::arg("host_memory_bytes"), nb::arg("poison"), nb::arg("aborted_decodes"),
                    "Creates the context and starts the engine thread.")
        .def_prop_ro("n_ctx", [](const engine_core& self) { return self.n_ctx; })
        .def_prop_ro(
            "n_chunk", [](const engine_core& self) { return self.n_chunk; },
            "Most prompt tokens of one step.")
        .def_prop_ro("n_slots", [](const engine_core& self) { return self.sched->n_slots(); })
        .def_prop_ro(
            "attention_layers",
            [](const engine_core& self) {
                std::vector<std::tuple<int, int, int, float>> layers;
                for (const auto& layer : self.capture.attention) {
                    layers.emplace_back(layer.il, layer.n_head, layer.n_head_kv, layer.scale);
                }
                return layers;
            },
            "(layer, heads, KV heads, scale) of each layer with attention.")
        .def_prop_ro(
            "hidden_layers", [](const engine_core& self) { return self.capture.hidden_layers; },
            "Layers whose output can be captured.")
        .def_prop_ro(
            "has_cache", [](const engine_core& self) { return self.has_cache; },
            "False for encoders and diffusion models: a prompt is one step.")
        .def_prop_ro(
            "pooling", [](const engine_core& self) { return self.pooling; },
            "How a text becomes an embedding; empty where the context gives none.")
        .def_prop_ro(
            "can_split_embedding", [](const engine_core& self) { return self.can_split_embedding; },
            "False: a text that is embedded has to be one step.")
        .def_prop_ro(
            "n_classes", [](const engine_core& self) { return self.embeddings.n_classes; },
            "Values of the model's classifier head; 0 = it has none.")
        .def_prop_ro(
            "n_positions", [](const engine_core& self) { return self.embeddings.n_positions; },
            "Positions that the model learned; 0 = it has no such limit.")
        .def_prop_ro(
            "shift_obstacle", [](const engine_core& self) { return self.shift_obstacle; },
            "What keeps the cache's positions from being moved, empty when nothing does.")
        .def(
            "plan",
            [](const engine_core& self, row_kind kind, row_type type,
               std::optional<std::vector<int>> layers, std::optional<std::vector<int>> heads,
               row_reduction reduce, int top_k, std::vector<int> hidden) {
                return std::make_shared<capture_plan>(
                    capture_options{kind, type, std::move(layers), std::move(heads), reduce, top_k,
                                    std::move(hidden)},
                    self.capture);
            },
            nb::arg("kind"), nb::arg("type"), nb::arg("layers").none(), nb::arg("heads").none(),
            nb::arg("reduce") = row_reduction::none, nb::arg("top_k") = 0,
            nb::arg("hidden") = std::vector<int>{},
            "Resolves what to capture; raises InvalidCapture.")
        .def("submit", &submit, nb::arg("prompt"), nb::arg("sampling"), nb::arg("max_tokens"),
             nb::arg("stop_tokens"), nb::arg("capture").none(), nb::arg("on_full"),
             nb::arg("wait_s"), nb::arg("run_ahead"), nb::arg("priority"),
             nb::arg("n_prompt_rows") = 0, nb::arg("only_attends") = false,
             nb::arg("embeds") = false, nb::arg("slot") = -1, nb::arg("constraint_library") = "",
             nb::arg("n_reuse_min") = 0, nb::arg("n_keep") = 0, nb::arg("n_discard") = 0,
             "Queues a request. `n_prompt_rows`: of the prompt's last tokens, captured too; "
             "`only_attends`: no token is sampled; `embeds`: neither, its embedding is the result; "
             "`slot`: where it must run, -1 = anywhere; "
             "`constraint_library`: path of llguidance's; `n_reuse_min`: least run of tokens that "
             "is kept by a shift, 0 = none; `n_discard`: tokens behind the first `n_keep` that go "
             "when the slot is full, 0 = the request ends.")
        .def(
            "close", [](engine_core& self, double limit_s) { self.close(limit_s); },
            nb::arg("limit_s"), nb::call_guard<nb::gil_scoped_release>(),
            "Ends every request, and the engine thread, unless it hangs for longer than this.")
        .def("check_open", [](const engine_core& self) { self.sched->check_open(); })
        .def_prop_ro("is_closed", [](const engine_core& self) { return self.sched->is_closed(); })
        .def(
            "slot_tokens",
            [](const engine_core& self, slot_id id) { return self.sched->tokens_of(id); },
            nb::arg("slot"), "Ids in a slot's cache.")
        .def(
            "slot_n_exact",
            [](const engine_core& self, slot_id id) { return self.sched->n_exact_of(id); },
            nb::arg("slot"), "How many of them a fresh evaluation would compute alike.")
        .def(
            "slot_is_busy",
            [](const engine_core& self, slot_id id) { return self.sched->is_busy(id); },
            nb::arg("slot"))
        .def("health", &health_of, nb::sig("def health(self) -> dict[str, typing.Any]"),
             "What the engine thread does; takes no lock.")
        .def("stats", &stats_of, nb::sig("def stats(self) -> dict[str, typing.Any]"),
             "Counters since the engine was opened.")
        .def(
            "await_copies",
            [](const engine_core& self, bool wanted) { self.copies->are_awaited = wanted; },
            nb::arg("wanted"),
            "For benchmarks: whether a step ends only when its rows have left their devices.")
        .def(
            "pool_contains",
            [](const engine_core& self, std::uintptr_t address) {
                return self.sched->pool()->contains(reinterpret_cast<const void*>(address));
            },
            nb::arg("address"), "Does the address lie in a block of the pool?")
        .def(
            "count_copied",
            [](const engine_core& self, std::size_t n_bytes) {
                self.sched->pool()->count_copied(n_bytes);
            },
            nb::arg("n_bytes"), "Whoever copies attention out of a view says so here.");
}

}  // namespace kqview::bind
