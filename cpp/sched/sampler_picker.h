// The picker of real requests: llama.cpp's sampler chain.
#pragma once

#include <memory>
#include <span>

#include "llama/model.h"
#include "sample/params.h"
#include "sample/token_filter.h"
#include "sched/token_picker.h"

namespace kqview {

// Raises invalid_sampling. `source` must outlive the picker. `filter` is what token_filters made of
// `params`.
std::unique_ptr<token_picker> make_sampler_picker(const model& source,
                                                  const sampling_params& params,
                                                  std::span<const token_id> prompt,
                                                  std::unique_ptr<token_filter> filter);

}  // namespace kqview
