// Changes model and LoRA files at random and checks them, for as long as it is told: fuzz_gguf
// SECONDS [SEED]. Anything but a typed refusal ends it, and so do a header that points out of its
// file and memory out of proportion to it.
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>

#include "base/error.h"
#include "fuzzing.h"
#include "gguf/checks.h"
#include "gguf/header.h"
#include "gguf_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

struct input {
    std::vector<std::byte> bytes;
};

void check_views(const gguf_header& header, std::span<const std::byte> bytes,
                 const std::vector<std::byte>& shown) {
    const auto is_inside = [&](const void* start, std::size_t n) {
        const auto* const from = static_cast<const std::byte*>(start);
        return n == 0 || (from >= bytes.data() && from + n <= bytes.data() + bytes.size());
    };
    for (const auto& value : header.values) {
        bool is_sound = is_inside(value.key.data(), value.key.size()) &&
                        is_inside(value.numbers.data(), value.numbers.size());
        for (const auto text : value.strings) is_sound &= is_inside(text.data(), text.size());
        if (!is_sound) fail_fuzz("a value outside of the file", shown);
        for (std::size_t i = 0; i < value.size() && value.is_integer(); ++i) (void)value.integer(i);
    }
    for (const auto& tensor : header.tensors) {
        if (tensor.n_bytes > bytes.size()) fail_fuzz("a tensor larger than the file", shown);
    }
}

// True: it was sound.
bool check(const input& from) {
    // Exactly as long, so that a read past the end is one past an allocation.
    const std::vector<std::byte> bytes(from.bytes.begin(), from.bytes.end());
    try {
        const auto header = read_gguf(bytes, "file");
        check_views(header, bytes, from.bytes);
        if (header.find("adapter.type")) {
            check_adapter(header);
        } else {
            check_tensor_types(header, header);
            check_hyperparameters(header, header.tensors);
            check_vocabulary(header, header.tensors);
        }
        return true;
    } catch (const error& failure) {
        if (failure.code() != errc::model_load && failure.code() != errc::unsupported_model)
            fail_fuzz(failure.what(), from.bytes);
        return false;
    }
}

// A word of the format somewhere else: what changes of bytes would need ages to find.
void put_word(std::vector<std::byte>& bytes, std::mt19937_64& random) {
    constexpr std::string_view words[] = {
        "general.alignment",
        "general.architecture",
        "rwkv6",
        "qwen3next",
        "mamba2",
        "wkv.head_size",
        "ssm.group_count",
        "gpt2",
        "gemma4",
        "plamo2",
        "expert_group_count",
        "expert_used_count",
        "rwkv",
        "bert",
        "t5",
        "full_attention_interval",
        "blk.0.ssm_a",
        "attn_qkv",
        "none",
        "whitespace",
        "tokenizer.ggml.pre",
        "d2t",
        "<0x00>",
        "\\n",
    };
    const auto word = words[random() % std::size(words)];
    if (bytes.size() <= word.size()) return;
    std::memcpy(bytes.data() + random() % (bytes.size() - word.size()), word.data(), word.size());
}

// All that is small: the data of tensors is nothing to look at.
built_file shrunk(built_file file) {
    for (auto& tensor : file.tensors) {
        tensor.shape = {tensor.name.find("norm") == std::string::npos ? 8u : 4u, 1};
        if (tensor.name == "token_embd.weight") tensor.shape = {1, 280};
        if (tensor.name.find("norm") != std::string::npos) tensor.shape = {4};
        tensor.n_bytes = 4;
        for (const auto size : tensor.shape) tensor.n_bytes *= size;
    }
    return file;
}

}  // namespace

int main(int n_arguments, char** arguments) {
    std::vector<input> corpus;
    corpus.push_back({build_adapter().bytes()});
    for (const char* tokenizer : {"none", "llama", "gpt2", "t5", "rwkv", "plamo2", "bert"}) {
        corpus.push_back({shrunk(build_model(tokenizer)).bytes()});
    }
    for (const char* arch : {"rwkv6", "qwen3next", "mamba2", "grovemoe"}) {
        auto file = shrunk(build_model());
        file.set("general.architecture", arch);
        for (const char* name : {"wkv.head_size", "full_attention_interval", "ssm.group_count",
                                 "ssm.time_step_rank", "experts_per_group"}) {
            file.set(std::string(arch) + "." + name, 4u);
        }
        file.set(std::string(arch) + ".block_count", 2u);
        file.set(std::string(arch) + ".expert_count", 8u);
        file.numbers(std::string(arch) + ".expert_used_count", t_u32,
                     std::vector<std::uint32_t>{0, 2});
        file.set(std::string(arch) + ".expert_group_count", 4u);
        file.set(std::string(arch) + ".expert_group_used_count", 2u);
        file.set(std::string(arch) + ".attention.head_count", 2u);
        file.set(std::string(arch) + ".embedding_length", 8u);
        file.set(std::string(arch) + ".rope.freq_base", 1.0f);
        corpus.push_back({file.bytes()});
    }
    return fuzz("GGUF headers", std::move(corpus), n_arguments, arguments, check,
                [](input& one, std::mt19937_64& random) {
                    if (random() % 5 == 0) {
                        put_word(one.bytes, random);
                    } else {
                        change_bytes(one.bytes, random);
                    }
                });
}
