// Included in front of llama.cpp's llama-kv-cache.cpp, by vendor/llama.cmake.
// llama.cpp keeps quantised keys multiplied by a Hadamard matrix, and build_rope_shift() takes that
// back while it moves them. A cache whose head size 64 does not divide (32 of the demo, 96 of
// Phi-3-mini) or whose layers differ in it has no such matrix, nor has any with
// LLAMA_ATTN_ROT_DISABLE set; build_rope_shift() then reads a null pointer. Here keys that were not
// rotated stay as they are. tests/engine/test_shift.py
#pragma once

#include "llama-impl.h"

// A macro's own name inside of it is the function.
#define llama_mul_mat_hadamard(ctx, cur, rot) \
    ((rot) ? llama_mul_mat_hadamard(ctx, cur, rot) : (cur))
