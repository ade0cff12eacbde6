// The device of fake_device.h for tests in Python, in developer builds alone. No part of
// kqview._core, whose stub says what every build has: tests find it in sys.modules.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "fake_device.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kqview::testing {

void bind_fake_device(nb::module_& module) {
    auto part = module.def_submodule("_fake_device", "A device for tests; see tests/device.");
    nb::module_::import_("sys").attr("modules")["kqview._fake_device"] = part;
    nb::delattr(module, "_fake_device");
    part.def("register", &register_fake_devices, "n_devices"_a,
             "Registers that many devices with ggml, for engines opened from then on.");
    part.def("unregister", &unregister_fake_devices, "Takes them back; open engines keep theirs.");
    part.def(
        "set",
        [](bool is_late, std::int64_t fail_copy_in, std::size_t memory_bytes,
           std::size_t pinned_bytes, std::string refused_op, double copy_s, std::string abort_at,
           std::int64_t abort_in, std::string abort_log) {
            set_fake_device({is_late, fail_copy_in, memory_bytes, pinned_bytes,
                             std::move(refused_op), copy_s, std::move(abort_at), abort_in,
                             std::move(abort_log)});
        },
        nb::kw_only(), "is_late"_a = true, "fail_copy_in"_a = -1,
        "memory_bytes"_a = std::size_t{4} << 30, "pinned_bytes"_a = std::size_t{1} << 30,
        "refused_op"_a = "", "copy_s"_a = 0.0, "abort_at"_a = "", "abort_in"_a = 0,
        "abort_log"_a = "unspecified launch failure");
    part.def("counts", [] {
        const auto now = count_fake_device();
        nb::dict all;
        all["n_graphs"] = now.n_graphs;
        all["n_copies_to_host"] = now.n_copies_to_host;
        all["n_copies_on_device"] = now.n_copies_on_device;
        all["used_bytes"] = now.used_bytes;
        return all;
    });
}

}  // namespace kqview::testing
