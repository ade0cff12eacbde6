// The device of tests/device, which developer builds alone have.
#include "bind/bind.h"

#ifdef KQVIEW_FAKE_DEVICE
namespace kqview::testing {
void bind_fake_device(nanobind::module_& module);
}
#endif

namespace kqview::bind {

void bind_test_device([[maybe_unused]] nb::module_& module) {
#ifdef KQVIEW_FAKE_DEVICE
    testing::bind_fake_device(module);
#endif
}

}  // namespace kqview::bind
