// Compiled in before ggml's AMX code (cpu_variants.cmake). gcc's _tile_loadconfig names only the
// first 8 of the 64 bytes that the instruction reads, so gcc drops most of the stores to them.
#pragma once

#include <immintrin.h>

#ifdef __AMX_TILE__
struct kqview_tile_config {
    unsigned char bytes[64];
};
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg %0" : : "m"(*(const kqview_tile_config*)(config)))
#endif
