#include <llama.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "bind/bind.h"
#include "llama/memory_plan.h"
#include "llama/model.h"
#include "llama/rpc_devices.h"
#include "memory/device_need.h"
#include "rpc/servers.h"
#include "sched/engine.h"

namespace kqview::bind {

namespace {

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

std::string_view view_of(const nb::bytes& bytes) {
    return {static_cast<const char*>(bytes.data()), bytes.size()};
}

// A text below this size is done before another thread would hand the GIL back.
constexpr std::size_t short_text_bytes = 16 * 1024;

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

// What `Get` of llama.cpp's interface says of the model, or of its vocabulary.
template <auto Get>
auto of_model(const model& self) {
    return Get(self.get());
}

template <auto Get>
bool of_vocabulary(const model& self) {
    return Get(self.vocab());
}

template <auto Get>
std::optional<token_id> id_of(const model& self) {
    const token_id id = Get(self.vocab());
    return id < 0 ? std::nullopt : std::optional(id);
}

std::optional<nb::str> template_of(const model& self, const char* name) {
    const char* const text = llama_model_chat_template(self.get(), name);
    return text ? std::optional(to_text(text)) : std::nullopt;
}

// Neither T5's decoder by itself nor a diffusion model can generate token by token.
bool can_generate(const model& self) {
    return llama_model_has_decoder(self.get()) && !self.is_encoder() &&
           !llama_model_is_diffusion(self.get());
}

std::vector<nb::str> classifier_labels(const model& self) {
    std::vector<nb::str> labels;
    for (std::uint32_t i = 0; i < llama_model_n_cls_out(self.get()); ++i) {
        if (const char* const label = llama_model_cls_label(self.get(), i))
            labels.push_back(to_text(label));
    }
    return labels;
}

void bind_facts(nb::class_<model>& bound) {
    bound.def_prop_ro("n_vocab", &model::n_vocab)
        .def_prop_ro("has_vocab", &model::has_vocab)
        .def_prop_ro("n_layer", &of_model<&llama_model_n_layer>)
        .def_prop_ro("n_head", &of_model<&llama_model_n_head>)
        .def_prop_ro("n_head_kv", &of_model<&llama_model_n_head_kv>)
        .def_prop_ro("n_embd", &of_model<&llama_model_n_embd>)
        .def_prop_ro("n_ctx_train", &of_model<&llama_model_n_ctx_train>)
        .def_prop_ro("n_swa", &of_model<&llama_model_n_swa>,
                     "Width of the sliding window; 0 if there is none.")
        .def_prop_ro("window_layers", &model::window_layers, "Layers that have one.")
        .def_prop_ro("n_params", &of_model<&llama_model_n_params>)
        .def_prop_ro("size_bytes", &of_model<&llama_model_size>)
        .def_prop_ro(
            "file_type",
            [](const model& self) { return llama_ftype_name(llama_model_ftype(self.get())); })
        .def_prop_ro("rope_freq_scale", &of_model<&llama_model_rope_freq_scale_train>)
        .def_prop_ro("bos_token_id", &id_of<&llama_vocab_bos>)
        .def_prop_ro("eos_token_id", &id_of<&llama_vocab_eos>)
        .def_prop_ro("eot_token_id", &id_of<&llama_vocab_eot>)
        .def_prop_ro("pad_token_id", &id_of<&llama_vocab_pad>)
        .def_prop_ro("sep_token_id", &id_of<&llama_vocab_sep>)
        .def_prop_ro("fim_prefix_id", &id_of<&llama_vocab_fim_pre>,
                     "Before the text that precedes a gap; these ids are for filling it.")
        .def_prop_ro("fim_suffix_id", &id_of<&llama_vocab_fim_suf>)
        .def_prop_ro("fim_middle_id", &id_of<&llama_vocab_fim_mid>)
        .def_prop_ro("fim_repository_id", &id_of<&llama_vocab_fim_rep>)
        .def_prop_ro("fim_file_id", &id_of<&llama_vocab_fim_sep>)
        .def_prop_ro("adds_bos", &of_vocabulary<&llama_vocab_get_add_bos>)
        .def_prop_ro("adds_eos", &of_vocabulary<&llama_vocab_get_add_eos>)
        .def_prop_ro("adds_sep", &of_vocabulary<&llama_vocab_get_add_sep>)
        .def_prop_ro("can_generate", &can_generate, "Whether the model generates token by token.")
        .def_prop_ro("chat_template", [](const model& self) { return template_of(self, nullptr); })
        .def_prop_ro("rerank_template",
                     [](const model& self) { return template_of(self, "rerank"); })
        .def_prop_ro("classifier_labels", &classifier_labels);
}

double rpc_timeout_s(const model_options& self) {
    return std::chrono::duration<double>(self.rpc_wait).count();
}

void set_rpc_timeout_s(model_options& self, double seconds) {
    self.rpc_wait = std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

void bind_model_options(nb::module_& module) {
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
        .def_rw("vocabulary_only", &model_options::vocabulary_only)
        .def_rw("predicts", &model_options::predicts,
                "Whether to load the layers that predict later tokens.");
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
    bind_model_options(module);
    nb::class_<device_need>(module, "DeviceNeed", "Memory that a model and its context need.")
        .def_ro("device", &device_need::device)
        .def_ro("free_bytes", &device_need::free_bytes, "0 for the host.")
        .def_prop_ro("needed_bytes", &device_need::needed_bytes);
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
            return check_opening(source, context);
        },
        nb::arg("model"), nb::arg("context"), nb::call_guard<nb::gil_scoped_release>(),
        "Raise the errors of opening that can be found without reading the weights.\n\n"
        "Returns the memory needed on the host (first) and on each device.");
    nb::class_<model> bound(module, "Model");
    bind_facts(bound);
    nb::class_<context_fit>(module, "ContextFit", "The context of a slot if none is asked for.")
        .def_ro("n_ctx", &context_fit::n_ctx)
        .def_ro("n_ctx_train", &context_fit::n_ctx_train)
        .def_ro("limited_by", &context_fit::limited_by,
                "Where a larger context has no room; empty if none is larger.")
        .def_ro("needed_bytes", &context_fit::needed_bytes, "Of the next larger context, there.")
        .def_ro("allowed_bytes", &context_fit::allowed_bytes);
    module.def(
        "fit_context",
        [](model& source, const engine_options& context) { return fit_context(source, context); },
        nb::arg("model"), nb::arg("context"), nb::call_guard<nb::gil_scoped_release>(),
        "Return the context to open with if `n_ctx` is 0.");
    bound
        .def_static("load", &load_model, nb::arg("options"), nb::arg("progress") = nb::none(),
                    "Load a model, calling `progress(fraction)` meanwhile.")
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
