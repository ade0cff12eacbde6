// Bindings of edits: what a request changes in the model, and what cells remember of it. Python has
// checked the values.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "gguf/checks.h"
#include "sched/edit_history.h"
#include "tap/edits.h"
#include "tap/hook_channel.h"
#include "tap/plan.h"

namespace kqview::bind {

namespace {

// (start, stop) with a negative stop for none.
column_range range_of(const std::pair<int, int>& range) {
    return {range.first, range.second < 0 ? column_range::no_stop : range.second};
}

void edit_outputs(edit_plan& self, const std::vector<int>& layers, const nb::object& values,
                  std::vector<int> positions, bool replaces) {
    const auto [read, owner] = values_of("values", values);
    output_edit edit{replaces, std::move(positions),
                     std::make_shared<const std::vector<float>>(read.begin(), read.end())};
    for (const int il : layers) self.layers[il].outputs[edit_point::residual].push_back(edit);
}

std::shared_ptr<hook_channel> add_hook(edit_plan& self, const std::vector<int>& layers,
                                       const std::string& at, double limit_s) {
    const auto point =
        *std::ranges::find_if(edit_points, [&](edit_point one) { return at == name_of(one); });
    auto channel = std::make_shared<hook_channel>(std::chrono::duration<double>(limit_s));
    output_edit edit;
    edit.hook = std::make_shared<const hook_lease>(channel);
    for (const int il : layers) self.layers[il].outputs[point].push_back(edit);
    return channel;
}

void bias_scores(edit_plan& self, const std::pair<int, int>& queries,
                 const std::vector<std::pair<int, int>>& keys, float bias,
                 const std::vector<int>& layers, const std::vector<int>& heads) {
    score_bias edit{range_of(queries), {}, bias, heads};
    std::ranges::transform(keys, std::back_inserter(edit.keys), range_of);
    for (const int il : layers) self.layers[il].biases.push_back(edit);
    if (layers.empty()) self.biases.push_back(std::move(edit));
}

// A question, and the array of its rows, which own their memory: a function may keep it.
struct hook_call {
    int layer;
    nb::object rows;
};

nb::object next_call(hook_channel& self) {
    auto question = unlocked([&] { return self.next(); });
    if (!question) return nb::none();
    auto* const rows = new std::vector<float>(std::move(question->rows));
    const nb::capsule owner(
        rows, [](void* data) noexcept { delete static_cast<std::vector<float>*>(data); });
    return nb::cast(hook_call{question->layer, embedding_array(*rows, question->n_tokens, owner)});
}

void answer_call(hook_channel& self, const nb::object& rows) {
    if (rows.is_none()) return self.answer({});
    const auto [read, owner] = values_of("rows", rows);
    self.answer({read.begin(), read.end()});
}

// (n_tokens, n_values) of one head. Copied.
nb::object head_of(const head_record& self, int layer, int head) {
    const auto& found = self.layers.at(layer);
    const auto n = static_cast<std::size_t>(found.n_value);
    const auto row = n * static_cast<std::size_t>(found.n_head);
    auto* const values = new std::vector<float>;
    const nb::capsule owner(
        values, [](void* data) noexcept { delete static_cast<std::vector<float>*>(data); });
    for (auto at = static_cast<std::size_t>(head) * n; at < found.values.size(); at += row) {
        const auto* const from = found.values.data() + at;
        values->insert(values->end(), from, from + n);
    }
    return embedding_array(*values, static_cast<int>(values->size() / n), owner);
}

nb::dict read_directions(const std::string& path) {
    nb::dict found;
    for (auto& [layer, values] : read_control_vector(path)) {
        auto* const row = new std::vector<float>(std::move(values));
        const nb::capsule owner(
            row, [](void* data) noexcept { delete static_cast<std::vector<float>*>(data); });
        found[nb::int_(layer)] = embedding_array(*row, 1, owner);
    }
    return found;
}

}  // namespace

void bind_edits(nb::module_& module) {
    nb::class_<edit_key>(module, "EditKey")
        .def(nb::init<std::string, std::size_t>(), nb::arg("hash"), nb::arg("first"))
        .def_ro("hash", &edit_key::hash)
        .def_ro("first", &edit_key::first, "Position of the first token that it acts on.");
    nb::class_<edit_history::run>(module, "EditedCells", "Cells of a slot, up to the next run.")
        .def(
            "__init__",
            [](edit_history::run* self, std::size_t start, edit_keys keys) {
                new (self)
                    edit_history::run{start, std::make_shared<const edit_keys>(std::move(keys))};
            },
            nb::arg("start"), nb::arg("keys"))
        .def_ro("start", &edit_history::run::start)
        .def_prop_ro("keys", [](const edit_history::run& self) { return *self.keys; });
    nb::class_<hook_call>(module, "HookCall", "Activations that a hook is asked about.")
        .def_ro("layer", &hook_call::layer)
        .def_ro("rows", &hook_call::rows, "Float32 (n_tokens, n_embd), writable.");
    nb::class_<hook_channel>(module, "HookChannel", "Calls of a hook, for the thread that runs it.")
        .def("next", &next_call, nb::sig("def next(self) -> HookCall | None"),
             "Wait for the next call; None when there will be none.")
        .def("answer", &answer_call, nb::arg("rows").none(),
             "Values in place of the call's, one after the other; None leaves them.")
        .def("fail", &hook_channel::fail, nb::arg("why"), "End the request.");
    nb::class_<head_record>(module, "HeadRecord", "What heads gave out as a request ran.")
        .def(
            "n_heads",
            [](const head_record& self, int layer) { return self.layers.at(layer).n_head; },
            nb::arg("layer"))
        .def("head", &head_of, nb::arg("layer"), nb::arg("head"),
             nb::sig("def head(self, layer: int, head: int) -> "
                     "numpy.typing.NDArray[numpy.float32]"),
             "A copy of the values of one head, (n_tokens, n_values).");
    nb::class_<edit_plan>(module, "EditPlan", "All edits of a request; see cpp/tap/edits.h.")
        .def(nb::init<>())
        .def_ro("keys", &edit_plan::keys)
        .def(
            "add_key", [](edit_plan& self, const edit_key& key) { self.keys.push_back(key); },
            nb::arg("key"))
        .def("edit_outputs", &edit_outputs, nb::arg("layers"), nb::arg("values"),
             nb::arg("positions"), nb::arg("replaces"),
             "One vector for all tokens, or one for each position, one after the other.")
        .def(
            "scale_head",
            [](edit_plan& self, int layer, int head, float factor) {
                self.layers[layer].heads.push_back({head, factor});
            },
            nb::arg("layer"), nb::arg("head"), nb::arg("factor"))
        .def("hook", &add_hook, nb::arg("layers"), nb::arg("at"), nb::arg("limit_s"),
             "Ask a function about what layers have there.")
        .def(
            "set_head",
            [](edit_plan& self, int layer, int head, const nb::object& values,
               std::vector<int> positions) {
                const auto [read, owner] = values_of("values", values);
                self.layers[layer].set_heads.push_back(
                    {head, std::move(positions),
                     std::make_shared<const std::vector<float>>(read.begin(), read.end())});
            },
            nb::arg("layer"), nb::arg("head"), nb::arg("values"), nb::arg("positions"),
            "Values for each position, one after the other.")
        .def(
            "record_heads",
            [](edit_plan& self, const std::vector<int>& layers) {
                self.record = std::make_shared<head_record>();
                for (const int il : layers) {
                    self.record->layers[il];
                    self.layers[il];
                }
                return self.record;
            },
            nb::arg("layers"), "Keep what the heads of these layers give out.")
        .def("bias_scores", &bias_scores, nb::arg("queries"), nb::arg("keys"), nb::arg("bias"),
             nb::arg("layers"), nb::arg("heads"),
             "Ranges are (start, stop), a stop of -1 has no end; no layers or heads: all.");
    module.def("read_control_vector", &read_directions, nb::arg("path"),
               nb::sig("def read_control_vector(path: str) -> dict[int, "
                       "numpy.typing.NDArray[numpy.float32]]"),
               "Directions of a GGUF control vector by layer, each of shape (1, n_values).");
}

}  // namespace kqview::bind
