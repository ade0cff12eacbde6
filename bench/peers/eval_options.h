// Command line of kq-eval-rows, and the token ids it feeds.
// Never: touches a model; ids are checked against the vocabulary's size that the caller passes.
#pragma once

#include "llama.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace kqview {

struct options {
    std::string model;
    std::string ids;
    std::string forced_ids;
    std::string out;
    std::string kv_type = "f16";
    std::string bench;  // "", "plain", "callback" or "both"
    int prompt_len = 0;
    int n_predict = 1;
    int n_ctx = 0;
    int n_ubatch = 512;
    int n_threads = 2;
    int n_gpu_layers = 0;
    int n_repeat = 1;
    bool flash_attn = false;
    bool all_rows = false;
    bool logits = false;
    bool encode = false;  // one llama_encode: the encoder of a model that also has a decoder
};

inline const char* const usage =
    "kq-eval-rows --model M (--ids FILE|1,2,3 [--prompt-len N] | --prompt-len N) [--n-predict K]\n"
    "  [--forced-ids FILE|1,2,3] [--flash-attn off|on] [--kv-type f16|f32|q8_0|q4_0] [--n-ctx N]\n"
    "  [--n-ubatch N] [--threads N] [--n-gpu-layers N] [--rows last|all] [--encode]\n"
    "  (--out DIR [--logits] | --bench plain|callback|both [--repeat R])\n";

inline int to_int(const std::string& name, const std::string& text, int low) {
    char* end = nullptr;
    const long value = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || value < low || value > 1 << 24) {
        throw std::runtime_error(name + ": got '" + text + "'; pass a whole number from " +
                                 std::to_string(low) + " to 16777216");
    }
    return static_cast<int>(value);
}

inline std::string one_of(const std::string& name, const std::string& text,
                          std::initializer_list<const char*> allowed) {
    std::string list;
    for (const char* word : allowed) {
        if (text == word) {
            return text;
        }
        list += std::string(list.empty() ? "" : ", ") + word;
    }
    throw std::runtime_error(name + ": got '" + text + "'; pass one of " + list);
}

inline options parse(int argc, char** argv) {
    options o;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--logits" || name == "--encode") {
            (name == "--logits" ? o.logits : o.encode) = true;
            continue;
        }
        if (i + 1 == argc) {
            throw std::runtime_error(name + ": no value; see the usage");
        }
        const std::string value = argv[++i];
        if (name == "--model")
            o.model = value;
        else if (name == "--ids")
            o.ids = value;
        else if (name == "--forced-ids")
            o.forced_ids = value;
        else if (name == "--out")
            o.out = value;
        else if (name == "--kv-type")
            o.kv_type = one_of(name, value, {"f16", "f32", "q8_0", "q4_0"});
        else if (name == "--bench")
            o.bench = one_of(name, value, {"plain", "callback", "both"});
        else if (name == "--flash-attn")
            o.flash_attn = one_of(name, value, {"off", "on"}) == "on";
        else if (name == "--rows")
            o.all_rows = one_of(name, value, {"last", "all"}) == "all";
        else if (name == "--prompt-len")
            o.prompt_len = to_int(name, value, 1);
        else if (name == "--n-predict")
            o.n_predict = to_int(name, value, 1);
        else if (name == "--n-ctx")
            o.n_ctx = to_int(name, value, 1);
        else if (name == "--n-ubatch")
            o.n_ubatch = to_int(name, value, 1);
        else if (name == "--threads")
            o.n_threads = to_int(name, value, 1);
        else if (name == "--n-gpu-layers")
            o.n_gpu_layers = to_int(name, value, 0);
        else if (name == "--repeat")
            o.n_repeat = to_int(name, value, 1);
        else
            throw std::runtime_error(name + ": no such option; see the usage");
    }
    if (o.model.empty() || (o.ids.empty() && o.prompt_len == 0) ||
        (o.out.empty() == o.bench.empty())) {
        throw std::runtime_error(
            "arguments: --model, --ids or --prompt-len, and one of --out and --bench "
            "are needed");
    }
    return o;
}

inline std::vector<llama_token> read_ids(const std::string& name, const std::string& text,
                                         int n_vocab) {
    std::string list = text;
    if (text.find_first_not_of("0123456789,") != std::string::npos) {
        std::ifstream file(text);
        if (!file) {
            throw std::runtime_error(name + ": cannot open '" + text +
                                     "'; pass a file or a list like 1,2,3");
        }
        list.assign(std::istreambuf_iterator<char>(file), {});
    }
    std::replace_if(
        list.begin(), list.end(), [](char c) { return std::strchr(",[]\n\r\t", c); }, ' ');
    std::istringstream words(list);
    std::vector<llama_token> ids;
    for (std::string word; words >> word;) {
        const int id = to_int(name, word, 0);
        if (id >= n_vocab) {
            throw std::runtime_error(name + ": id " + word + ", the vocabulary has " +
                                     std::to_string(n_vocab) + "; pass smaller ids");
        }
        ids.push_back(id);
    }
    return ids;
}

// Ids that do not repeat soon, for runs where only the time counts.
inline std::vector<llama_token> spread_ids(int n, int n_vocab) {
    std::vector<llama_token> ids;
    for (int i = 0; i < n; ++i) {
        ids.push_back(static_cast<llama_token>((i * 7919LL + 13) % n_vocab));
    }
    return ids;
}

}  // namespace kqview
