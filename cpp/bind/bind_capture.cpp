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
    nb::enum_<row_reduction>(module, "RowReduction")
        .value("none", row_reduction::none)
        .value("mean_heads", row_reduction::mean_heads)
        .value("max_heads", row_reduction::max_heads)
        .value("mean", row_reduction::mean)
        .value("max", row_reduction::max);
    nb::enum_<full_policy>(module, "FullPolicy")
        .value("raise_", full_policy::raise)
        .value("wait", full_policy::wait)
        .value("drop", full_policy::drop);
    nb::class_<capture_plan>(module, "CapturePlan")
        .def_prop_ro("n_rows", &capture_plan::n_rows, "Rows of one token that are handed out.")
        .def(
            "bytes",
            [](const capture_plan& self, int n_columns, int n_queries) {
                return self.layout(n_columns, n_queries, n_queries == 1).size_bytes;
            },
            nb::arg("n_columns"), nb::arg("n_queries") = 1,
            "Bytes of the rows of a run of queries.");
}

}  // namespace kqview::bind
