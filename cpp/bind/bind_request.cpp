// Bindings of a request's options, its sampling and its capture.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "bind/bind.h"
#include "sample/params.h"
#include "sample/work_limit.h"
#include "sched/engine.h"
#include "sched/request.h"
#include "tap/edits.h"
#include "tap/plan.h"

namespace kqview::bind {

namespace {

// Reads those attributes of a kqview.Sampling that the core's list of options names.
void read_sampling(sampling_params* self, const nb::object& sampling) {
    auto* const params = new (self) sampling_params;
    for_each_option([&](const auto& option) {
        auto& value = params->*option.member;
        value = nb::cast<std::remove_reference_t<decltype(value)>>(sampling.attr(option.name));
    });
}

template <typename Value>
struct named {
    const char* name;
    Value value;
};
constexpr named<row_kind> kinds[] = {{"qk", row_kind::logits},
                                     {"logits", row_kind::logits},
                                     {"scores", row_kind::scores},
                                     {"probs", row_kind::probs}};
constexpr named<row_type> types[] = {{"float32", row_type::f32}, {"float16", row_type::f16}};
constexpr named<row_reduction> reductions[] = {{"mean_heads", row_reduction::mean_heads},
                                               {"max_heads", row_reduction::max_heads},
                                               {"mean", row_reduction::mean},
                                               {"max", row_reduction::max}};
constexpr named<full_policy> policies[] = {
    {"raise", full_policy::raise}, {"wait", full_policy::wait}, {"drop", full_policy::drop}};

template <typename Value, std::size_t n>
Value value_of(const named<Value> (&choices)[n], const nb::object& name) {
    const auto text = nb::cast<std::string>(name);
    for (const auto& choice : choices) {
        if (text == choice.name) return choice.value;
    }
    throw error(errc::invalid_capture, "\"", text, "\" is unknown");
}

// A non-negative integer, saturated: no model has INT_MAX of anything.
int saturated(nb::handle number) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    constexpr int largest = std::numeric_limits<int>::max();
    return overflow > 0 ? largest : static_cast<int>(std::min<long long>(value, largest));
}

std::vector<int> indices_of(const nb::object& values) {
    std::vector<int> indices;
    for (const nb::handle value : values) indices.push_back(saturated(value));
    return indices;
}

// Reads a kqview.Capture.
capture_options read_capture(const nb::object& capture) {
    capture_options options;
    options.kind = value_of(kinds, capture.attr("kind"));
    options.type = value_of(types, capture.attr("dtype"));
    if (const nb::object layers = capture.attr("layers"); !layers.is_none())
        options.layers = indices_of(layers);
    if (const nb::object heads = capture.attr("heads"); !heads.is_none())
        options.heads = indices_of(heads);
    const nb::object reduce = capture.attr("reduce");
    if (!reduce.is_none()) options.reduce = value_of(reductions, reduce);
    if (const nb::object top_k = capture.attr("top_k"); !top_k.is_none())
        options.top_k = saturated(top_k);
    if (const nb::object spans = capture.attr("spans"); !spans.is_none()) {
        for (const nb::handle span : spans) {
            const nb::object stop = span[1];
            options.spans.push_back({saturated(nb::object(span[0])),
                                     stop.is_none() ? column_range::no_stop : saturated(stop)});
        }
    }
    options.hidden = indices_of(capture.attr("hidden"));
    return options;
}

// Resolves the capture for the engine's model. The request gets its own plan: the engine thread
// drops it, and dropping a Python object would take the GIL.
void set_capture(request_options& self, const engine& source, const nb::object& capture) {
    auto options = read_capture(capture);
    if (nb::cast<bool>(capture.attr("vocab_logits"))) options.n_vocab = source.n_vocab();
    self.capture = std::make_shared<const capture_plan>(options, source.facts().capture);
    self.on_full = value_of(policies, capture.attr("on_full"));
    self.wait_limit = std::chrono::duration<double>(nb::cast<double>(capture.attr("wait_s")));
}

}  // namespace

void bind_request(nb::module_& module) {
    nb::class_<sampling_params>(module, "SamplingParams")
        .def("__init__", &read_sampling, nb::arg("sampling"),
             "Read the attributes of a kqview.Sampling by name.");
    nb::class_<stop_flag>(module, "StopFlag", "Ends a computation of another thread early.")
        .def(nb::init<>())
        .def(
            "set", [](stop_flag& self) { self = true; }, "Nobody wants its result any more.")
        .def("is_set", [](const stop_flag& self) { return self.load(); });
    nb::class_<request_options>(module, "RequestOptions",
                                "Options of `Engine.submit`; see cpp/sched/request.h.")
        .def(nb::init<>())
        .def("set_capture", &set_capture, nb::arg("engine"), nb::arg("capture"),
             "Read the attributes of a kqview.Capture by name; raises InvalidCapture.")
        .def(
            "set_edits",
            // A copy: the engine thread drops it, and dropping a Python object would take the GIL.
            [](request_options& self, const engine& source, const edit_plan& plan) {
                self.edits =
                    std::make_shared<const edit_plan>(plan_for(source.facts().capture, plan));
            },
            nb::arg("engine"), nb::arg("plan"),
            "Carry out these edits; raises UnsupportedModel for layers that cannot be edited.")
        .def_prop_ro("edits", &request_options::keys_of_edits)
        .def_rw("prompt", &request_options::prompt)
        .def_rw("sampling", &request_options::sampling)
        .def_rw("constraint_command", &request_options::constraint_command,
                "Runs constraint_child.py, for a JSON schema or regular expression.")
        .def_rw("unwanted", &request_options::unwanted,
                "Set by another thread when nobody wants the request that is being submitted.")
        .def_rw("max_tokens", &request_options::max_tokens)
        .def_rw("stop_tokens", &request_options::stop_tokens)
        .def_rw("n_prompt_rows", &request_options::n_prompt_rows,
                "Number of tokens at the end of the prompt whose rows are captured as well.")
        .def_rw("only_attends", &request_options::only_attends,
                "Whether to evaluate the prompt without sampling a token.")
        .def_rw("embeds", &request_options::embeds,
                "Whether the result is the prompt's embedding; needs only_attends.")
        .def_rw("n_scores", &request_options::n_scores,
                "Number of last prompt tokens to score, fewer than there are; needs only_attends.")
        .def_rw("n_top_scores", &request_options::n_top_scores,
                "Number of best tokens that come with each score.")
        .def_rw("is_steered", &request_options::is_steered,
                "Whether the consumer gets a ForwardEvent for each forward pass, and answers it.")
        .def_rw("run_ahead", &request_options::run_ahead)
        .def_rw("n_draft_max", &request_options::n_draft_max)
        .def_rw("prediction", &request_options::prediction,
                "Ids that the text may consist of; guesses are made of them too.")
        .def_rw("priority", &request_options::priority)
        .def_rw("owner", &request_options::owner, "Requests of equal priority take turns by owner.")
        .def_rw("cache_prompt", &request_options::cache_prompt,
                "Whether tokens of the prompt may come from a cache.")
        .def_rw("is_alone", &request_options::is_alone,
                "Whether it shares no step with other requests.")
        .def_rw("n_reuse_min", &request_options::n_reuse_min,
                "Shortest run of tokens that a shift reuses; 0 turns shifts off.")
        .def_rw(
            "n_discard", &request_options::n_discard,
            "Tokens to discard after the first n_keep when the slot is full; 0 ends the request.")
        .def_rw("n_keep", &request_options::n_keep)
        .def_rw("lora", &request_options::lora,
                "A scale for each adapter of the model; none: those it was loaded with.")
        .def_rw("slot", &request_options::wanted_slot, "Slot to run in; -1 for any.");
}

}  // namespace kqview::bind
