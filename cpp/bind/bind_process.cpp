// State that exists once per process: the module's classes, its errors, llama.cpp's log, the exit.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "bind/bind.h"

namespace kqview::bind {

namespace {

// Raises the core's errors as the classes of kqview.errors.
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

std::vector<std::pair<int, nb::str>> drain_log() {
    std::vector<std::pair<int, nb::str>> lines;
    for (const auto& line : log_ring::instance().drain()) {
        lines.emplace_back(static_cast<int>(line.level), to_text(line.text));
    }
    return lines;
}

std::atomic<bool> is_exiting{false};
thread_local bool is_exit_thread = false;

}  // namespace

nb::str to_text(std::string_view bytes) {
    return nb::steal<nb::str>(
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

void stop_waking() noexcept {
    is_exit_thread = true;  // exit handlers may still wait
    is_exiting.store(true);
}

void stay_if_exiting() noexcept {
    while (is_exiting.load() && !is_exit_thread) {
        std::this_thread::sleep_for(std::chrono::hours(1));
    }
}

// nanobind ends the process if a class is registered twice, and the main interpreter cannot use
// classes that belong to a subinterpreter.
bool is_bound_before(nb::module_& module) {
    // nanobind's own state, just set for the importing interpreter.
    static auto* state_of_main = nb::detail::internals;
    // Never freed: its content exists until the process ends. Accessed only with the GIL.
    static PyObject* first = nullptr;
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        if (first) nb::detail::internals = state_of_main;
        throw std::runtime_error(
            "kqview works only in the main interpreter; import it there, or in a process of its "
            "own");
    }
    if (first) {
        // Imported again after sys.modules was emptied: another module with the same content.
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

void bind_process(nb::module_& module) {
    nb::register_exception_translator(translate);
    module.def("drain_log", &drain_log,
               "Log lines of llama.cpp since the last call, as (logging level, text).");
    module.def(
        "stop_waking", &stop_waking,
        "Call this when the interpreter exits: other threads then never return from a wait.");
}

}  // namespace kqview::bind
