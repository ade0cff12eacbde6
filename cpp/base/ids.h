// Plain integer identities that several layers pass around.
#pragma once

#include <cstdint>

namespace kqview {

using token_id = std::int32_t;    // index into the vocabulary
using slot_id = std::int32_t;     // index of a slot, also llama.cpp's sequence id
using request_id = std::int64_t;  // counts up from 1 in each engine

}  // namespace kqview
