// The only file that makes ndarrays: views of leased blocks.
// Owner:  each view's capsule holds a share of the lease; the block goes back to the pool when the last
//         view, slice included, is gone. The data pointer is the block's own: nothing is copied.
// Never:  writable, and never without an owner.
#include <nanobind/ndarray.h>

#include <array>
#include <memory>

#include "bind/bind.h"

namespace kqview::bind {

namespace {

nb::capsule owner_of(const std::shared_ptr<lease>& block) {
    auto share = std::make_unique<std::shared_ptr<lease>>(block);
    nb::capsule owner(share.get(), [](void* held) noexcept {
        delete static_cast<std::shared_ptr<lease>*>(held);
    });
    (void)share.release();
    return owner;
}

// Read-only, C-contiguous.
template <std::size_t n_dims>
nb::object view_of(const std::byte* data, const std::array<std::size_t, n_dims>& shape,
                   row_type type, const nb::capsule& owner) {
    const auto dtype = type == row_type::f32
                           ? nb::dtype<float>()
                           : nb::dlpack::dtype{std::uint8_t(nb::dlpack::dtype_code::Float), 16, 1};
    using array = nb::ndarray<nb::numpy, nb::ro, nb::c_contig>;
    return nb::cast(array(data, n_dims, shape.data(), owner, nullptr, dtype));
}

}  // namespace

nb::object rows_to_python(token_rows rows) {
    if (!rows.block) return nb::none();
    const auto& plan = *rows.plan;
    const auto n_columns = static_cast<std::size_t>(rows.n_columns);
    const auto owner = owner_of(rows.block);
    if (plan.is_uniform()) {
        // (n_layers, n_heads, n_context)
        const std::array shape{plan.layers().size(), plan.layers().front().heads.size(), n_columns};
        return view_of(rows.block->data(), shape, plan.type(), owner);
    }
    nb::list layers;
    for (const auto& layer : plan.layers()) {
        const auto* const data = rows.block->data() + static_cast<std::size_t>(layer.first_row) *
                                                          n_columns * plan.element_bytes();
        layers.append(view_of(data, std::array{layer.heads.size(), n_columns}, plan.type(), owner));
    }
    return nb::tuple(layers);
}

}  // namespace kqview::bind
