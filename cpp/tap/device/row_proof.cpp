#include "tap/device/row_proof.h"

#include <ggml-alloc.h>
#include <ggml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "tap/device/row_step.h"

namespace kqview {

namespace {

constexpr int n_cells = 300;  // more than one tile
constexpr int n_heads_most = 16;
// Of a row's largest value: ggml rounds queries to float16 or, for quantised keys, to bytes.
constexpr float tolerance = 5e-3f, tolerance_quantised = 3e-2f;

using backend_handle = std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)>;
using event_handle = std::unique_ptr<ggml_backend_event, decltype(&ggml_backend_event_free)>;
using context_handle = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
using buffer_handle = std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>;

// Reproducible, and about normal: the sum of a few uniform values.
std::vector<float> random_values(std::size_t n, std::uint32_t seed) {
    std::vector<float> values(n);
    for (auto& value : values) {
        value = 0.0f;
        for (int i = 0; i < 4; ++i) {
            seed = seed * 1664525u + 1013904223u;
            value += static_cast<float>(seed >> 8) / static_cast<float>(1 << 23) - 1.0f;
        }
    }
    return values;
}

// One KV head with the heads that share it: probabilities by nodes, and by the kernels.
class small_case {
public:
    small_case(ggml_backend_dev_t device, const row_shape& shape)
        : shape_(shape),
          n_heads_(std::min(shape.n_head / shape.n_head_kv, n_heads_most)),
          scale_(1.0f / std::sqrt(static_cast<float>(shape.n_dim))),
          stream_(ggml_backend_dev_init(device, nullptr), ggml_backend_free),
          before_(ggml_backend_event_new(device), ggml_backend_event_free),
          after_(ggml_backend_event_new(device), ggml_backend_event_free) {
        constexpr std::size_t n_tensors = 8;
        tensors_.reset(
            ggml_init({n_tensors * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
        auto* const context = tensors_.get();
        const auto type = static_cast<ggml_type>(shape.key_type);
        keys_ = ggml_new_tensor_3d(context, type, shape.n_dim, n_cells, 1);
        query_ = ggml_new_tensor_3d(context, GGML_TYPE_F32, shape.n_dim, 1, n_heads_);
        memory_ = ggml_new_tensor_1d(context, GGML_TYPE_F32, 4 * n_heads_ * n_cells);
        probs_ =
            ggml_soft_max_ext(context, ggml_mul_mat(context, keys_, query_), nullptr, scale_, 0.0f);
        graph_ = ggml_new_graph(context);
        ggml_build_forward_expand(graph_, probs_);
        ok_ = stream_ && before_ && after_;
        for (const auto* const node : {probs_->src[0], probs_})
            ok_ = ok_ && ggml_backend_dev_supports_op(device, node);
        if (ok_)
            buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(
                context, ggml_backend_dev_buffer_type(device)));
        ok_ = ok_ && buffer_;
    }

    // Nothing to compare with is no difference.
    bool can_run() const { return ok_; }

    std::vector<float> by_nodes() {
        const auto keys = random_values(static_cast<std::size_t>(ggml_nelements(keys_)), 1);
        const auto query = random_values(static_cast<std::size_t>(ggml_nelements(query_)), 2);
        std::vector<std::byte> packed(ggml_nbytes(keys_));
        ggml_quantize_chunk(keys_->type, keys.data(), packed.data(), 0, n_cells, shape_.n_dim,
                            nullptr);
        ggml_backend_tensor_set(keys_, packed.data(), 0, packed.size());
        ggml_backend_tensor_set(query_, query.data(), 0, ggml_nbytes(query_));
        if (ggml_backend_graph_compute(stream_.get(), graph_) != GGML_STATUS_SUCCESS)
            throw error(errc::decode, "ggml's nodes failed");
        return values_of(probs_, 0);
    }

    std::vector<float> by(row_kernels& kernels) {
        row_step step;
        step.key_type = shape_.key_type;
        row_layer layer{};
        layer.keys = static_cast<const std::byte*>(keys_->data);
        layer.key_cell_stride = keys_->nb[1];
        layer.query_head_stride = query_->nb[2];
        layer.mask = row_layer::nothing;
        layer.scale = scale_;
        layer.n_dim = shape_.n_dim;
        layer.n_head = n_heads_;
        layer.n_head_kv = 1;
        layer.n_cells = n_cells;
        step.layers = {layer};
        step.items = {{0, 0, n_heads_, 0}};
        for (int i = 0; i < n_heads_; ++i) step.numbers.push_back(i);
        row_job job{};
        job.n_columns = job.n_values = n_cells;
        job.n_items = 1;
        job.n_rows = n_heads_;
        job.n_tiles = (n_cells + row_tile - 1) / row_tile;
        const auto row_bytes = static_cast<std::size_t>(n_heads_) * n_cells * sizeof(float);
        job.parts = row_bytes;
        job.joined = 2 * row_bytes;
        step.jobs = {job};
        row_form form;
        form.kind = row_form::probs;
        step.launches = {{form, 0, 1}};
        ggml_backend_event_record(before_.get(), stream_.get());
        kernels.run(step, static_cast<const std::byte*>(query_->data),
                    static_cast<std::byte*>(memory_->data), 0, before_.get(), after_.get());
        kernels.synchronize();
        return values_of(memory_, row_bytes);
    }

private:
    std::vector<float> values_of(ggml_tensor* from, std::size_t n_bytes) {
        std::vector<float> values((n_bytes > 0 ? n_bytes : ggml_nbytes(from)) / sizeof(float));
        ggml_backend_tensor_get(from, values.data(), 0, values.size() * sizeof(float));
        return values;
    }

    const row_shape shape_;
    const int n_heads_;
    const float scale_;
    backend_handle stream_;
    event_handle before_, after_;
    context_handle tensors_{nullptr, ggml_free};
    buffer_handle buffer_{nullptr, ggml_backend_buffer_free};
    ggml_tensor *keys_ = nullptr, *query_ = nullptr, *memory_ = nullptr, *probs_ = nullptr;
    ggml_cgraph* graph_ = nullptr;
    bool ok_ = false;
};

}  // namespace

bool agrees_with_nodes(row_kernels& kernels, ggml_backend_dev_t device, const row_shape& shape) {
    std::string why;
    try {
        small_case both(device, shape);
        if (!both.can_run()) return true;
        const auto want = both.by_nodes();
        const auto got = both.by(kernels);
        const bool is_quantised = ggml_is_quantized(static_cast<ggml_type>(shape.key_type));
        float largest = 0.0f, most = 0.0f;
        for (std::size_t i = 0; i < want.size(); ++i) {
            largest = std::max(largest, want[i]);
            const float off = std::abs(got[i] - want[i]);
            most = off <= most ? most : off;  // NaN counts
        }
        if (most <= largest * (is_quantised ? tolerance_quantised : tolerance)) return true;
        why = text_of("they differ by ", most, " where the largest value is ", largest);
    } catch (const error& failure) {
        why = failure.what();
    }
    const auto line =
        text_of("attention rows on ", ggml_backend_dev_name(device), " with keys of type ",
                ggml_type_name(static_cast<ggml_type>(shape.key_type)), " and heads of ",
                shape.n_dim, " are computed by ggml's nodes, not by kqview's kernel: ", why, "\n");
    log_ring::instance().write(log_level::warning, line.c_str());
    return false;
}

}  // namespace kqview
