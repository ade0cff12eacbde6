#include "sample/llguidance.h"

#include <dlfcn.h>

#include "base/error.h"

namespace kqview {
namespace {

// POSIX makes a function of the pointer that dlsym returns.
template <typename F>
void find(void* library, const char* name, F*& function) {
    function = reinterpret_cast<F*>(dlsym(library, name));
    if (!function) {
        throw error(errc::request, std::string("llguidance has no function ") + name +
                                       ", json_schema and regex need version 1.9 or newer; "
                                       "pip install -U llguidance");
    }
}

}  // namespace

llguidance::llguidance(const std::string& path) {
    // Python has loaded it already; it stays.
    void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (!library) {
        throw error(errc::request,
                    std::string("llguidance cannot be opened: ") + dlerror() + "; reinstall it");
    }
    find(library, "llg_new_tokenizer_v2", new_tokenizer_v2);
    find(library, "llg_free_tokenizer", free_tokenizer);
    find(library, "llg_constraint_init_set_defaults", constraint_init_set_defaults);
    find(library, "llg_new_matcher", new_matcher);
    find(library, "llg_free_matcher", free_matcher);
    find(library, "llg_matcher_get_error", matcher_get_error);
    find(library, "llg_matcher_compute_mask", matcher_compute_mask);
    find(library, "llg_matcher_get_mask", matcher_get_mask);
    find(library, "llg_matcher_consume_token", matcher_consume_token);
}

}  // namespace kqview
