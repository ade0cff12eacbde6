// Lists of heads in the memory of one device: what nodes read that pick heads before they reduce
// them.
// Owner:   device_tap. Threads: the engine thread (and the constructor's thread before that thread
//          starts).
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <memory>
#include <set>
#include <vector>

namespace kqview {

class head_lists {
public:
    explicit head_lists(ggml_backend_dev_t device) : device_(device) {}

    // Keeps these lists, each for `n_streams` streams, and no others: graphs that read one of the
    // others may not run any more. Raises out_of_memory.
    void keep(std::set<std::vector<int>> lists, int n_streams);

    // I32 ne=[n_heads, n_streams], the same list for each stream; null where it is not kept.
    ggml_tensor* find(const std::vector<int>& heads) const;

private:
    ggml_backend_dev_t device_;
    std::set<std::vector<int>> lists_;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors_{nullptr, ggml_free};
    std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer_{
        nullptr, ggml_backend_buffer_free};
    std::vector<ggml_tensor*> found_;  // in the order of lists_
};

}  // namespace kqview
