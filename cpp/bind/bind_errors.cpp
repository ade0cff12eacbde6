// Raises the core's errors as the classes of kqview.errors.
#include <exception>

#include "base/error.h"
#include "bind/bind.h"

namespace kqview::bind {

namespace {

void translate(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const error& failure) {
        const auto classes = nb::module_::import_("kqview.errors").attr("BY_CODE");
        PyErr_SetString(nb::object(classes[name_of(failure.code())]).ptr(), failure.what());
    }
}

}  // namespace

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace kqview::bind
