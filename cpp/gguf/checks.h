// What a sound GGUF file may still say that llama.cpp does not survive: numbers that it divides by,
// types that it cannot compute with, vocabularies that its tokenizers trust. Knows what the keys
// and tensors of models are called, and nothing of llama.cpp itself; README.md beside this file
// says which of its functions each check stands in front of.
// Threads: pure functions. Each raises model_load, or unsupported_model for what is sound
// elsewhere, and names the key or the tensor, what it is, the limit and a remedy.
#pragma once

#include <span>
#include <string>

#include "gguf/header.h"

namespace kqview {

// Opens the file and runs all checks below. A model in several files is given by its first, and all
// of them are checked.
void check_model_file(const std::string& path);

void check_adapter_file(const std::string& path);

// `head`: the first part, which has the values; `tensors`: those of all parts.
void check_hyperparameters(const gguf_header& head, std::span<const gguf_tensor> tensors);

// Each tensor of `part` has a type that ggml can do with it what models do.
void check_tensor_types(const gguf_header& head, const gguf_header& part);

void check_vocabulary(const gguf_header& head, std::span<const gguf_tensor> tensors);

// All of a LoRA adapter's file, but not whether it fits a model.
void check_adapter(const gguf_header& file);

}  // namespace kqview
