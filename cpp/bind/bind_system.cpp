// What this build was made from, the devices that it finds, and whether a model fits on them.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <string>
#include <string_view>
#include <utility>

#include "base/value_count.h"
#include "bind/bind.h"
#include "llama/backend.h"
#include "llama/context.h"
#include "llama/devices.h"

namespace kqview::bind {

namespace {

nb::object text_or_none(std::string_view text) {
    return text.empty() ? nb::none() : nb::object(to_text(text));
}

nb::list devices_to_python() {
    nb::list devices;
    for (const auto& device : list_devices()) {
        nb::dict entry;
        entry["name"] = device.name;
        entry["description"] = device.description;
        entry["type"] = device.type;
        entry["backend"] = device.backend;
        entry["memory_free_bytes"] = device.memory_free_bytes;
        entry["memory_total_bytes"] = device.memory_total_bytes;
        entry["compute_capability"] = text_or_none(device.compute_capability);
        entry["capture"] = name_of(device.capture);
        devices.append(entry);
    }
    return devices;
}

nb::dict build_info() {
    start_llama();
    nb::dict info;
    info["kqview_version"] = KQVIEW_VERSION;
    info["llama_cpp_commit"] = KQVIEW_LLAMA_COMMIT;
    info["is_portable"] = bool(KQVIEW_PORTABLE);
    info["cuda_version"] = text_or_none(KQVIEW_CUDA_VERSION);
    info["cuda_architectures"] = text_or_none(KQVIEW_CUDA_ARCHITECTURES);
    nb::list backends;
    nb::dict features;
    for (const auto& backend : list_backends()) {
        backends.append(backend.name);
        nb::dict flags;
        for (const auto& [name, value] : backend.features) flags[name.c_str()] = value;
        features[backend.name.c_str()] = flags;
    }
    info["backends"] = backends;
    info["backend_features"] = features;
    info["devices"] = devices_to_python();
    const auto driver = nvidia_driver();
    info["nvidia_driver"] = text_or_none(driver.version);
    info["nvidia_driver_cuda"] = text_or_none(driver.cuda_version);
    info["cpu_features"] = llama_print_system_info();
    return info;
}

// `options` are those of Engine.open; what does not change how much memory a context takes is not
// read.
context_options context_options_of(const nb::dict& options) {
    const auto number = [&](const char* name) { return nb::cast<int>(options[name]); };
    const nb::object flash = options["flash_attn"];
    context_options context;
    context.n_ctx = number("n_ctx");
    context.n_slots = number("n_slots");
    context.n_batch = number("n_batch");
    context.n_ubatch = number("n_ubatch");
    context.n_threads = number("n_threads");
    context.kv_type = nb::cast<std::string>(options["kv_type"]);
    context.swa_full = nb::cast<bool>(options["swa_full"]);
    if (!flash.is_none()) {
        context.flash = nb::cast<bool>(flash) ? flash_attention::on : flash_attention::off;
    }
    return context;
}

model_options model_options_of(std::string path, int n_gpu_layers) {
    model_options wanted;
    wanted.path = std::move(path);
    wanted.n_gpu_layers = n_gpu_layers;
    return wanted;
}

void check_devices(std::string path, int n_gpu_layers, const nb::dict& options) {
    const auto context = context_options_of(options);
    const nb::gil_scoped_release release;
    check_device_memory(model_options_of(std::move(path), n_gpu_layers), context);
}

void check_all(std::string path, int n_gpu_layers, const nb::dict& options,
               std::size_t host_memory_bytes) {
    auto context = context_options_of(options);
    context.host_memory_bytes = host_memory_bytes;
    const nb::gil_scoped_release release;
    check_opening(model_options_of(std::move(path), n_gpu_layers), context);
}

std::pair<std::size_t, std::size_t> count_values(nb::bytes data, bool packs) {
    const std::string_view view(data.c_str(), data.size());
    const nb::gil_scoped_release release;  // the caller holds the bytes
    const value_counts counts = packs ? count_msgpack(view) : count_json(view);
    return {counts.n_values, counts.n_members};
}

}  // namespace

void bind_system(nb::module_& module) {
    module.def("count_values", &count_values, nb::arg("data"), nb::arg("packs"),
               "Values of JSON, or of MessagePack, and how many of them are members of objects.");
    module.def("build_info", &build_info, nb::sig("def build_info() -> dict[str, typing.Any]"),
               "Version, llama.cpp commit, backends, devices and NVIDIA's driver.");
    module.def("check_device_memory", &check_devices, nb::arg("path"), nb::arg("n_gpu_layers"),
               nb::arg("options"),
               nb::sig("def check_device_memory(path: str, n_gpu_layers: int, "
                       "options: collections.abc.Mapping[str, object]) -> None"),
               "Raises OutOfMemory where a device cannot hold its part of a model and a context.");
    module.def("check_opening", &check_all, nb::arg("path"), nb::arg("n_gpu_layers"),
               nb::arg("options"), nb::arg("host_memory_bytes"),
               nb::sig("def check_opening(path: str, n_gpu_layers: int, "
                       "options: collections.abc.Mapping[str, object], "
                       "host_memory_bytes: int) -> None"),
               "Raises what opening would raise, as far as that shows without the weights.");
}

}  // namespace kqview::bind
