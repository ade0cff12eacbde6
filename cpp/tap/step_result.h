// What a decode leaves of a step's rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kqview {

// Counts the steps whose rows were sent off by a device; 0 is none.
using transfer_id = std::uint64_t;

struct step_result {
    const std::byte* written_at = nullptr;  // where the CPU's kernel wrote the first row, if it did
    transfer_id transfer = 0;               // to await before the rows are read; 0 = they are there
};

}  // namespace kqview
