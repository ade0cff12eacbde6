// The key-value pairs of a model's file. llama.cpp's public call for the i-th pair walks there from
// the first one, so this file looks at the pairs themselves.
#include <llama-model.h>

#include <algorithm>

#include "llama/model.h"

namespace kqview {

std::vector<std::pair<std::string, std::string>> model::metadata() const {
    const auto& known = get()->gguf_kv;
    std::vector<std::pair<std::string, std::string>> pairs(known.begin(), known.end());
    std::sort(pairs.begin(), pairs.end());
    return pairs;
}

}  // namespace kqview
