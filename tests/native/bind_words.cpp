// How llama.cpp cuts a text into words, as it is built here and as it is without us, for tests in
// Python that compare the two: the second copy of its unicode.cpp has std::regex. In developer
// builds alone; see tests/device/fake_device.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <regex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace stock {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include <unicode-data.cpp>
#include <unicode.cpp>
#pragma GCC diagnostic pop
}  // namespace stock

// As its unicode.h says, which the lines above have used up.
std::vector<std::string> unicode_regex_split(const std::string& text,
                                             const std::vector<std::string>& regex_exprs,
                                             bool byte_encode);

namespace nb = nanobind;
using namespace nb::literals;

namespace kqview::testing {

void bind_words(nb::module_& module) {
    auto part = module.def_submodule("_words", "Words of a text; see tests/engine.");
    nb::module_::import_("sys").attr("modules")["kqview._words"] = part;
    nb::delattr(module, "_words");
    part.def(
        "split",
        [](const std::string& text, const std::vector<std::string>& expressions) {
            return ::unicode_regex_split(text, expressions, false);
        },
        "text"_a, "expressions"_a);
    part.def(
        "stock_split",
        [](const std::string& text, const std::vector<std::string>& expressions) {
            return stock::unicode_regex_split(text, expressions, false);
        },
        "text"_a, "expressions"_a);
}

}  // namespace kqview::testing
