#include "tap/device/head_lists.h"

#include <ggml-alloc.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

#include "base/error.h"

namespace kqview {

void head_lists::keep(std::set<std::vector<int>> lists, int n_streams) {
    if (lists == lists_) return;
    lists_.clear();
    found_.clear();
    buffer_.reset();
    tensors_.reset();
    if (lists.empty()) return;
    tensors_.reset(ggml_init({lists.size() * ggml_tensor_overhead() + 1, nullptr, true}));
    std::vector<ggml_tensor*> made;
    for (const auto& heads : lists) {
        made.push_back(ggml_new_tensor_2d(tensors_.get(), GGML_TYPE_I32,
                                          static_cast<std::int64_t>(heads.size()), n_streams));
    }
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(tensors_.get(),
                                                           ggml_backend_dev_buffer_type(device_)));
    if (!buffer_) {
        tensors_.reset();
        throw error(errc::out_of_memory,
                    "capture: " + std::string(ggml_backend_dev_name(device_)) +
                        " has no room for lists of heads; lower n_ctx, n_slots or n_gpu_layers");
    }
    auto tensor = made.begin();
    for (const auto& heads : lists) {
        std::vector<std::int32_t> rows;
        for (int i = 0; i < n_streams; ++i) rows.insert(rows.end(), heads.begin(), heads.end());
        ggml_backend_tensor_set(*tensor++, rows.data(), 0, rows.size() * sizeof(std::int32_t));
    }
    lists_ = std::move(lists);
    found_ = std::move(made);
}

ggml_tensor* head_lists::find(const std::vector<int>& heads) const {
    const auto found = lists_.find(heads);
    if (found == lists_.end()) return nullptr;
    return found_[static_cast<std::size_t>(std::distance(lists_.begin(), found))];
}

}  // namespace kqview
