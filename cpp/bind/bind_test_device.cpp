// The device of tests/device and the stock word splitter of tests/native, which developer builds
// alone have.
#include "bind/bind.h"

#ifdef KQVIEW_FAKE_DEVICE
namespace kqview::testing {
void bind_fake_device(nanobind::module_& module);
void bind_words(nanobind::module_& module);
}  // namespace kqview::testing
#endif

namespace kqview::bind {

void bind_test_device([[maybe_unused]] nb::module_& module) {
#ifdef KQVIEW_FAKE_DEVICE
    testing::bind_fake_device(module);
    testing::bind_words(module);
#endif
}

}  // namespace kqview::bind
