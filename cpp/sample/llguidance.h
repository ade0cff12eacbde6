// The few functions of llguidance's C interface that constraints use. They are looked up at run
// time in the shared library of the Python package of that name, so that nothing is linked and the
// engine thread computes masks without Python.
// Owns:    the handle of the library, for the life of the process.
// Threads: any; the table never changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kqview {

struct LlgTokenizer;
struct LlgMatcher;

// Layout of llguidance's LlgTokenizerInitV2; `struct_size` lets later versions append fields.
struct llg_tokenizer_init {
    std::size_t struct_size;
    std::uint32_t vocab_size;
    std::uint32_t tok_eos;
    const std::uint32_t* token_lens;
    const std::uint8_t* token_bytes;
    const char* tokenizer_json;
    bool tokenize_assumes_string;
    void* tokenize_fn;
    bool use_approximate_greedy_tokenize_fn;
    const void* tokenize_user_data;
    const char* const* slices;
    const std::uint32_t* tok_eos_extra;
    std::uint32_t tok_eos_extra_count;
};

// The head of LlgConstraintInit. llguidance writes the defaults of what follows, which grows by
// version, hence the room behind it.
struct llg_matcher_init {
    const LlgTokenizer* tokenizer;
    std::uint32_t log_buffer_level;
    std::uint32_t log_stderr_level;
    alignas(8) unsigned char rest[1024];
};

struct llguidance {
    // Raises request when the library cannot be opened or lacks a function.
    explicit llguidance(const std::string& path);

    LlgTokenizer* (*new_tokenizer_v2)(const llg_tokenizer_init*, char* message, std::size_t n);
    void (*free_tokenizer)(LlgTokenizer*);
    void (*constraint_init_set_defaults)(llg_matcher_init*, const LlgTokenizer*);
    LlgMatcher* (*new_matcher)(const llg_matcher_init*, const char* kind, const char* text);
    void (*free_matcher)(LlgMatcher*);
    const char* (*matcher_get_error)(LlgMatcher*);
    std::int32_t (*matcher_compute_mask)(LlgMatcher*);
    const std::uint32_t* (*matcher_get_mask)(LlgMatcher*);  // one bit per token
    std::int32_t (*matcher_consume_token)(LlgMatcher*, std::uint32_t);
};

}  // namespace kqview
