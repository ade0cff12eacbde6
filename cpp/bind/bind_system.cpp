// What this build was made from, and the devices that it finds.
#include <ggml-backend.h>
#include <llama.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include <llama.h>
#include "base/cpu_variant.h"
#include "base/value_count.h"
#include "bind/bind.h"

#include "llama/backend.h"
#include "llama/devices.h"
#include "tap/device/row_kernels.h"

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
        constexpr double least_capability = 8.0;
        auto* const handle = ggml_backend_dev_by_name(device.name.c_str());
        entry["row_kernel"] = handle && may_have_row_kernels(handle) &&
                              std::atof(device.compute_capability.c_str()) >= least_capability;
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
    info["cpu_variant"] = chosen_cpu_variant();
    nb::list variants;
    for (const auto& variant : cpu_variants()) variants.append(variant.name);
    info["cpu_variants"] = variants;
    info["gpu_backends"] = text_or_none(KQVIEW_GPU_BACKENDS);
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

value_counts count_values(nb::bytes data, bool packs) {
    const std::string_view view(data.c_str(), data.size());
    const nb::gil_scoped_release release;  // the caller holds the bytes
    return packs ? count_msgpack(view) : count_json(view);
}

}  // namespace

void bind_system(nb::module_& module) {
    nb::class_<value_counts>(module, "ValueCounts")
        .def_ro("n_values", &value_counts::n_values)
        .def_ro("n_members", &value_counts::n_members, "Of which members of objects.")
        .def_ro("depth", &value_counts::depth, "Most lists and objects around a value.");
    module.def("count_values", &count_values, nb::arg("data"), nb::arg("packs"),
               "Count the values in JSON or MessagePack data before any object is made of them.");
    module.def(
        "load_backend",
        [](const std::string& path) { load_backend(path, KQVIEW_VERSION, KQVIEW_LLAMA_COMMIT); },
        nb::arg("path"), "Register the devices of the backend in this library.");
    module.def("build_info", &build_info, nb::sig("def build_info() -> dict[str, typing.Any]"),
               "Version, llama.cpp commit, backends, devices and NVIDIA driver.");
}

}  // namespace kqview::bind
