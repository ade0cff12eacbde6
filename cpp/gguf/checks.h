// What a well-formed GGUF file may still contain that ends the process inside llama.cpp: numbers
// that it divides by, types that it cannot compute with, vocabularies that its tokenizers trust.
// Knows the names of keys and tensors, and nothing of llama.cpp itself; README.md beside this file
// says which of llama.cpp's functions each check protects.
// Threads: pure functions. Each raises model_load, or unsupported_model for what other programs can
// use, and names the key or tensor, what it is, the limit and a remedy.
#pragma once

#include <span>
#include <string>

#include "gguf/header.h"

namespace kqview {

// Opens a model file and runs all checks below. A model in several files is given by its first
// file; all of them are checked.
void check_model_file(const std::string& path);

void check_adapter_file(const std::string& path);

// `head`: the first part, which holds the key-value pairs; `tensors`: those of all parts.
void check_hyperparameters(const gguf_header& head, std::span<const gguf_tensor> tensors);

// Each tensor of `part` has a type with which ggml can do what models do with that tensor.
void check_tensor_types(const gguf_header& head, const gguf_header& part);

void check_vocabulary(const gguf_header& head, std::span<const gguf_tensor> tensors);

// Everything about a LoRA adapter's file except whether it fits a model.
void check_adapter(const gguf_header& file);

}  // namespace kqview
