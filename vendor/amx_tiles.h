// Compiled in before ggml's AMX code (amx.cmake says why).
#pragma once

#ifdef __AMX_TILE__
#include <immintrin.h>

struct kqview_tile_config {
    unsigned char bytes[64];
};
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg %0" : : "m"(*(const kqview_tile_config*)(config)))
#endif
