// The only file that creates ndarrays: zero-copy views of leased blocks and of a forward pass's
// logits, and embeddings.
// Owner:   each view's capsule shares the lease; the block goes back to the pool when the last view
//          of it, slices included, is gone. The data pointer is the block's own: nothing is copied.
//          An embedding belongs to the event that carries it.
// Never:   creates a writable view, or an array without an owner.
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bind/bind.h"
#include "sched/request.h"
#include "tap/plan.h"

namespace kqview::bind {

namespace {

template <typename T>
nb::capsule owner_of(const std::shared_ptr<T>& owned) {
    auto share = std::make_unique<std::shared_ptr<T>>(owned);
    nb::capsule owner(share.get(),
                      [](void* held) noexcept { delete static_cast<std::shared_ptr<T>*>(held); });
    (void)share.release();
    return owner;
}

constexpr nb::dlpack::dtype float16{std::uint8_t(nb::dlpack::dtype_code::Float), 16, 1};

nb::dlpack::dtype dtype_of(row_type type) {
    return type == row_type::f32 ? nb::dtype<float>() : float16;
}

// Read-only, C-contiguous.
nb::object view_of(const void* data, const std::vector<std::size_t>& shape, nb::dlpack::dtype dtype,
                   const nb::capsule& owner) {
    using array = nb::ndarray<nb::numpy, nb::ro, nb::c_contig>;
    return nb::cast(array(data, shape.size(), shape.data(), owner, nullptr, dtype));
}

// One array of (layers and heads as in the plan, n_queries if it has that axis, n_values), or a
// tuple of one array per layer if layers keep different numbers of heads.
nb::object arrays_of(const captured_rows& rows, bool has_query_axis, const std::byte* data,
                     nb::dlpack::dtype dtype) {
    const auto& plan = *rows.plan;
    if (plan.n_rows() == 0) return nb::none();
    const auto owner = owner_of(rows.block);
    std::vector<std::size_t> tail;
    if (has_query_axis) tail.push_back(static_cast<std::size_t>(rows.layout.n_queries));
    tail.push_back(static_cast<std::size_t>(rows.layout.n_values));
    const auto shape_of = [&](std::vector<std::size_t> shape) {
        shape.insert(shape.end(), tail.begin(), tail.end());
        return shape;
    };
    const auto n_layers = plan.layers().size();
    if (plan.reduces_layers()) return view_of(data, shape_of({}), dtype, owner);
    if (plan.reduce() != row_reduction::none)
        return view_of(data, shape_of({n_layers}), dtype, owner);
    if (plan.is_uniform())
        return view_of(data, shape_of({n_layers, plan.layers().front().heads.size()}), dtype,
                       owner);
    const auto row_bytes = static_cast<std::size_t>(rows.layout.n_queries) *
                           static_cast<std::size_t>(rows.layout.n_values) * (dtype.bits / 8u);
    nb::list layers;
    for (const auto& layer : plan.layers()) {
        const auto* const from = data + static_cast<std::size_t>(layer.first_row) * row_bytes;
        layers.append(view_of(from, shape_of({layer.heads.size()}), dtype, owner));
    }
    return nb::tuple(layers);
}

}  // namespace

nb::object attention_view(const captured_rows& rows, bool has_query_axis) {
    if (!rows.block) return nb::none();
    return arrays_of(rows, has_query_axis, rows.block->data(), dtype_of(rows.plan->type()));
}

nb::object positions_view(const captured_rows& rows, bool has_query_axis) {
    if (!rows.block || rows.plan->top_k() == 0) return nb::none();
    return arrays_of(rows, has_query_axis, rows.block->data() + rows.layout.positions_offset,
                     nb::dtype<std::int32_t>());
}

nb::object hidden_view(const captured_rows& rows, bool has_query_axis) {
    if (!rows.block || rows.plan->hidden().empty()) return nb::none();
    const auto& plan = *rows.plan;
    std::vector<std::size_t> shape{plan.hidden().size()};
    if (has_query_axis) shape.push_back(static_cast<std::size_t>(rows.layout.n_queries));
    shape.push_back(static_cast<std::size_t>(plan.n_embd()));
    return view_of(rows.block->data() + rows.layout.hidden_offset, shape, dtype_of(plan.type()),
                   owner_of(rows.block));
}

nb::object logits_view(const captured_rows& rows) {
    if (!rows.block || !rows.layout.has_logits) return nb::none();
    return view_of(rows.block->data() + rows.layout.logits_offset,
                   {static_cast<std::size_t>(rows.plan->n_vocab())}, nb::dtype<float>(),
                   owner_of(rows.block));
}

nb::object logits_view(const std::shared_ptr<const std::vector<float>>& logits) {
    return view_of(logits->data(), {logits->size()}, nb::dtype<float>(), owner_of(logits));
}

read_values values_of(const char* what, const nb::object& array) {
    using floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    auto taken = std::make_shared<floats>();
    if (!nb::try_cast(array, *taken) || taken->size() == 0) {
        throw error(errc::request, what, " is no array of floats of shape (n_vocab,)");
    }
    const std::span<const float> values(taken->data(), taken->size());
    return {values, std::move(taken)};
}

nb::object embedding_array(std::vector<float>& values, int n_rows, nb::handle owner) {
    if (values.empty()) return nb::none();
    const auto n = static_cast<std::size_t>(n_rows);
    const std::size_t shape[2] = {n, values.size() / n};
    using array = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;
    return nb::cast(array(values.data(), 2, shape, owner));
}

}  // namespace kqview::bind
