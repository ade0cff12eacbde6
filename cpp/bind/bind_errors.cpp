// Raises the core's errors as the classes of kqview.errors.
#include <exception>
#include <new>

#include "base/error.h"
#include "bind/bind.h"

namespace kqview::bind {

namespace {

void translate(const std::exception_ptr& pointer, void*) {
    const auto raise = [](const char* code, const char* message) {
        const auto classes = nb::module_::import_("kqview.errors").attr("BY_CODE");
        PyErr_SetObject(nb::object(classes[code]).ptr(), to_text(message).ptr());
    };
    try {
        std::rethrow_exception(pointer);
    } catch (const error& failure) {
        raise(name_of(failure.code()), failure.what());
    } catch (const std::bad_alloc&) {
        raise(name_of(errc::out_of_memory), "no memory left for what was asked; ask for less");
    }
}

}  // namespace

nb::str to_text(std::string_view bytes) {
    return nb::steal<nb::str>(
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace kqview::bind
