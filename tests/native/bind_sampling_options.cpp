// The core's list of sampling options, for the test in Python that compares it with
// kqview.types.sampling.OPTIONS. In developer builds alone; see tests/device/fake_device.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <type_traits>

#include "sample/params.h"

namespace nb = nanobind;

namespace kqview::testing {
namespace {

template <typename Value>
struct number {
    using type = Value;
};
template <typename Value>
struct number<std::optional<Value>> {
    using type = Value;
};

// (default, low, high, low_excluded); the last three are None of what is no number.
template <typename Value>
nb::tuple row_of(const sampling_option<Value>& option) {
    const sampling_params standard;
    const nb::object value = nb::cast(standard.*option.member);
    using type = typename number<Value>::type;
    if constexpr (std::is_arithmetic_v<type> && !std::is_same_v<type, bool>) {
        const auto low = static_cast<double>(std::numeric_limits<type>::lowest());
        const auto high = static_cast<double>(std::numeric_limits<type>::max());
        return nb::make_tuple(value, std::max(option.range.low, low),
                              std::min(option.range.high, high), option.range.low_excluded);
    } else {
        return nb::make_tuple(value, nb::none(), nb::none(), nb::none());
    }
}

}  // namespace

void bind_sampling_options(nb::module_& module) {
    auto part = module.def_submodule("_sampling", "The core's options; see tests/engine.");
    nb::module_::import_("sys").attr("modules")["kqview._sampling"] = part;
    nb::delattr(module, "_sampling");
    nb::dict rows;
    for_each_option([&](const auto& option) { rows[option.name] = row_of(option); });
    part.attr("OPTIONS") = rows;
}

}  // namespace kqview::testing
