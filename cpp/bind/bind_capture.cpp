#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "tap/plan.h"

namespace kqview::bind {

void bind_capture(nb::module_& module) {
    nb::enum_<row_kind>(module, "RowKind")
        .value("logits", row_kind::logits)
        .value("scores", row_kind::scores)
        .value("probs", row_kind::probs);
    nb::enum_<row_type>(module, "RowType")
        .value("float32", row_type::f32)
        .value("float16", row_type::f16);
    nb::enum_<full_policy>(module, "FullPolicy")
        .value("raise_", full_policy::raise)
        .value("wait", full_policy::wait)
        .value("drop", full_policy::drop);
    nb::class_<capture_plan>(module, "CapturePlan")
        .def_prop_ro("n_rows", &capture_plan::n_rows,
                     "Rows of one token: heads summed over layers.")
        .def("bytes", &capture_plan::bytes, nb::arg("n_columns"), "Bytes of one token's rows.");
}

}  // namespace kqview::bind
