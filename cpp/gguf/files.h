// Opens model and LoRA files and checks them, before llama.cpp is given their paths.
#pragma once

#include <string>

namespace kqview {

// Raises model_load or unsupported_model for a file that llama.cpp would not survive; of a model in
// several files, which is opened by its first, for each of them.
void check_model_file(const std::string& path);

void check_adapter_file(const std::string& path);

}  // namespace kqview
