#include "llama/nvidia_driver.h"

#ifndef _WIN32
#include <dlfcn.h>
#endif

#include <array>
#include <cctype>

namespace kqview {

namespace {

// The signatures below are those of cuda.h and nvml.h, whose functions return 0 for success and
// keep them over versions (a changed one gets another name). The libraries stay open: unloading
// them is not safe.
class shared_library {
public:
    explicit shared_library(const char* name) {
#ifndef _WIN32
        handle_ = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
#else
        (void)name;
#endif
    }

    template <typename Function>
    Function* find([[maybe_unused]] const char* name) const {
#ifndef _WIN32
        if (handle_) return reinterpret_cast<Function*>(dlsym(handle_, name));
#endif
        return nullptr;
    }

private:
    void* handle_ = nullptr;
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
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

bool is_same_address(const std::string& a, const std::string& b) {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (std::tolower(static_cast<unsigned char>(a[i])) !=
            std::tolower(static_cast<unsigned char>(b[i])))
            return false;
    }
    return true;
}

}  // namespace

nvidia_driver_info nvidia_driver() { return {driver_version(), cuda_version()}; }

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
            return std::to_string(major) + "." + std::to_string(minor);
        }
    }
    return {};
}

}  // namespace kqview
