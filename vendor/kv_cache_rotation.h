// Included before llama.cpp's llama-kv-cache.cpp, by vendor/llama.cmake.
// llama.cpp keeps quantised keys multiplied by a Hadamard matrix, and build_rope_shift() undoes
// that while it moves them. A cache has no such matrix if its head size is not a multiple of 64 (32
// in the demo, 96 in Phi-3-mini), if its layers differ in head size, or if LLAMA_ATTN_ROT_DISABLE
// is set; build_rope_shift() then reads a null pointer. With this header, keys without a matrix
// stay as they are. Tested by tests/engine/test_shift.py.
#pragma once

#include "llama-impl.h"

// Inside the macro, its own name refers to the function.
#define llama_mul_mat_hadamard(ctx, cur, rot) \
    ((rot) ? llama_mul_mat_hadamard(ctx, cur, rot) : (cur))
