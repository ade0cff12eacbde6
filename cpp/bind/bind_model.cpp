#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "llama/context.h"
#include "llama/model.h"
#include "llama/model_facts.h"
#include "sched/engine.h"

namespace kqview::bind {

namespace {

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

std::string_view view_of(const nb::bytes& bytes) {
    return {static_cast<const char*>(bytes.data()), bytes.size()};
}

// A text below this size is done before another thread would hand the GIL back.
constexpr std::size_t short_text_bytes = 16 * 1024;

// Runs `call` without the GIL.
template <typename Call>
auto unlocked(Call&& call) {
    const nb::gil_scoped_release release;
    try {
        auto result = call();
        stay_if_exiting();
        return result;
    } catch (...) {
        stay_if_exiting();
        throw;
    }
}

nb::dict metadata_of(const model& source) {
    const auto pairs = unlocked([&] { return source.metadata(); });
    nb::dict all;
    for (const auto& [key, value] : pairs) all[to_text(key)] = to_text(value);
    return all;
}

// Loads without the GIL. Each progress step checks for signals, so Ctrl-C ends a load; exceptions
// from the callback propagate from here.
std::shared_ptr<model> load_model(model_options options, const nb::object& progress) {
    std::exception_ptr raised;
    options.progress = [&](float fraction) {
        stay_if_exiting();
        const nb::gil_scoped_acquire gil;
        try {
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            if (!progress.is_none()) progress(fraction);
            return true;
        } catch (...) {
            raised = std::current_exception();
            return false;
        }
    };
    const nb::gil_scoped_release release;
    try {
        return std::make_shared<model>(options);
    } catch (...) {
        if (raised) std::rethrow_exception(raised);
        throw;
    }
}

template <auto Member>
nb::str text(const model_facts& facts) {
    return to_text(facts.*Member);
}

template <auto Member>
std::optional<nb::str> text_or_none(const model_facts& facts) {
    const auto& value = facts.*Member;
    return value ? std::optional(to_text(*value)) : std::nullopt;
}

void bind_facts(nb::module_& module) {
    nb::class_<model_facts>(module, "ModelFacts", "Facts about a model, as llama.cpp reports them.")
        .def_ro("n_vocab", &model_facts::n_vocab)
        .def_ro("has_vocab", &model_facts::has_vocab)
        .def_ro("n_layer", &model_facts::n_layer)
        .def_ro("n_head", &model_facts::n_head)
        .def_ro("n_head_kv", &model_facts::n_head_kv)
        .def_ro("n_embd", &model_facts::n_embd)
        .def_ro("n_ctx_train", &model_facts::n_ctx_train)
        .def_ro("n_swa", &model_facts::n_swa, "Width of the sliding window; 0 if there is none.")
        .def_ro("n_params", &model_facts::n_params)
        .def_ro("size_bytes", &model_facts::size_bytes)
        .def_prop_ro("file_type", &text<&model_facts::file_type>)
        .def_ro("rope_freq_scale", &model_facts::rope_freq_scale)
        .def_ro("bos_token_id", &model_facts::bos_token_id)
        .def_ro("eos_token_id", &model_facts::eos_token_id)
        .def_ro("eot_token_id", &model_facts::eot_token_id)
        .def_ro("pad_token_id", &model_facts::pad_token_id)
        .def_ro("sep_token_id", &model_facts::sep_token_id)
        .def_ro("adds_bos", &model_facts::adds_bos)
        .def_ro("adds_eos", &model_facts::adds_eos)
        .def_ro("adds_sep", &model_facts::adds_sep)
        .def_ro("can_generate", &model_facts::can_generate,
                "Whether the model generates token by token.")
        .def_prop_ro("chat_template", &text_or_none<&model_facts::chat_template>)
        .def_prop_ro("rerank_template", &text_or_none<&model_facts::rerank_template>)
        .def_prop_ro("classifier_labels", [](const model_facts& self) {
            std::vector<nb::str> labels;
            for (const auto& label : self.classifier_labels) labels.push_back(to_text(label));
            return labels;
        });
}

double rpc_timeout_s(const model_options& self) {
    return std::chrono::duration<double>(self.rpc_wait).count();
}

void set_rpc_timeout_s(model_options& self, double seconds) {
    self.rpc_wait = std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

void bind_options(nb::module_& module) {
    nb::class_<lora_option>(module, "LoraAdapter")
        .def(nb::init<std::string, float>(), nb::arg("path"), nb::arg("scale"));
    nb::class_<rpc_endpoint>(module, "RpcEndpoint")
        .def(nb::init<std::string, int>(), nb::arg("host"), nb::arg("port"));
    nb::class_<model_options>(module, "ModelOptions",
                              "Options of `Model.load`; see cpp/llama/model.h.")
        .def(nb::init<>())
        .def_rw("path", &model_options::path)
        .def_rw("n_gpu_layers", &model_options::n_gpu_layers, "-1 offloads all layers.")
        .def_rw("lora", &model_options::lora)
        .def_rw("rpc_servers", &model_options::rpc_servers)
        .def_prop_rw("rpc_timeout_s", &rpc_timeout_s, &set_rpc_timeout_s)
        .def_rw("vocabulary_only", &model_options::vocabulary_only);
    nb::class_<rpc_devices::state>(module, "RpcState")
        .def_prop_ro("endpoint",
                     [](const rpc_devices::state& self) { return to_text(self.endpoint); })
        .def_ro("n_devices", &rpc_devices::state::n_devices)
        .def_prop_ro(
            "lost", [](const rpc_devices::state& self) { return to_text(self.loss); },
            "Why the server was lost; empty while it is available.");
}

}  // namespace

void bind_model(nb::module_& module) {
    bind_options(module);
    bind_facts(module);
    module.def(
        "check_device_memory",
        [](const model_options& source, const engine_options& context) {
            check_device_memory(source, context);
        },
        nb::arg("model"), nb::arg("context"), nb::call_guard<nb::gil_scoped_release>(),
        "Raise OutOfMemory if a device has no room for its part of the model and context.");
    module.def(
        "check_opening",
        [](const model_options& source, const engine_options& context) {
            check_opening(source, context);
        },
        nb::arg("model"), nb::arg("context"), nb::call_guard<nb::gil_scoped_release>(),
        "Raise the errors of opening that can be found without reading the weights.");
    nb::class_<model>(module, "Model")
        .def_static("load", &load_model, nb::arg("options"), nb::arg("progress") = nb::none(),
                    "Load a model, calling `progress(fraction)` meanwhile.")
        .def_prop_ro("facts", &facts_of)
        .def(
            "rpc_servers", [](const model& self) { return self.rpc().states(); },
            "State of each RPC server.")
        .def("metadata", &metadata_of, nb::sig("def metadata(self) -> dict[str, str]"),
             "Key-value pairs of the file as text, without arrays.")
        .def(
            "tokenize",
            [](const model& self, const nb::bytes& text, bool add_special, bool parse_special,
               std::size_t apart_bytes) {
                const auto view = view_of(text);
                const auto call = [&] {
                    return self.words().tokenize(view, add_special, parse_special, apart_bytes);
                };
                return view.size() < short_text_bytes ? call() : unlocked(call);
            },
            nb::arg("text"), nb::arg("add_special"), nb::arg("parse_special"),
            nb::arg("apart_bytes") = +vocabulary::long_text_bytes,
            "Ids of UTF-8 text; a text above `apart_bytes` is tokenized in pieces, to the same "
            "ids.")
        .def(
            "detokenize",
            [](const model& self, const std::vector<token_id>& ids) {
                return to_bytes(unlocked([&] { return self.words().detokenize(ids); }));
            },
            nb::arg("ids"), "Text of ids, as UTF-8.")
        .def(
            "token_bytes",
            [](const model& self, token_id id) { return to_bytes(self.token_bytes(id)); },
            nb::arg("id"), "Bytes of one token; a character may span several tokens.")
        .def(
            "control_tokens", [](const model& self) { return self.words().control_tokens(); },
            "Ids that text produces only with parse_special.")
        .def(
            "check_tokens",
            [](const model& self, const std::vector<token_id>& ids, const std::string& who) {
                for (const auto id : ids) self.check_token(id, who.c_str());
            },
            nb::arg("ids"), nb::arg("who"),
            "Raise InvalidToken if an id is outside the vocabulary.");
}

}  // namespace kqview::bind
