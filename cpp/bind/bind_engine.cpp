#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "base/ids.h"
#include "bind/bind.h"
#include "bind/bind_generation.h"
#include "llama/context_params.h"
#include "llama/devices.h"
#include "llama/model.h"
#include "sched/delivery.h"
#include "sched/engine.h"
#include "sched/llama_runner.h"
#include "sched/request.h"
#include "sched/slot_table.h"
#include "tap/plan.h"
#include "tap/step_result.h"

namespace kqview::bind {

namespace {

std::optional<bool> flash_attn(const engine_options& self) {
    if (self.flash == flash_attention::automatic) return std::nullopt;
    return self.flash == flash_attention::on;
}

void set_flash_attn(engine_options& self, std::optional<bool> wanted) {
    self.flash = !wanted   ? flash_attention::automatic
                 : *wanted ? flash_attention::on
                           : flash_attention::off;
}

std::optional<bool> rows_beside(const engine_options& self) {
    if (self.device_rows == rows_place::automatic) return std::nullopt;
    return self.device_rows == rows_place::beside;
}

void set_rows_beside(engine_options& self, std::optional<bool> wanted) {
    self.device_rows = !wanted   ? rows_place::automatic
                       : *wanted ? rows_place::beside
                                 : rows_place::in_graph;
}

std::shared_ptr<engine> open_engine(std::shared_ptr<model> source, const engine_options& options) {
    const nb::gil_scoped_release release;
    // Joining the engine thread must not block other Python threads.
    return {new engine(std::move(source), options), [](engine* opened) {
                const nb::gil_scoped_release unlock;
                delete opened;
            }};
}

std::shared_ptr<generation_handle> submit(const std::shared_ptr<engine>& self,
                                          const request_options& wanted) {
    const nb::gil_scoped_release release;
    return std::make_shared<generation_handle>(self, self->submit(wanted));
}

template <auto Member>
const auto& fact(const engine& self) {
    return self.facts().*Member;
}

void close(engine& self, double limit_s) {
    self.close(std::chrono::duration<double>(std::clamp(limit_s, 0.0, 1e6)));
}

void bind_engine_options(nb::module_& module) {
    nb::class_<engine_options>(module, "EngineOptions",
                               "Options of `Engine.open`; see cpp/sched/engine.h.")
        .def(nb::init<>())
        .def_rw("n_ctx", &engine_options::n_ctx,
                "0 uses the number that the model was trained with; see `fit_context`.")
        .def_rw("n_slots", &engine_options::n_slots)
        .def_rw("n_batch", &engine_options::n_batch)
        .def_rw("n_ubatch", &engine_options::n_ubatch)
        .def_rw("n_threads", &engine_options::n_threads)
        .def_prop_rw("flash_attn", &flash_attn, &set_flash_attn, nb::for_setter(nb::arg().none()),
                     "None lets llama.cpp decide.")
        .def_rw("attends", &engine_options::attends)
        .def_prop_rw("rows_beside", &rows_beside, &set_rows_beside,
                     nb::for_setter(nb::arg().none()), "None: where that is cheaper.")
        .def_rw("kv_type", &engine_options::kv_type)
        .def_rw("swa_full", &engine_options::swa_full)
        .def_rw("guesses", &engine_options::guesses,
                "Whether texts may be guessed on: recurrent state is kept for it.")
        .def_rw("predicts", &engine_options::predicts,
                "For `check_opening`: a context of the layers that predict later tokens.")
        .def_rw("pooling", &engine_options::pooling, "Empty uses what the model's file specifies.")
        .def_rw("host_memory_bytes", &engine_options::host_memory_bytes)
        .def_rw("free_memory_bytes", &engine_options::free_memory_bytes,
                "On the host, before the weights are loaded; 0 if unknown.")
        .def_rw("attention_budget_bytes", &engine_options::attention_budget_bytes)
        .def_rw("pinned_bytes", &engine_options::pinned_bytes)
        .def_rw("max_gap_ms", &engine_options::max_gap_ms, "0: twice a text's own step.")
        .def_rw("checkpoint_bytes", &engine_options::checkpoint_bytes,
                nb::for_setter(nb::arg().none()), "None: 16 checkpoints a slot.")
        .def_rw("checkpoint_every", &engine_options::checkpoint_every)
        .def_rw("draft", &engine_options::draft, nb::for_setter(nb::arg().none()),
                "A model that guesses how texts go on; the engine's own one: its layers for that.")
        .def_rw("aborted_decodes", &engine_options::aborted_decodes,
                "For tests: decodes, counted from 1, that are aborted.")
        .def_rw("poisons_blocks", &engine_options::poisons_blocks,
                "For tests: whether to overwrite the blocks of released views.");
}

// The counters of an engine, read when they are asked for.
struct reading {
    explicit reading(std::shared_ptr<engine> self) : of(std::move(self)) {
        of->sched().check_not_forked();
        pool = of->sched().pool()->stats();
    }

    const engine_counters& owner(const engine_counters*) const { return of->sched().counters(); }
    const graph_counters& owner(const graph_counters*) const { return of->graphs(); }
    const copy_counters& owner(const copy_counters*) const { return of->copies(); }

    std::shared_ptr<engine> of;
    block_pool_stats pool;
};

template <class Counters, class Number>
Number value_of(const reading& now, std::atomic<Number> Counters::*member) {
    return now.owner(static_cast<const Counters*>(nullptr)).*member;
}

template <auto Member>
auto count(const reading& now) {
    return value_of(now, Member);
}

template <auto Member>
double seconds(const reading& now) {
    return static_cast<double>(value_of(now, Member)) * 1e-9;
}

// The fields are named as in the public classes of kqview.types.
void bind_stats(nb::module_& module) {
    nb::class_<block_pool_stats>(module, "PoolStats")
        .def_ro("budget_bytes", &block_pool_stats::budget_bytes)
        .def_ro("allocated_bytes", &block_pool_stats::allocated_bytes)
        .def_ro("leased_bytes", &block_pool_stats::leased_bytes)
        .def_ro("peak_leased_bytes", &block_pool_stats::peak_leased_bytes)
        .def_ro("pinned_bytes", &block_pool_stats::pinned_bytes)
        .def_ro("n_leased", &block_pool_stats::n_leased)
        .def_ro("n_blocks", &block_pool_stats::n_blocks)
        .def_ro("n_allocations", &block_pool_stats::n_allocations)
        .def_ro("n_reused", &block_pool_stats::n_reused)
        .def_ro("plain_fallbacks", &block_pool_stats::plain_fallbacks);
    nb::class_<slot_view>(module, "SlotStats")
        .def_prop_ro("state", [](const slot_view& self) { return name_of(self.state); })
        .def_ro("n_tokens", &slot_view::n_tokens)
        .def_ro("n_exact", &slot_view::n_exact,
                "Number of leading ids whose cache equals that of a fresh evaluation.")
        .def_ro("generation", &slot_view::active,
                "Id of the generation that uses the slot; 0 if none does.");
    nb::class_<reading>(module, "EngineStats")
        .def_prop_ro("uptime_s", [](const reading& now) { return now.of->sched().uptime_s(); })
        .def_prop_ro("n_requests", &count<&engine_counters::n_requests>)
        .def_prop_ro("n_finished", &count<&engine_counters::n_finished>)
        .def_prop_ro("n_cancelled", &count<&engine_counters::n_cancelled>)
        .def_prop_ro("n_failed", &count<&engine_counters::n_failed>)
        .def_prop_ro("n_refused", &count<&engine_counters::n_refused>)
        .def_prop_ro("n_tokens", &count<&engine_counters::n_tokens>)
        .def_prop_ro("n_decodes", &count<&engine_counters::n_decodes>)
        .def_prop_ro("prefill_tokens", &count<&engine_counters::n_prompt_tokens>)
        .def_prop_ro("prefill_s", &seconds<&engine_counters::prefill_ns>)
        .def_prop_ro("decode_tokens", &count<&engine_counters::n_decoded_tokens>)
        .def_prop_ro("decode_s", &seconds<&engine_counters::decode_ns>)
        .def_prop_ro("graph_builds", &count<&graph_counters::n_built>)
        .def_prop_ro("attended_layers", &count<&graph_counters::n_attended>)
        .def_prop_ro("graph_reuses", &count<&graph_counters::n_reused>)
        .def_prop_ro("graph_nodes_added", &count<&graph_counters::n_nodes_added>)
        .def_prop_ro("n_queued", [](const reading& now) { return now.of->sched().n_queued(); })
        .def_prop_ro("n_parked", [](const reading& now) { return now.of->sched().n_parked(); })
        .def_prop_ro("n_parkings", &count<&engine_counters::n_parkings>)
        .def_prop_ro("attention_bytes", &count<&engine_counters::n_attention_bytes>)
        .def_prop_ro("copied_bytes", [](const reading& now) { return now.pool.copied_bytes; })
        .def_prop_ro("n_drafts", &count<&engine_counters::n_drafts>)
        .def_prop_ro("draft_tokens", &count<&engine_counters::n_draft_tokens>)
        .def_prop_ro("accepted_tokens", &count<&engine_counters::n_accepted_tokens>)
        .def_prop_ro("draft_ties", &count<&engine_counters::n_ties>)
        .def_prop_ro("dropped_rows", &count<&engine_counters::n_dropped_rows>)
        .def_prop_ro("captured_steps", &count<&engine_counters::n_captured_steps>)
        .def_prop_ro("step_to_view_s", &seconds<&engine_counters::step_to_view_ns>)
        .def_prop_ro("device_copies", &count<&copy_counters::n_copies>)
        .def_prop_ro("device_copy_bytes", &count<&copy_counters::n_bytes>)
        .def_prop_ro("device_kernel_rows", &count<&copy_counters::n_kernel_rows>)
        .def_prop_ro("device_row_bytes", &count<&copy_counters::reserved_bytes>)
        .def_prop_ro("device_copy_s", &seconds<&copy_counters::copy_ns>)
        .def_prop_ro("slots", [](const reading& now) { return now.of->sched().slots(); })
        .def_ro("pool", &reading::pool);
    nb::class_<engine_health>(module, "EngineHealth")
        .def_ro("phase", &engine_health::phase)
        .def_ro("quiet_s", &engine_health::quiet_s)
        .def_ro("n_steps", &engine_health::n_steps)
        .def_ro("is_lost", &engine_health::is_lost);
    nb::class_<attention_layer>(module, "AttentionLayer")
        .def_ro("layer", &attention_layer::il)
        .def_ro("n_head", &attention_layer::n_head)
        .def_ro("n_head_kv", &attention_layer::n_head_kv)
        .def_ro("scale", &attention_layer::scale)
        .def_ro("has_sinks", &attention_layer::has_sinks)
        .def_ro("on_device", &attention_layer::is_on_device);
}

}  // namespace

void bind_engine(nb::module_& module) {
    bind_engine_options(module);
    bind_stats(module);
    nb::class_<engine>(module, "Engine")
        .def_static("open", &open_engine, nb::arg("model"), nb::arg("options"),
                    "Create the context and start the engine thread.")
        .def_prop_ro("n_ctx", &fact<&engine_facts::n_ctx>)
        .def_prop_ro("n_chunk", &fact<&engine_facts::n_chunk>,
                     "Maximum number of prompt tokens in one step.")
        .def_prop_ro("n_slots", &engine::n_slots)
        .def_prop_ro(
            "attention_layers", [](const engine& self) { return self.facts().capture.attention; },
            "The layers with attention, in ascending order.")
        .def_prop_ro(
            "has_cache", &fact<&engine_facts::has_cache>,
            "False for encoders and diffusion models, which evaluate a prompt in one step.")
        .def_prop_ro("pooling", &fact<&engine_facts::pooling>,
                     "How a text becomes an embedding; empty if the context provides none.")
        .def_prop_ro("memory_bytes", &fact<&engine_facts::memory_bytes>,
                     "Bytes of weights, KV cache and compute buffers, on the host and on devices.")
        .def_prop_ro("can_split_embedding", &fact<&engine_facts::can_split_embedding>,
                     "Whether a text to embed may take several steps.")
        .def_prop_ro(
            "n_classes", [](const engine& self) { return self.facts().embeddings.n_classes; },
            "Number of values of the classifier head; 0 if there is none.")
        .def_prop_ro(
            "n_positions", [](const engine& self) { return self.facts().embeddings.n_positions; },
            "Number of positions that the model has learned; 0 if it has no such limit.")
        .def_prop_ro("shift_obstacle", &fact<&engine_facts::shift_obstacle>,
                     "Why positions in the cache cannot be moved; empty if they can.")
        .def_prop_ro("can_take_back", &fact<&engine_facts::can_take_back>,
                     "Whether a slot can drop the tokens of its last step.")
        .def("submit", &submit, nb::arg("options"), "Queue a request.")
        .def("close", &close, nb::arg("limit_s"), nb::call_guard<nb::gil_scoped_release>(),
             "End all requests and the engine thread, unless it hangs for longer than limit_s.")
        .def("check_open", [](const engine& self) { self.sched().check_open(); })
        .def_prop_ro("is_closed", [](const engine& self) { return self.sched().is_closed(); })
        .def(
            "slot_tokens",
            [](const engine& self, slot_id id) { return self.sched().tokens_of(id); },
            nb::arg("slot"), "Ids in a slot's cache.")
        .def(
            "slot_checkpoints",
            [](const engine& self, slot_id id) { return self.sched().checkpoints_of(id); },
            nb::arg("slot"), "Numbers of tokens that a slot can go back to; ascending.")
        .def("health", &engine::health, "What the engine thread is doing; takes no lock.")
        .def(
            "stats", [](std::shared_ptr<engine> self) { return reading(std::move(self)); },
            "Counters since the engine was opened.")
        .def("await_copies", &engine::await_copies, nb::arg("wanted"),
             "For benchmarks: whether a step ends only after its rows have left their devices.")
        .def(
            "pool_contains",
            [](const engine& self, std::uintptr_t address) {
                return self.sched().pool()->contains(reinterpret_cast<const void*>(address));
            },
            nb::arg("address"), "For tests: whether the address lies in a block of the pool.");
}

}  // namespace kqview::bind
