// The numbers in a cache by their type: its name, and whether all of them can be computed with. A
// NaN would reach every later token of its slot, and through masked columns (0 * NaN) whoever uses
// the cells or a shared cache after it. So would a number whose product with a query overflows;
// flash attention casts an F32 cache to F16. Hence the limit for every type: 65504, what an F16
// cache, the usual one, can hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "state/kv_layout.h"

namespace kqview {

// As the option kv_type of Engine has it; the number where it has none.
std::string name_of(kv_type type);

// Is the type one whose numbers can be checked?
bool is_known(kv_type type);

// Offset of the first number that is not finite or beyond the limit, or of the first quantised
// block that has such a number once it is multiplied out. `data` is a whole number of elements or
// blocks; any alignment.
std::optional<std::size_t> find_unsound(kv_type type, std::span<const std::byte> data);

}  // namespace kqview
