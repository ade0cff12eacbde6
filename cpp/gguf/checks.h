// Checks of well-formed GGUF files for content that would end the process inside llama.cpp: numbers
// it divides by, types it cannot compute with, vocabularies its tokenizers trust. Knows the names
// of keys and tensors, but nothing of llama.cpp itself; the README.md beside this file lists the
// llama.cpp functions that each check protects.
// Threads: pure functions. Each raises model_load, or unsupported_model for files that other
//          programs can use. The message names the key or tensor, its value, the limit and a
//          remedy.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "gguf/header.h"

namespace kqview {

// Opens a model file and runs all checks below. If the model has several files, pass the first one;
// all of them are checked.
void check_model_file(const std::string& path);

void check_adapter_file(const std::string& path);

// The directions of a control vector's file, by layer: the tensors direction.<layer>.
std::map<int, std::vector<float>> read_control_vector(const std::string& path);

// `head`: the first part, which holds the key-value pairs; `tensors`: the tensors of all parts.
void check_hyperparameters(const gguf_header& head, std::span<const gguf_tensor> tensors);

// Checks that ggml supports each tensor's type for what models do with that tensor.
void check_tensor_types(const gguf_header& head, const gguf_header& part);

void check_vocabulary(const gguf_header& head, std::span<const gguf_tensor> tensors);

// Checks everything about a LoRA adapter's file except whether it fits a model.
void check_adapter(const gguf_header& file);

}  // namespace kqview
