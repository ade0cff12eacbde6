// The picker of real requests: llama.cpp's sampler chain.
#pragma once

#include <memory>
#include <span>

#include "llama/model.h"
#include "sample/constraint.h"
#include "sample/params.h"
#include "sched/token_picker.h"

namespace kqview {

// Raises invalid_sampling. `source` must outlive the picker. `constraints` may be null without one.
std::unique_ptr<token_picker> make_sampler_picker(
    const model& source, const sampling_params& params, std::span<const token_id> prompt,
    std::shared_ptr<const constraint_vocabulary> constraints);

}  // namespace kqview
