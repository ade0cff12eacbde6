// gguf: what is read, and what is refused and why. Files are built by hand.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "base/error.h"
#include "gguf/checks.h"
#include "gguf/header.h"
#include "gguf_fixture.h"

using namespace kqview;
using namespace kqview::test;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

void check_model(const built_file& file) {
    const auto bytes = file.bytes();
    const auto header = read_gguf(bytes, "file");
    check_tensor_types(header, header);
    check_hyperparameters(header, header.tensors);
    check_vocabulary(header, header.tensors);
}

// Why the bytes are refused; "" where they are not.
std::string refusal_of(const std::function<void()>& call, errc code = errc::model_load) {
    try {
        call();
        return "";
    } catch (const error& failure) {
        CHECK(failure.code() == code);
        return failure.what();
    }
}

bool has(const std::string& text, const std::string& part) {
    CAPTURE(text);
    CAPTURE(part);
    return text.find(part) != std::string::npos;
}

// The model with one change is refused, in words that have all of `parts`.
void check_refused(const std::function<void(built_file&)>& change,
                   const std::vector<std::string>& parts, const std::string& tokenizer = "none",
                   errc code = errc::model_load) {
    auto file = build_model(tokenizer);
    change(file);
    const auto why = refusal_of([&] { check_model(file); }, code);
    for (const auto& part : parts) CHECK(has(why, part));
}

void set_type(built_file& file, const std::string& name, std::uint32_t type, std::size_t n_bytes) {
    file.tensor(name).type = type;
    file.tensor(name).n_bytes = n_bytes;
}

}  // namespace

TEST_CASE("gguf: sound models of every tokenizer and an adapter are taken") {
    for (const char* tokenizer :
         {"none", "llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "hybriddna", "unheard of"}) {
        CAPTURE(tokenizer);
        CHECK(refusal_of([&] { check_model(build_model(tokenizer)); }) == "");
    }
    const auto bytes = build_adapter().bytes();
    CHECK(refusal_of([&] { check_adapter(read_gguf(bytes, "file")); }) == "");
}

TEST_CASE("gguf: values and tensors are what the file says") {
    auto file = build_model();
    file.numbers("a.list", t_i16, std::vector<std::int16_t>{-3, 4});
    file.number("a.large", t_u64, ~std::uint64_t{0});
    file.number("a.real", t_f64, 0.5);
    const auto bytes = file.bytes();
    const auto header = read_gguf(bytes, "file");
    const auto* const list = header.find("a.list");
    REQUIRE(list);
    CHECK(list->type_text() == "array of i16");
    CHECK(list->size() == 2);
    CHECK(list->integer(0) == -3);
    CHECK(header.find("a.large")->integer() == std::numeric_limits<std::int64_t>::max());
    CHECK(header.find("a.real")->real() == 0.5);
    CHECK(header.find("general.architecture")->strings[0] == "llama");
    CHECK(header.find("nothing") == nullptr);
    const auto& tensor = header.tensors[0];
    CHECK(tensor.name == "token_embd.weight");
    CHECK(tensor.shape_text() == "[8, 280]");
    CHECK(tensor.n_bytes == 8 * 280 * 4);
}

TEST_CASE("gguf: a file that was cut anywhere is refused") {
    const auto bytes = build_model("llama").bytes();
    // The last tensor ends at a multiple of the alignment, so each byte counts.
    for (std::size_t n = 0; n < bytes.size(); n += n < 4096 ? 1 : 97) {
        const std::vector<std::byte> cut(bytes.begin(),
                                         bytes.begin() + static_cast<std::ptrdiff_t>(n));
        CAPTURE(n);
        REQUIRE(refusal_of([&] { read_gguf(cut, "file"); }) != "");
    }
}

TEST_CASE("gguf: a structure that does not hold together is refused") {
    check_refused([](auto& file) { file.version = 1; }, {"version 1"});
    check_refused([](auto& file) { file.values.push_back(file.values[1]); },
                  {"'llama.block_count'", "twice"});
    check_refused([](auto& file) { file.tensors.push_back(file.tensors[1]); },
                  {"'output_norm.weight'", "twice"});
    check_refused([](auto& file) { file.array("a.b", t_array, 0); }, {"'a.b'", "array of arrays"});
    check_refused([](auto& file) { file.array("a.b", t_u8, 1ull << 60); },
                  {"'a.b'", "1152921504606846976"});
    check_refused([](auto& file) { file.at("a.b").type = 13; }, {"'a.b'", "type 13"});
    check_refused([](auto& file) { file.set("a\nb", 1u); }, {"'a?b'", "printable ASCII"});
    check_refused([](auto& file) { file.set("general.alignment", 24u); },
                  {"general.alignment", "24", "power of 2"});
    check_refused([](auto& file) { file.number("general.alignment", t_u64, std::uint64_t{32}); },
                  {"general.alignment", "u64"});
    check_refused([](auto& file) { file.tensors[1].shift = 32; }, {"'output_norm.weight'", "gap"});
    check_refused([](auto& file) { file.tensors[1].shift = -32; },
                  {"'output_norm.weight'", "overlap"});
    check_refused([](auto& file) { file.tensors[0].name = std::string(64, 'x'); }, {"64 bytes"});
    check_refused([](auto& file) { file.tensors[0].shape = {1, 1, 1, 1, 1}; }, {"5 dimensions"});
    check_refused([](auto& file) { file.tensors[0].shape = {1ull << 32, 1ull << 32, 4}; },
                  {"'token_embd.weight'", "shape [4294967296, 4294967296, 4]"});
    check_refused([](auto& file) { file.tensors[0].shape = {0, 280}; }, {"shape [0, 280]"});
    check_refused([](auto& file) { file.tensors.back().shape = {8, 4096}; },
                  {"'blk.0.ffn_up.weight'", "bytes"});
    for (const std::uint32_t type : {4u, 5u, 31u, 36u, 43u, ~0u}) {
        check_refused([&](auto& file) { file.tensors[0].type = type; },
                      {"'token_embd.weight'", "type " + std::to_string(type)});
    }
    check_refused([](auto& file) { file.tensors[0].type = 8; }, {"rows of 8", "multiple of 32"});
}

TEST_CASE("gguf: a table of tensors larger than memory costs nothing") {
    auto bytes = build_model().bytes();
    const std::uint64_t n = 1ull << 40;
    std::memcpy(bytes.data() + 8, &n, sizeof(n));
    CHECK(has(refusal_of([&] { read_gguf(bytes, "file"); }), "number of tensors"));
}

TEST_CASE("gguf: numbers that llama.cpp divides by or that have no meaning are refused") {
    const auto with = [](const char* key, auto value, const std::vector<std::string>& parts) {
        check_refused([&](auto& file) { file.set(key, value); }, parts);
    };
    with("llama.block_count", 0u, {"llama.block_count is 0"});
    with("llama.block_count", 513u, {"513", "512"});
    with("llama.embedding_length", 0u, {"llama.embedding_length is 0"});
    with("llama.embedding_length", 1.0f, {"f32", "u32"});
    with("llama.attention.head_count", 0u, {"llama.attention.head_count is 0 in layer 0"});
    with("llama.attention.head_count", 9u, {"head of 1 or more values"});
    with("llama.attention.head_count_kv", 3u, {"is 3 in layer 0", "2 heads"});
    with("llama.attention.layer_norm_rms_epsilon", not_a_number, {"epsilon", "nan"});
    with("llama.attention.layer_norm_rms_epsilon", -1e-6f, {"epsilon", "0 or more"});
    with("llama.rope.freq_base", not_a_number, {"llama.rope.freq_base"});
    with("llama.logit_scale", not_a_number, {"llama.logit_scale"});
    with("llama.rope.dimension_count", 6u, {"is 6", "2..4"});
    with("llama.rope.dimension_count", 3u, {"is 3", "even"});
    with("llama.rope.dimension_count", 0u, {"is 0", "even"});
    with("llama.attention.key_length_swa", 2u, {"dimension_count_swa is missing", "4", "2..2"});
    with("llama.expert_count", 1025u, {"1025", "1024"});
    with("llama.expert_used_count", 1u, {"1 of 0 experts"});
    with("llama.vocab_size", 0xffffffffu, {"llama.vocab_size is 4294967295"});
    check_refused(
        [](auto& file) {
            file.numbers("llama.attention.head_count", t_u32, std::vector<std::uint32_t>{2, 2});
        },
        {"2 values", "1 layers"});
    check_refused([](auto& file) { file.remove("general.architecture"); },
                  {"general.architecture is missing"});
}

TEST_CASE("gguf: what only some architectures divide by is refused for them alone") {
    for (const auto& [arch, name] :
         {std::pair{"rwkv6", "wkv.head_size"}, std::pair{"qwen3next", "full_attention_interval"},
          std::pair{"mamba2", "ssm.time_step_rank"},
          std::pair{"afmoe", "attention.sliding_window"}}) {
        const auto key = std::string(arch) + "." + name;
        check_refused(
            [&](auto& file) {
                file.set("general.architecture", arch);
                file.set(std::string(arch) + ".block_count", 1u);
                file.set(std::string(arch) + ".embedding_length", 8u);
                file.set(std::string(arch) + ".attention.head_count", 2u);
                file.set(key, 0u);
            },
            {key + " is 0"});
        auto file = build_model();
        file.set("llama." + std::string(name), 0u);
        CHECK(refusal_of([&] { check_model(file); }) == "");
    }
}

TEST_CASE("gguf: sections of rotary positions lie within a head, and some models need them") {
    const auto with = [](const char* arch, const std::vector<std::int32_t>& sections) {
        auto file = build_model();
        for (auto& value : file.values) {
            if (value.key.starts_with("llama.")) value.key = arch + value.key.substr(5);
        }
        file.set("general.architecture", arch);
        file.numbers(std::string(arch) + ".rope.dimension_sections", t_i32, sections);
        return refusal_of([&] { check_model(file); });
    };
    CHECK(with("qwen2vl", {2, 1, 1, 0}) == "");
    CHECK(with("llama", {0, 0, 0, 0}) == "");
    CHECK(has(with("qwen2vl", {0, 0, 0, 4}), "dimension_sections have 4 values"));
    CHECK(has(with("llama", {2, 2, 1, 0}), "dimension_sections have 5 values"));
    CHECK(has(with("llama", {-1, 2, 1, 0}), "section of -1"));
}

TEST_CASE("gguf: a model that rotates nothing may say so") {
    auto file = build_model();
    file.set("general.architecture", "glm5-next");
    file.set("glm5-next.block_count", 1u);
    file.set("glm5-next.embedding_length", 8u);
    file.set("glm5-next.attention.head_count", 2u);
    file.set("glm5-next.rope.dimension_count", 0u);
    CHECK(refusal_of([&] { check_model(file); }) == "");
}

TEST_CASE("gguf: a part of another model is refused") {
    for (const char* arch : {"clip", "dflash", "eagle3", "gemma4-assistant"}) {
        auto file = build_model();
        file.set("general.architecture", arch);
        const auto why = refusal_of([&] { check_model(file); }, errc::unsupported_model);
        CHECK(has(why, text_of(arch, " is a part of another model")));
    }
}

TEST_CASE("gguf: a T5 model without relative positions is refused") {
    auto file = build_model();
    file.set("general.architecture", "t5encoder");
    file.set("t5encoder.block_count", 1u);
    file.set("t5encoder.embedding_length", 8u);
    file.set("t5encoder.attention.head_count", 2u);
    CHECK(has(refusal_of([&] { check_model(file); }), "'enc.blk.0.attn_rel_b.weight' is missing"));
    add_tensor(file, "enc.blk.0.attn_rel_b.weight", {4, 8});
    CHECK(refusal_of([&] { check_model(file); }) == "");
}

TEST_CASE("gguf: a layer of experts without their way up is refused") {
    auto file = build_model();
    add_tensor(file, "blk.0.ffn_down_exps.weight", {8, 8, 2});
    CHECK(has(refusal_of([&] { check_model(file); }), "layer 0 has ffn_down_exps.weight"));
    add_tensor(file, "blk.0.ffn_gate_up_exps.weight", {8, 16, 2});
    CHECK(refusal_of([&] { check_model(file); }) == "");
}

TEST_CASE("gguf: layers without attention may have no heads") {
    auto file = build_model();
    file.set("llama.block_count", 2u);
    file.numbers("llama.attention.head_count", t_u32, std::vector<std::uint32_t>{2, 0});
    file.numbers("llama.attention.head_count_kv", t_i32, std::vector<std::int32_t>{1, 0});
    CHECK(refusal_of([&] { check_model(file); }) == "");
    add_tensor(file, "blk.1.attn_q.weight", {8, 8});
    CHECK(has(refusal_of([&] { check_model(file); }), "head_count is 0 in layer 1"));
    file.numbers("llama.attention.head_count", t_u32, std::vector<std::uint32_t>{2, 2});
    CHECK(has(refusal_of([&] { check_model(file); }), "head_count_kv is 0 in layer 1"));
    add_tensor(file, "blk.1.ssm_a", {8});  // recurrent, with a tensor of the same name
    CHECK(refusal_of([&] { check_model(file); }) == "");
}

TEST_CASE("gguf: tensors of a type that ggml cannot compute with are refused") {
    constexpr const char* weight = "blk.0.attn_q.weight";
    for (const auto& [type, n_bytes] :
         {std::pair{24u, 64u}, std::pair{25u, 128u}, std::pair{26u, 256u}, std::pair{27u, 512u},
          std::pair{28u, 512u}}) {
        check_refused([&](auto& file) { set_type(file, weight, type, n_bytes); },
                      {weight, "multiplied"});
    }
    check_refused(
        [&](auto& file) {
            file.tensor(weight).shape = {32, 8};
            set_type(file, weight, 9, 36 * 8);
        },
        {weight, "Q8_1"});
    check_refused([](auto& file) { set_type(file, "output_norm.weight", 1, 16); },
                  {"'output_norm.weight'", "F16", "F32"});
    auto file = build_model();
    set_type(file, weight, 1, 128);
    CHECK(refusal_of([&] { check_model(file); }) == "");
    set_type(file, weight, 30, 128);
    CHECK(refusal_of([&] { check_model(file); }) == "");
}

TEST_CASE("gguf: vocabularies that tokenizers would not survive are refused") {
    const auto tokens_without = [](const std::string& text, const char* tokenizer) {
        return [=](built_file& file) {
            std::vector<std::string> tokens;
            for (int i = 0; i < 280; ++i) tokens.push_back("x" + std::to_string(i));
            const char* const digits = "0123456789ABCDEF";
            for (int i = 0; i < 256; ++i) {
                const std::string hex{digits[i / 16], digits[i % 16]};
                const auto byte = tokenizer[0] == 'r' ? "\\x" + hex : "<0x" + hex + ">";
                if (byte != text) tokens[static_cast<std::size_t>(i) + 4] = byte;
            }
            file.set("tokenizer.ggml.tokens", tokens);
            if (tokenizer[0] != 'p') file.remove("tokenizer.ggml.token_type");
            if (tokenizer[0] == 'r') file.remove("tokenizer.ggml.unknown_token_id");
        };
    };
    check_refused(tokens_without("<0x41>", "llama"), {"byte 65"}, "llama", errc::unsupported_model);
    check_refused(tokens_without("\\x41", "rwkv"), {"byte 65"}, "rwkv", errc::unsupported_model);
    check_refused(tokens_without("<0x41>", "plamo2"), {"token 69", "byte"}, "plamo2");
    const auto with_tokens = [](const std::vector<std::string>& tokens) {
        return [=](built_file& file) {
            file.set("tokenizer.ggml.tokens", tokens);
            file.remove("tokenizer.ggml.token_type");
            file.remove("tokenizer.ggml.scores");
        };
    };
    check_refused(with_tokens({"a", "b", "a"}), {"token 2 'a'", "twice"}, "gpt2");
    check_refused(with_tokens({"a", std::string(20000, 'b')}), {"token 1", "20000 bytes"}, "gpt2");
    check_refused(with_tokens({"a", std::string(2000, 'b')}), {"token 1", "2000 bytes", "1024"},
                  "rwkv");
    check_refused(with_tokens({}), {"tokenizer.ggml.tokens is empty"}, "gpt2");
    check_refused(with_tokens({}), {"tokenizer.ggml.tokens is empty"}, "test");
    check_refused([](auto& file) { file.set("tokenizer.ggml.tokens", 1u); },
                  {"tokenizer.ggml.tokens", "u32"}, "gpt2");
    check_refused(
        [](auto& file) {
            file.numbers("tokenizer.ggml.scores", t_f32, std::vector<float>(279, 0.0f));
        },
        {"tokenizer.ggml.scores has 279", "280 tokens"}, "llama");
    check_refused(
        [](auto& file) {
            file.numbers("tokenizer.ggml.token_type", t_f32, std::vector<float>(280, 1.0f));
        },
        {"tokenizer.ggml.token_type", "array of f32"}, "llama");
    check_refused(
        [](auto& file) {
            file.numbers("tokenizer.ggml.token_type", t_i32, std::vector<std::int32_t>(280, 6));
        },
        {"token 0", "byte"}, "gpt2");
    check_refused(
        [](auto& file) {
            file.set("tokenizer.ggml.merges", std::vector<std::string>{"a b", "ab"});
        },
        {"merge 1 'ab'"}, "gpt2");
    check_refused([](auto& file) { file.set("tokenizer.ggml.pre", "whitespace"); },
                  {"tokenizer.ggml.pre"}, "gpt2");
}

TEST_CASE("gguf: a vocabulary without an id that its tokenizer needs is refused") {
    const auto check = [](const char* tokenizer, const char* missing, bool is_refused) {
        CAPTURE(tokenizer);
        CAPTURE(missing);
        auto file = build_model(tokenizer);
        file.remove(missing);
        const auto why = refusal_of([&] { check_model(file); }, errc::unsupported_model);
        CHECK((is_refused ? has(why, missing) : why.empty()));
    };
    check("t5", "tokenizer.ggml.bos_token_id", true);  // add_bos_token is true
    check("llama", "tokenizer.ggml.bos_token_id", false);
    check("gemma4", "tokenizer.ggml.bos_token_id", true);
    check("t5", "tokenizer.ggml.unknown_token_id", false);
    // An id beyond the vocabulary counts as none, as llama.cpp takes its default instead.
    check_refused([](auto& file) { file.set("tokenizer.ggml.bos_token_id", 280u); },
                  {"bos_token_id"}, "t5", errc::unsupported_model);
}

TEST_CASE("gguf: adapters that llama.cpp would not survive are refused") {
    const auto refusal = [](const std::function<void(built_file&)>& change) {
        auto file = build_adapter();
        change(file);
        const auto bytes = file.bytes();
        return refusal_of([&] { check_adapter(read_gguf(bytes, "file")); });
    };
    CHECK(has(refusal([](auto& file) { file.set("general.type", 1u); }), "general.type"));
    CHECK(has(refusal([](auto& file) { file.set("adapter.lora.alpha", not_a_number); }),
              "lora.alpha"));
    CHECK(has(refusal([](auto& file) { file.set("adapter.lora.alpha", 1u); }), "u32"));
    CHECK(has(refusal([](auto& file) { set_type(file, "blk.0.attn_q.weight.lora_b", 26, 64); }),
              "lora_b"));
}
