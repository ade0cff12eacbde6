// GGUF files written by hand, field by field, independent of the code under test: small models with
// every kind of vocabulary, and a LoRA adapter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace kqview::test {

// GGUF's number of a type, and a value of it.
enum : std::uint32_t {
    t_u8,
    t_i8,
    t_u16,
    t_i16,
    t_u32,
    t_i32,
    t_f32,
    t_bool,
    t_string,
    t_array,
    t_u64,
    t_i64,
    t_f64
};

struct built_value {
    std::string key;
    std::uint32_t type;
    std::vector<std::byte> bytes;  // behind the type
};

struct built_tensor {
    std::string name;
    std::vector<std::uint64_t> shape;
    std::uint32_t type = 0;
    std::size_t n_bytes = 0;  // of its data
    std::int64_t shift = 0;   // added to its offset
};

inline void put_bytes(std::vector<std::byte>& out, const void* from, std::size_t n) {
    const auto* const bytes = static_cast<const std::byte*>(from);
    out.insert(out.end(), bytes, bytes + n);
}
template <class number>
void put(std::vector<std::byte>& out, number value) {
    put_bytes(out, &value, sizeof(value));
}
inline void put_text(std::vector<std::byte>& out, const std::string& text) {
    put(out, std::uint64_t{text.size()});
    put_bytes(out, text.data(), text.size());
}

struct built_file {
    std::uint32_t version = 3;
    std::size_t alignment = 32;
    std::vector<built_value> values;
    std::vector<built_tensor> tensors;

    built_value& at(const std::string& key) {
        for (auto& value : values) {
            if (value.key == key) return value;
        }
        values.push_back({key, t_u32, {}});
        return values.back();
    }
    built_tensor& tensor(const std::string& name) {
        for (auto& one : tensors) {
            if (one.name == name) return one;
        }
        tensors.push_back({name, {}, 0, 0, 0});
        return tensors.back();
    }
    void remove(const std::string& key) {
        std::erase_if(values, [&](const built_value& value) { return value.key == key; });
    }
    void set(const std::string& key, std::uint32_t value) { number(key, t_u32, value); }
    void set(const std::string& key, float value) { number(key, t_f32, value); }
    void set(const std::string& key, bool value) {
        number(key, t_bool, static_cast<std::uint8_t>(value));
    }
    void set(const std::string& key, const char* value) {
        auto& one = at(key);
        one.type = t_string;
        one.bytes.clear();
        put_text(one.bytes, value);
    }
    template <class value_type>
    void number(const std::string& key, std::uint32_t type, value_type value) {
        auto& one = at(key);
        one.type = type;
        one.bytes.clear();
        put(one.bytes, value);
    }
    void set(const std::string& key, const std::vector<std::string>& texts) {
        auto& one = array(key, t_string, texts.size());
        for (const auto& text : texts) put_text(one.bytes, text);
    }
    template <class value_type>
    void numbers(const std::string& key, std::uint32_t type,
                 const std::vector<value_type>& values_) {
        auto& one = array(key, type, values_.size());
        for (const auto value : values_) put(one.bytes, value);
    }
    // Without its elements.
    built_value& array(const std::string& key, std::uint32_t type, std::uint64_t n) {
        auto& one = at(key);
        one.type = t_array;
        one.bytes.clear();
        put(one.bytes, type);
        put(one.bytes, n);
        return one;
    }

    std::vector<std::byte> bytes() const {
        std::vector<std::byte> out;
        put_bytes(out, "GGUF", 4);
        put(out, version);
        put(out, std::uint64_t{tensors.size()});
        put(out, std::uint64_t{values.size()});
        for (const auto& value : values) {
            put_text(out, value.key);
            put(out, value.type);
            put_bytes(out, value.bytes.data(), value.bytes.size());
        }
        std::size_t offset = 0;
        for (const auto& one : tensors) {
            put_text(out, one.name);
            put(out, static_cast<std::uint32_t>(one.shape.size()));
            for (const auto size : one.shape) put(out, size);
            put(out, one.type);
            put(out, static_cast<std::uint64_t>(static_cast<std::int64_t>(offset) + one.shift));
            offset += padded(one.n_bytes);
        }
        out.resize(padded(out.size()) + offset);
        return out;
    }
    std::size_t padded(std::size_t n) const { return (n + alignment - 1) / alignment * alignment; }
};

inline void add_tensor(built_file& file, const std::string& name,
                       const std::vector<std::uint64_t>& shape) {
    std::size_t n = 4;
    for (const auto size : shape) n *= size;
    file.tensors.push_back({name, shape, 0, n, 0});
}

// One layer with 2 heads of 4 values, F32. `tokenizer` is tokenizer.ggml.model.
inline built_file build_model(const std::string& tokenizer = "none") {
    const std::uint64_t n_vocab = 280, n_embd = 8, n_ff = 8;
    built_file file;
    file.set("general.architecture", "llama");
    file.set("llama.block_count", 1u);
    file.set("llama.context_length", 64u);
    file.set("llama.embedding_length", 8u);
    file.set("llama.feed_forward_length", 8u);
    file.set("llama.attention.head_count", 2u);
    file.set("llama.attention.head_count_kv", 1u);
    file.set("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    file.set("llama.rope.dimension_count", 4u);
    file.set("llama.rope.freq_base", 10000.0f);
    file.set("llama.vocab_size", static_cast<std::uint32_t>(n_vocab));
    file.set("tokenizer.ggml.model", tokenizer.c_str());
    if (tokenizer != "none") {
        std::vector<std::string> tokens{"<unk>", "<s>", "</s>", "<pad>"};
        std::vector<std::int32_t> types{2, 3, 3, 3};
        const char* const digits = "0123456789ABCDEF";
        for (int byte = 0; byte < 256; ++byte) {
            const std::string hex{digits[byte / 16], digits[byte % 16]};
            tokens.push_back(tokenizer == "rwkv" ? "\\x" + hex : "<0x" + hex + ">");
            types.push_back(tokenizer == "bert" || tokenizer == "rwkv" ? 1 : 6);
        }
        while (tokens.size() < n_vocab) {
            tokens.push_back("t" + std::to_string(tokens.size()));
            types.push_back(1);
        }
        file.set("tokenizer.ggml.tokens", tokens);
        file.numbers("tokenizer.ggml.token_type", t_i32, types);
        file.numbers("tokenizer.ggml.scores", t_f32, std::vector<float>(n_vocab, -1.0f));
        for (const char* name :
             {"bos_token_id", "eos_token_id", "unknown_token_id", "seperator_token_id"}) {
            file.set("tokenizer.ggml." + std::string(name), 1u);
        }
        file.set("tokenizer.ggml.add_bos_token", true);
        file.set("tokenizer.ggml.merges", std::vector<std::string>{"a b", "t 1"});
    }
    add_tensor(file, "token_embd.weight", {n_embd, n_vocab});
    add_tensor(file, "output_norm.weight", {n_embd});
    add_tensor(file, "blk.0.attn_norm.weight", {n_embd});
    add_tensor(file, "blk.0.attn_q.weight", {n_embd, n_embd});
    add_tensor(file, "blk.0.attn_k.weight", {n_embd, n_embd / 2});
    add_tensor(file, "blk.0.ffn_up.weight", {n_embd, n_ff});
    return file;
}

inline built_file build_adapter() {
    built_file file;
    file.set("general.type", "adapter");
    file.set("general.architecture", "llama");
    file.set("adapter.type", "lora");
    file.set("adapter.lora.alpha", 4.0f);
    add_tensor(file, "blk.0.attn_q.weight.lora_a", {8, 2});
    add_tensor(file, "blk.0.attn_q.weight.lora_b", {2, 8});
    return file;
}

}  // namespace kqview::test
