// Which instructions of the processor this process uses. A wheel holds ggml's CPU backend and
// kqview's own kernels once for each level (vendor/cpu_variants.cmake), and the best one that the
// processor has is chosen when llama.cpp starts. A build for this machine holds one, "native".
// Threads: choose_cpu_variant() runs once, before any of them computes.
#pragma once

#include <string>
#include <vector>

namespace kqview {

struct cpu_variant {
    std::string name;
    bool is_supported;  // by this processor and its system
};

// Those that this build holds, lowest first.
std::vector<cpu_variant> cpu_variants();

// Chooses the one that the environment variable KQVIEW_CPU names, or the best that the processor
// has. Raises `request` if this build does not hold it, or the processor does not have it, or none
// of them; then nothing is chosen.
void choose_cpu_variant();

// The name of the chosen one; of the lowest before.
std::string chosen_cpu_variant();

}  // namespace kqview
