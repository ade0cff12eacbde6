#include <cstdlib>

#include "bind/bind.h"

NB_MODULE(_core, module) {
    using namespace kqview::bind;
    if (is_bound_before(module)) return;
    // What a program holds to its end (a generation in a global, a view in a cycle) is no leak of
    // ours. The tests switch the check on and drop everything first.
    nb::set_leak_warnings(std::getenv("KQVIEW_LEAK_CHECK") != nullptr);
    module.doc() = "Native core of kqview; use the classes of the kqview package.";
    bind_errors(module);
    bind_log(module);
    bind_system(module);
    bind_model(module);
    bind_sampling(module);
    bind_capture(module);
    bind_generation(module);
    bind_engine(module);
    bind_state(module);
    bind_test_device(module);
}
