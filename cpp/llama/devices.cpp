#include "llama/devices.h"

#include <ggml-alloc.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/system.h"
#include "llama/backend.h"

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

// ---- NVIDIA's driver

// The signatures below are those of cuda.h and nvml.h. Their functions return 0 for success and are
// stable across versions (a changed function gets another name).
class shared_library {
public:
    explicit shared_library(const char* name) : handle_(open_library(name)) {}

    template <typename Function>
    Function* find(const char* name) const {
        return reinterpret_cast<Function*>(find_symbol(handle_, name));
    }

private:
    void* const handle_;
};

const shared_library& cuda_driver() {
    static const shared_library library("libcuda.so.1");
    return library;
}

std::string driver_version() {
    static const shared_library library("libnvidia-ml.so.1");
    auto* const start = library.find<int()>("nvmlInit_v2");
    auto* const stop = library.find<int()>("nvmlShutdown");
    auto* const get = library.find<int(char*, unsigned)>("nvmlSystemGetDriverVersion");
    if (!start || !stop || !get || start() != 0) return {};
    std::array<char, 96> text{};
    const bool is_known = get(text.data(), static_cast<unsigned>(text.size())) == 0;
    stop();
    return is_known ? std::string(text.data()) : std::string();
}

std::string cuda_version() {
    auto* const get = cuda_driver().find<int(int*)>("cuDriverGetVersion");
    int number = 0;  // 1000 * major + 10 * minor
    if (!get || get(&number) != 0 || number <= 0) return {};
    return text_of(number / 1000, ".", number % 1000 / 10);
}

bool is_same_address(const std::string& a, const std::string& b) {
    const auto lower = [](unsigned char c) { return std::tolower(c); };
    return std::ranges::equal(a, b, {}, lower, lower);
}

// The compute capability, such as "9.0", of the device with this PCI address ("0000:c1:00.0").
// Initialises CUDA in the process: call only if ggml's CUDA backend has a device.
std::string nvidia_compute_capability(const std::string& pci_address) {
    // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    constexpr int major_attribute = 75;
    constexpr int minor_attribute = 76;
    const auto& driver = cuda_driver();
    auto* const start = driver.find<int(unsigned)>("cuInit");
    auto* const count = driver.find<int(int*)>("cuDeviceGetCount");
    auto* const open = driver.find<int(int*, int)>("cuDeviceGet");
    auto* const address = driver.find<int(char*, int, int)>("cuDeviceGetPCIBusId");
    auto* const attribute = driver.find<int(int*, int, int)>("cuDeviceGetAttribute");
    if (!start || !count || !open || !address || !attribute || start(0) != 0) return {};
    int n_devices = 0;
    if (count(&n_devices) != 0) return {};
    for (int i = 0; i < n_devices; ++i) {
        int device = 0;
        int major = 0;
        int minor = 0;
        std::array<char, 32> text{};
        if (open(&device, i) == 0 &&
            address(text.data(), static_cast<int>(text.size()), device) == 0 &&
            is_same_address(text.data(), pci_address) &&
            attribute(&major, major_attribute, device) == 0 &&
            attribute(&minor, minor_attribute, device) == 0) {
            return text_of(major, ".", minor);
        }
    }
    return {};
}

// ---- page-locked memory

class device_host_allocator final : public host_allocator {
public:
    device_host_allocator(ggml_backend_dev_t device, ggml_backend_buffer_type_t type,
                          std::shared_ptr<const std::atomic<bool>> is_lost)
        : device_(device), type_(type), is_lost_(std::move(is_lost)) {}

    void* allocate(std::size_t n_bytes, bool& is_pinned) noexcept override {
        if (*is_lost_) return nullptr;
        try {
            const llama_activity guard("allocating page-locked memory");
            // CUDA locks pages for the current device of a thread; this makes it ours.
            std::size_t n_free = 0, n_total = 0;
            ggml_backend_dev_memory(device_, &n_free, &n_total);
            auto* const buffer = ggml_backend_buft_alloc_buffer(type_, n_bytes);
            if (!buffer) return nullptr;
            auto* const data = ggml_backend_buffer_get_base(buffer);
            // ggml falls back to plain memory silently; the buffer's type tells.
            is_pinned = ggml_backend_buffer_get_type(buffer) == type_;
            const std::lock_guard lock(mutex_);
            buffers_.emplace(data, buffer);
            return data;
        } catch (...) {
            return nullptr;
        }
    }

    void release(void* data, std::size_t /*n_bytes*/, bool /*is_pinned*/) noexcept override {
        if (*is_lost_) return;
        ggml_backend_buffer_t buffer = nullptr;
        {
            const std::lock_guard lock(mutex_);
            const auto found = buffers_.find(data);
            if (found == buffers_.end()) return;
            buffer = found->second;
            buffers_.erase(found);
        }
        ggml_backend_buffer_free(buffer);
    }

    bool offers_pinned() const noexcept override { return true; }

private:
    const ggml_backend_dev_t device_;
    const ggml_backend_buffer_type_t type_;
    const std::shared_ptr<const std::atomic<bool>> is_lost_;
    std::mutex mutex_;
    std::unordered_map<void*, ggml_backend_buffer_t> buffers_;
};

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
    constexpr std::array names{"zero-copy", "pinned", "plain"};
    return names[static_cast<std::size_t>(path)];
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

std::vector<ggml_backend_dev_t> local_devices(enum ggml_backend_dev_type type) {
    std::vector<ggml_backend_dev_t> found;
    for_each_device([&](ggml_backend_dev_t device) {
        if (ggml_backend_dev_type(device) == type) found.push_back(device);
    });
    return found;
}

std::vector<ggml_backend_dev_t> local_gpus() {
    auto found = local_devices(GGML_BACKEND_DEVICE_TYPE_GPU);
    return found.empty() ? local_devices(GGML_BACKEND_DEVICE_TYPE_IGPU) : found;
}

std::string free_memory_text() {
    std::string text;
    for_each_device([&](ggml_backend_dev_t device) {
        std::size_t free_bytes = 0;
        std::size_t total_bytes = 0;
        ggml_backend_dev_memory(device, &free_bytes, &total_bytes);
        text += text_of(text.empty() ? "" : ", ", ggml_backend_dev_name(device), " ",
                        size_text(free_bytes), " of ", size_text(total_bytes));
    });
    return text;
}

nvidia_driver_info nvidia_driver() { return {driver_version(), cuda_version()}; }

std::shared_ptr<host_allocator> pinned_allocator(ggml_backend_dev_t device,
                                                 std::shared_ptr<const std::atomic<bool>> is_lost) {
    auto* const type = ggml_backend_dev_host_buffer_type(device);
    return type ? std::make_shared<device_host_allocator>(device, type, std::move(is_lost))
                : nullptr;
}

}  // namespace kqview
