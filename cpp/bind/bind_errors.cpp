// Raises the core's errors as the classes of kqview.errors.
#include <cstring>
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
        // A message may quote a part of a character, which is no reason for another error.
        const auto text = nb::steal(PyUnicode_DecodeUTF8(
            failure.what(), static_cast<Py_ssize_t>(std::strlen(failure.what())), "replace"));
        PyErr_SetObject(nb::object(classes[name_of(failure.code())]).ptr(), text.ptr());
    }
}

}  // namespace

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace kqview::bind
