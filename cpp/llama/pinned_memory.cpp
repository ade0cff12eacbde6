#include "llama/pinned_memory.h"

#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "llama/backend.h"

namespace kqview {

namespace {

class device_host_allocator final : public host_allocator {
public:
    device_host_allocator(ggml_backend_buffer_type_t type,
                          std::shared_ptr<const std::atomic<bool>> is_lost)
        : type_(type), is_lost_(std::move(is_lost)) {}

    void* allocate(std::size_t n_bytes, bool& is_pinned) noexcept override {
        if (*is_lost_) return nullptr;
        try {
            const llama_activity guard("allocating page-locked memory");
            auto* const buffer = ggml_backend_buft_alloc_buffer(type_, n_bytes);
            if (!buffer) return nullptr;
            auto* const data = ggml_backend_buffer_get_base(buffer);
            // ggml falls back to plain memory in silence: the buffer's type tells.
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
    const ggml_backend_buffer_type_t type_;
    const std::shared_ptr<const std::atomic<bool>> is_lost_;
    std::mutex mutex_;
    std::unordered_map<void*, ggml_backend_buffer_t> buffers_;
};

}  // namespace

std::shared_ptr<host_allocator> pinned_allocator(ggml_backend_dev_t device,
                                                 std::shared_ptr<const std::atomic<bool>> is_lost) {
    auto* const type = ggml_backend_dev_host_buffer_type(device);
    return type ? std::make_shared<device_host_allocator>(type, std::move(is_lost)) : nullptr;
}

}  // namespace kqview
