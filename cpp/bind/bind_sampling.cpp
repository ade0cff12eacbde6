#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "bind/bind.h"
#include "sample/params.h"

namespace kqview::bind {

void bind_sampling(nb::module_& module) {
    nb::class_<sampling_params>(module, "SamplingParams")
        .def(
            "__init__",
            [](sampling_params* self, const nb::object& sampling) {
                auto* const params = new (self) sampling_params;
                for_each_option([&](const auto& option) {
                    params->*option.member =
                        nb::cast<std::remove_reference_t<decltype(params->*option.member)>>(
                            sampling.attr(option.name));
                });
            },
            nb::arg("sampling"), "The attributes of a kqview.Sampling, by the names of the core.");
}

}  // namespace kqview::bind
