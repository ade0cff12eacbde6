#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <exception>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"

namespace kqview::bind {

namespace {

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

std::string_view view_of(const nb::bytes& bytes) {
    return {static_cast<const char*>(bytes.data()), bytes.size()};
}

// Below it, a text is done before another thread would give the GIL back.
constexpr std::size_t short_text_bytes = 16 * 1024;

// `call` without the GIL.
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

// Loads with the GIL released. Each progress step looks at signals, so Ctrl-C ends a load; what the
// callback raises comes out of here.
std::shared_ptr<model> load_model(std::string path, int n_gpu_layers, const nb::object& progress,
                                  const std::vector<std::pair<std::string, float>>& lora,
                                  const std::vector<std::pair<std::string, int>>& rpc_servers,
                                  double rpc_timeout_s, bool vocabulary_only) {
    std::exception_ptr raised;
    model_options options;
    options.path = std::move(path);
    options.n_gpu_layers = n_gpu_layers;
    options.vocabulary_only = vocabulary_only;
    for (const auto& [host, port] : rpc_servers) options.rpc_servers.push_back({host, port});
    options.rpc_wait = std::chrono::milliseconds(static_cast<std::int64_t>(rpc_timeout_s * 1000));
    for (const auto& [adapter, scale] : lora) options.lora.push_back({adapter, scale});
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

nb::dict info_of(const model& source) {
    const auto* const handle = source.get();
    const auto* const vocab = source.vocab();
    nb::dict info;
    info["n_vocab"] = source.n_vocab();
    info["has_vocab"] = source.has_vocab();
    info["n_layer"] = llama_model_n_layer(handle);
    info["n_head"] = llama_model_n_head(handle);
    info["n_head_kv"] = llama_model_n_head_kv(handle);
    info["n_embd"] = llama_model_n_embd(handle);
    info["n_ctx_train"] = llama_model_n_ctx_train(handle);
    info["n_swa"] = llama_model_n_swa(handle);
    info["n_params"] = llama_model_n_params(handle);
    info["size_bytes"] = llama_model_size(handle);
    info["file_type"] = to_text(llama_ftype_name(llama_model_ftype(handle)));
    info["rope_freq_scale"] = llama_model_rope_freq_scale_train(handle);
    info["bos_token_id"] = llama_vocab_bos(vocab);
    info["eos_token_id"] = llama_vocab_eos(vocab);
    info["eot_token_id"] = llama_vocab_eot(vocab);
    info["pad_token_id"] = llama_vocab_pad(vocab);
    info["sep_token_id"] = llama_vocab_sep(vocab);
    info["adds_bos"] = llama_vocab_get_add_bos(vocab);
    info["adds_eos"] = llama_vocab_get_add_eos(vocab);
    info["adds_sep"] = llama_vocab_get_add_sep(vocab);
    // T5's decoder alone and diffusion models cannot be generated from token by token.
    info["can_generate"] = llama_model_has_decoder(handle) && !llama_model_has_encoder(handle) &&
                           !llama_model_is_diffusion(handle);
    const char* const chat_template = llama_model_chat_template(handle, nullptr);
    info["chat_template"] = chat_template ? nb::object(to_text(chat_template)) : nb::none();
    const char* const rerank_template = llama_model_chat_template(handle, "rerank");
    info["rerank_template"] = rerank_template ? nb::object(to_text(rerank_template)) : nb::none();
    nb::list labels;
    for (std::uint32_t i = 0; i < llama_model_n_cls_out(handle); ++i) {
        const char* const label = llama_model_cls_label(handle, i);
        if (label) labels.append(to_text(label));
    }
    info["classifier_labels"] = labels;
    return info;
}

}  // namespace

void bind_model(nb::module_& module) {
    nb::class_<model>(module, "Model")
        .def_static("load", &load_model, nb::arg("path"), nb::arg("n_gpu_layers"),
                    nb::arg("progress").none(),
                    nb::arg("lora") = std::vector<std::pair<std::string, float>>{},
                    nb::arg("rpc_servers") = std::vector<std::pair<std::string, int>>{},
                    nb::arg("rpc_timeout_s") = 300.0, nb::arg("vocabulary_only") = false,
                    "Loads a GGUF file and LoRA adapters (path, scale), layers on RPC servers "
                    "(host, port) too; `progress(fraction)` is called meanwhile.")
        .def("info", &info_of, nb::sig("def info(self) -> dict[str, typing.Any]"),
             "Facts of the model as llama.cpp has them; ids of -1 mean none.")
        .def(
            "rpc_servers",
            [](const model& self) {
                std::vector<std::tuple<nb::str, std::size_t, nb::str>> all;
                for (const auto& one : self.rpc().states()) {
                    all.emplace_back(to_text(one.endpoint), one.n_devices, to_text(one.loss));
                }
                return all;
            },
            "(endpoint, number of devices, why it is lost or \"\") of each RPC server.")
        .def("metadata", &metadata_of, nb::sig("def metadata(self) -> dict[str, str]"),
             "The GGUF's key-value pairs as text; no arrays.")
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
            "Ids of UTF-8 text; they do not depend on `apart_bytes`.")
        .def(
            "detokenize",
            [](const model& self, const std::vector<token_id>& ids) {
                return to_bytes(unlocked([&] { return self.words().detokenize(ids); }));
            },
            nb::arg("ids"), "UTF-8 text of ids.")
        .def(
            "token_bytes",
            [](const model& self, token_id id) { return to_bytes(self.token_bytes(id)); },
            nb::arg("id"), "Bytes of one token; a character may be spread over several.")
        .def(
            "control_tokens", [](const model& self) { return self.words().control_tokens(); },
            "Ids that text becomes only with parse_special.")
        .def(
            "check_tokens",
            [](const model& self, const std::vector<token_id>& ids, const std::string& who) {
                for (const auto id : ids) self.check_token(id, who.c_str());
            },
            nb::arg("ids"), nb::arg("who"), "Raises InvalidToken for ids outside the vocabulary.");
}

}  // namespace kqview::bind
