#include "llama/devices.h"

#include "base/size_text.h"
#include "llama/nvidia_driver.h"

namespace kqview {

namespace {

const char* type_name(enum ggml_backend_dev_type type) {
    switch (type) {
        case GGML_BACKEND_DEVICE_TYPE_CPU: return "CPU";
        case GGML_BACKEND_DEVICE_TYPE_GPU: return "GPU";
        case GGML_BACKEND_DEVICE_TYPE_IGPU: return "IGPU";
        case GGML_BACKEND_DEVICE_TYPE_ACCEL: return "ACCEL";
        default: return "META";
    }
}

template <typename Visit>
void for_each_device(Visit visit) {
    for (std::size_t i = 0; i < ggml_backend_dev_count(); ++i) visit(ggml_backend_dev_get(i));
}

const char* backend_name(ggml_backend_dev_t device) {
    auto* const backend = ggml_backend_dev_backend_reg(device);
    return backend ? ggml_backend_reg_name(backend) : "";
}

}  // namespace

capture_path capture_path_of(ggml_backend_dev_t device) {
    ggml_backend_dev_props props{};
    ggml_backend_dev_get_props(device, &props);
    if (props.type == GGML_BACKEND_DEVICE_TYPE_CPU ||
        props.type == GGML_BACKEND_DEVICE_TYPE_ACCEL) {
        return capture_path::zero_copy;
    }
    return props.caps.host_buffer ? capture_path::pinned : capture_path::plain;
}

const char* name_of(capture_path path) {
    switch (path) {
        case capture_path::zero_copy: return "zero-copy";
        case capture_path::pinned: return "pinned";
        case capture_path::plain: return "plain";
    }
    return "plain";
}

std::vector<device_info> list_devices() {
    std::vector<device_info> devices;
    for_each_device([&](ggml_backend_dev_t device) {
        ggml_backend_dev_props props{};
        ggml_backend_dev_get_props(device, &props);
        auto& info = devices.emplace_back();
        info.name = props.name;
        info.description = props.description;
        info.type = type_name(props.type);
        info.backend = backend_name(device);
        info.memory_free_bytes = props.memory_free;
        info.memory_total_bytes = props.memory_total;
        info.capture = capture_path_of(device);
        if (info.backend == "CUDA" && props.device_id) {
            info.compute_capability = nvidia_compute_capability(props.device_id);
        }
    });
    return devices;
}

std::vector<backend_info> list_backends() {
    std::vector<backend_info> backends;
    for (std::size_t i = 0; i < ggml_backend_reg_count(); ++i) {
        auto* const backend = ggml_backend_reg_get(i);
        auto& info = backends.emplace_back();
        info.name = ggml_backend_reg_name(backend);
        const auto features = reinterpret_cast<ggml_backend_get_features_t>(
            ggml_backend_reg_get_proc_address(backend, "ggml_backend_get_features"));
        if (!features) continue;
        for (const auto* feature = features(backend); feature->name; ++feature) {
            info.features.emplace_back(feature->name, feature->value);
        }
    }
    return backends;
}

bool has_offload_device() {
    bool found = false;
    for_each_device([&](ggml_backend_dev_t device) {
        const auto type = ggml_backend_dev_type(device);
        found =
            found || type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
    });
    return found;
}

std::string free_memory_text() {
    std::string text;
    for_each_device([&](ggml_backend_dev_t device) {
        std::size_t free_bytes = 0;
        std::size_t total_bytes = 0;
        ggml_backend_dev_memory(device, &free_bytes, &total_bytes);
        text += (text.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(device)) + " " +
                size_text(free_bytes) + " of " + size_text(total_bytes);
    });
    return text;
}

}  // namespace kqview
