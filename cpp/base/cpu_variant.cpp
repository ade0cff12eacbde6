#include "base/cpu_variant.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <span>

#include "base/error.h"

#ifdef KQVIEW_CPU_VARIANTS
// Written by vendor/cpu_variants.py: what each level has for the functions that differ, and the
// table through which they are called.
extern "C" {
using kqview_cpu_function = void (*)();
struct kqview_cpu_level {
    const char* name;
    int (*is_supported)();
    const kqview_cpu_function* functions;
};
extern kqview_cpu_function kqview_cpu_functions[];
extern const int kqview_n_cpu_functions;
extern const kqview_cpu_level kqview_cpu_levels[];
extern const int kqview_n_cpu_levels;
}
#endif

namespace kqview {

namespace {

std::string list_of(const std::vector<cpu_variant>& variants, bool only_supported) {
    std::string names;
    for (const auto& one : variants) {
        if (only_supported && !one.is_supported) continue;
        names += (names.empty() ? "" : ", ") + one.name;
    }
    return names;
}

// The index of the variant to use.
std::size_t choice_of(const std::vector<cpu_variant>& variants, const char* wanted) {
    if (wanted && *wanted) {
        const auto is_wanted = [&](const cpu_variant& one) { return one.name == wanted; };
        const auto found = std::find_if(variants.begin(), variants.end(), is_wanted);
        const std::string variable = std::string("KQVIEW_CPU is \"") + wanted + "\", ";
        if (found == variants.end())
            throw error(errc::request,
                        variable + "this build holds " + list_of(variants, false) +
                            "; set it to one of these, or unset it for the best one");
        if (!found->is_supported)
            throw error(errc::request, variable + "which this processor does not have; it has " +
                                           list_of(variants, true) + "; unset it for the best one");
        return static_cast<std::size_t>(found - variants.begin());
    }
    for (std::size_t i = variants.size(); i-- > 0;) {
        if (variants[i].is_supported) return i;
    }
    throw error(errc::request, "this processor has none of " + list_of(variants, false) +
                                   ", which this build needs; build kqview on this machine");
}

std::size_t chosen = 0;

}  // namespace

#ifdef KQVIEW_CPU_VARIANTS

std::vector<cpu_variant> cpu_variants() {
    std::vector<cpu_variant> variants;
    for (int i = 0; i < kqview_n_cpu_levels; ++i)
        variants.push_back({kqview_cpu_levels[i].name, kqview_cpu_levels[i].is_supported() != 0});
    return variants;
}

void choose_cpu_variant() {
    chosen = choice_of(cpu_variants(), std::getenv("KQVIEW_CPU"));
    std::copy_n(kqview_cpu_levels[chosen].functions, kqview_n_cpu_functions, kqview_cpu_functions);
}

#else

std::vector<cpu_variant> cpu_variants() {
#ifdef KQVIEW_CPU_LEVEL  // a build for any machine that has one
    return {{KQVIEW_CPU_LEVEL, __builtin_cpu_supports(KQVIEW_CPU_LEVEL) != 0}};
#else
    return {{"native", true}};
#endif
}

void choose_cpu_variant() { chosen = choice_of(cpu_variants(), std::getenv("KQVIEW_CPU")); }

#endif

std::string chosen_cpu_variant() { return cpu_variants()[chosen].name; }

}  // namespace kqview
