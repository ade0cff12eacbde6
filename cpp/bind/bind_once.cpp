// One set of classes in a process, whoever imports the module how often. nanobind ends the process
// where a class is registered twice, and classes that belong to a subinterpreter are of no use to
// the main one.
#include <nanobind/stl/string_view.h>

#include <stdexcept>

#include "bind/bind.h"

namespace kqview::bind {

bool is_bound_before(nb::module_& module) {
    // nanobind's own state, which it has just set for the interpreter that imports.
    static auto* state_of_main = nb::detail::internals;
    // Never freed: what it holds is there until the process ends. Only with the GIL.
    static PyObject* first = nullptr;
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        if (first) nb::detail::internals = state_of_main;
        throw std::runtime_error(
            "kqview works in the main interpreter alone; import it there, or use a process of its "
            "own");
    }
    if (first) {
        // Imported again, after sys.modules was emptied: another module of the same things.
        const nb::dict known = nb::borrow<nb::dict>(PyModule_GetDict(first));
        for (const auto& [name, value] : known) {
            const auto text = nb::cast<std::string_view>(name);
            if (!text.starts_with("__")) module.attr(name) = value;
        }
        return true;
    }
    first = module.inc_ref().ptr();
    state_of_main = nb::detail::internals;
    return false;
}

}  // namespace kqview::bind
