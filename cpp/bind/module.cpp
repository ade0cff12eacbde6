#include <cstdlib>

#include "bind/bind.h"

#ifdef KQVIEW_FAKE_DEVICE
// For tests/device and tests/native; developer builds only.
namespace kqview::testing {
void bind_fake_device(nanobind::module_& module);
void bind_words(nanobind::module_& module);
void bind_sampling_options(nanobind::module_& module);
}  // namespace kqview::testing
#endif

static void bind_testing([[maybe_unused]] nanobind::module_& module) {
#ifdef KQVIEW_FAKE_DEVICE
    kqview::testing::bind_fake_device(module);
    kqview::testing::bind_words(module);
    kqview::testing::bind_sampling_options(module);
#endif
}

NB_MODULE(_core, module) {
    using namespace kqview::bind;
    if (is_bound_before(module)) return;
    // Objects that a program keeps to its end (a generation in a global, a view in a cycle) are not
    // kqview's leaks. The tests enable the check and drop everything first.
    nb::set_leak_warnings(std::getenv("KQVIEW_LEAK_CHECK") != nullptr);
    module.doc() = "Native core of kqview; use the classes of the kqview package.";
    bind_process(module);
    bind_system(module);
    bind_model(module);
    bind_edits(module);
    bind_request(module);
    bind_generation(module);
    bind_engine(module);
    bind_state(module);
    bind_testing(module);
}
