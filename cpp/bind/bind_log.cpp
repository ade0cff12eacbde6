#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "base/log.h"
#include "bind/bind.h"

namespace kqview::bind {

namespace {

// Values of Python's logging module.
int to_python_level(log_level level) {
    switch (level) {
        case log_level::debug: return 10;
        case log_level::info: return 20;
        case log_level::warning: return 30;
        case log_level::error: return 40;
    }
    return 20;
}

}  // namespace

void bind_log(nb::module_& module) {
    module.def(
        "drain_log",
        [] {
            std::vector<std::pair<int, nb::str>> lines;
            for (const auto& line : log_ring::instance().drain()) {
                lines.emplace_back(to_python_level(line.level), to_text(line.text));
            }
            return lines;
        },
        "llama.cpp's log lines since the last call, as (logging level, text).");
}

}  // namespace kqview::bind
