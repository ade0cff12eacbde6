// kq-eval-rows: attention rows by the stock route, llama.cpp's eval callback. Values to compare
// with, and the route that benchmarks compare against. A program over llama.h alone, linked to an
// unmodified llama.cpp, so a fault of kqview's tap cannot hide in both sides.
// Owns:    its own model, contexts and files.
// Threads: one; llama.cpp's workers are not seen here.
// Never:   reads a tensor after the graph ran. The softmax runs in place over kq, so each row is
// copied in the
//          callback that follows its own node.
// Usage:   see README.md, or run it without arguments.

#include "eval_options.h"

#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// One tensor's wanted rows of one ubatch, packed [n_head][n_rows][n_kv].
struct rows {
    std::vector<float> values;
    int64_t n_kv = 0;
    int64_t n_rows = 0;
    int64_t n_head = 0;

    // t is F32 ne=[n_kv, n_tokens, n_head, 1]: one sequence, so one stream.
    void copy(const ggml_tensor* t, bool all) {
        if (t->type != GGML_TYPE_F32 || t->ne[3] != 1 || t->nb[0] != sizeof(float)) {
            throw std::runtime_error(std::string(t->name) + ": not F32 rows of one stream");
        }
        n_kv = t->ne[0];
        n_rows = all ? t->ne[1] : 1;
        n_head = t->ne[2];
        const size_t size = static_cast<size_t>(n_kv) * sizeof(float);
        values.resize(static_cast<size_t>(n_kv * n_rows * n_head));
        float* to = values.data();
        for (int64_t head = 0; head < n_head; ++head) {
            for (int64_t row = t->ne[1] - n_rows; row < t->ne[1]; ++row, to += n_kv) {
                const size_t from =
                    static_cast<size_t>(head) * t->nb[2] + static_cast<size_t>(row) * t->nb[1];
                ggml_backend_tensor_get(t, to, from, size);
            }
        }
    }
};

// A layer with two softmaxes (a decoder with cross attention) keeps its first, the self attention.
struct layer_rows {
    rows kq;     // before scale and mask
    rows input;  // what the softmax reads where a softcap or bias lies between; else empty
    rows probs;
    float scale = 1.0f;
    float max_bias = 0.0f;
    int n_softmax = 0;
};

struct capture {
    std::map<int, layer_rows> layers;
    bool kq_only = false;
    bool all_rows = false;
};

enum class node { other, kq, input, probs };

node classify(const char* name, int& il) {
    const char* dash = std::strrchr(name, '-');
    if (std::strncmp(name, "kq", 2) != 0 || dash == nullptr) {
        return node::other;
    }
    char* end = nullptr;
    il = static_cast<int>(std::strtol(dash + 1, &end, 10));
    if (end == dash + 1 || *end != '\0') {
        return node::other;
    }
    const std::string base(name, dash);
    if (base == "kq") {
        return node::kq;
    }
    if (base == "kq_soft_max") {
        return node::probs;
    }
    // What build_attn_mha may put between product and softmax; the last one asked for is the
    // softmax's input.
    if (base == "kq_scaled" || base == "kq_scaled_2" || base == "kq_plus_kq_b") {
        return node::input;
    }
    return node::other;
}

bool on_node(ggml_tensor* t, bool ask, void* user_data) {
    auto& to = *static_cast<capture*>(user_data);
    int il = 0;
    const node kind = classify(t->name, il);
    const bool wanted = kind == node::kq || (kind != node::other && !to.kq_only);
    if (ask || !wanted) {
        return ask ? wanted : true;
    }
    layer_rows& layer = to.layers[il];
    if (layer.n_softmax > 0) {
        layer.n_softmax += kind == node::probs;
        return true;
    }
    (kind == node::kq      ? layer.kq
     : kind == node::probs ? layer.probs
                           : layer.input)
        .copy(t, to.all_rows);
    if (kind == node::probs) {
        layer.n_softmax = 1;
        std::memcpy(&layer.scale, reinterpret_cast<const float*>(t->op_params) + 0, sizeof(float));
        std::memcpy(&layer.max_bias, reinterpret_cast<const float*>(t->op_params) + 1,
                    sizeof(float));
    }
    return true;
}

using kqview::options;
using kqview::read_ids;
using kqview::spread_ids;
using model_ptr = std::unique_ptr<llama_model, decltype(&llama_model_free)>;
using context_ptr = std::unique_ptr<llama_context, decltype(&llama_free)>;

context_ptr open_context(const options& o, llama_model* model, bool flash_attn, capture* to) {
    const ggml_type kv = o.kv_type == "f32"    ? GGML_TYPE_F32
                         : o.kv_type == "q8_0" ? GGML_TYPE_Q8_0
                         : o.kv_type == "q4_0" ? GGML_TYPE_Q4_0
                                               : GGML_TYPE_F16;
    llama_context_params p = llama_context_default_params();
    p.n_ctx = static_cast<uint32_t>(o.n_ctx);
    p.n_batch = p.n_ctx;
    p.n_ubatch = static_cast<uint32_t>(o.n_ubatch);
    p.n_threads = p.n_threads_batch = o.n_threads;
    p.flash_attn_type = flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    p.type_k = kv;
    // llama.cpp has no quantised V without flash attention; kq does not depend on V's type within a
    // layer.
    p.type_v = ggml_is_quantized(kv) && !flash_attn ? GGML_TYPE_F16 : kv;
    p.swa_full = true;
    if (to != nullptr) {
        p.cb_eval = on_node;
        p.cb_eval_user_data = to;
    }
    context_ptr context(llama_init_from_model(model, p), llama_free);
    if (!context) {
        throw std::runtime_error("context: llama.cpp refused it; see the lines above");
    }
    return context;
}

// Decodes (or encodes) and waits; milliseconds.
double decode(llama_context* context, std::vector<llama_token>& ids, bool encode = false) {
    const auto start = std::chrono::steady_clock::now();
    const auto batch = llama_batch_get_one(ids.data(), static_cast<int32_t>(ids.size()));
    const int rc = encode ? llama_encode(context, batch) : llama_decode(context, batch);
    llama_synchronize(context);
    if (rc != 0) {
        throw std::runtime_error((encode ? "llama_encode: returned " : "llama_decode: returned ") +
                                 std::to_string(rc));
    }
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
        .count();
}

std::string join(const std::vector<std::string>& items) {
    std::string text;
    for (const std::string& item : items) {
        text += (text.empty() ? "" : ", ") + item;
    }
    return "[" + text + "]";
}

class rows_file {
public:
    explicit rows_file(const std::filesystem::path& path) : file_(path, std::ios::binary) {
        if (!file_) {
            throw std::runtime_error("out: cannot write " + path.string() +
                                     "; pass a folder that is writable");
        }
    }
    void write(const float* values, size_t n) {
        file_.write(reinterpret_cast<const char*>(values),
                    static_cast<std::streamsize>(n * sizeof(float)));
    }

private:
    std::ofstream file_;
};

void run_capture(const options& o, llama_model* model, std::vector<llama_token> prompt,
                 int n_vocab) {
    const std::vector<llama_token> forced = read_ids("--forced-ids", o.forced_ids, n_vocab);
    const std::filesystem::path out(o.out);
    std::filesystem::create_directories(out);
    rows_file kq(out / "kq.f32"), input(out / "input.f32"), probs(out / "probs.f32"),
        logits(out / "logits.f32");
    capture to;
    to.all_rows = o.all_rows;
    const context_ptr context = open_context(o, model, o.flash_attn, &to);

    std::vector<std::string> calls, tokens;
    int n_past = 0;
    // One llama_decode, cut at n_ubatch so that every ubatch is seen by itself; `--rows last` keeps
    // the last one's.
    const auto step = [&](std::vector<llama_token>& ids, int i_step) {
        for (size_t begin = 0; begin < ids.size(); begin += static_cast<size_t>(o.n_ubatch)) {
            const size_t end = std::min(ids.size(), begin + static_cast<size_t>(o.n_ubatch));
            std::vector<llama_token> part(ids.begin() + static_cast<std::ptrdiff_t>(begin),
                                          ids.begin() + static_cast<std::ptrdiff_t>(end));
            to.layers.clear();
            const double ms = decode(context.get(), part, o.encode);
            n_past += static_cast<int>(part.size());
            if (end != ids.size() && !o.all_rows) {
                continue;
            }
            std::vector<std::string> layers;
            for (const auto& [il, layer] : to.layers) {
                if (layer.n_softmax == 0) {
                    continue;  // a product of that name without a softmax is no attention
                }
                kq.write(layer.kq.values.data(), layer.kq.values.size());
                input.write(layer.input.values.data(), layer.input.values.size());
                probs.write(layer.probs.values.data(), layer.probs.values.size());
                char text[256];
                std::snprintf(text, sizeof(text),
                              "{\"layer\": %d, \"n_head\": %d, \"n_rows\": %d, \"n_kv\": %d, "
                              "\"scale\": %.9g, "
                              "\"max_bias\": %.9g, \"n_softmax\": %d, \"input\": %s}",
                              il, static_cast<int>(layer.kq.n_head),
                              static_cast<int>(layer.kq.n_rows), static_cast<int>(layer.kq.n_kv),
                              static_cast<double>(layer.scale), static_cast<double>(layer.max_bias),
                              layer.n_softmax, layer.input.values.empty() ? "false" : "true");
                layers.emplace_back(text);
            }
            std::ostringstream call;
            call << "{\"step\": " << i_step << ", \"n_past\": " << n_past - 1 << ", \"ms\": " << ms
                 << ", \"layers\": " << join(layers) << "}";
            calls.push_back(call.str());
        }
    };

    std::vector<llama_token> next = std::move(prompt);
    const size_t n_prompt = next.size();
    for (int i = 0; i < o.n_predict; ++i) {
        step(next, i);
        if (o.encode) {
            break;
        }
        const float* row = llama_get_logits_ith(context.get(), -1);
        if (o.logits) {
            logits.write(row, static_cast<size_t>(n_vocab));
        }
        const auto greedy = static_cast<llama_token>(std::max_element(row, row + n_vocab) - row);
        next = {static_cast<size_t>(i) < forced.size() ? forced[static_cast<size_t>(i)] : greedy};
        tokens.push_back(std::to_string(next[0]));
    }
    std::ofstream meta(out / "meta.json");
    meta << "{\"n_layer\": " << llama_model_n_layer(model)
         << ", \"n_head\": " << llama_model_n_head(model) << ", \"n_vocab\": " << n_vocab
         << ", \"n_prompt\": " << n_prompt
         << ", \"has_cache\": " << (llama_get_memory(context.get()) != nullptr ? "true" : "false")
         << ", \"flash_attn\": " << (o.flash_attn ? "true" : "false")
         << ", \"logits\": " << (o.logits ? "true" : "false") << ",\n\"tokens\": " << join(tokens)
         << ",\n\"calls\": " << join(calls) << "}\n";
    if (!meta.flush()) {
        throw std::runtime_error("out: cannot write meta.json; free some space");
    }
}

std::string bench_once(const options& o, llama_context* context, std::vector<llama_token> prompt,
                       int n_vocab) {
    llama_memory_clear(llama_get_memory(context), true);
    const double prefill_ms = decode(context, prompt);
    std::vector<std::string> decode_ms;
    for (const llama_token id : spread_ids(o.n_predict, n_vocab)) {
        std::vector<llama_token> one = {id};
        decode_ms.push_back(std::to_string(decode(context, one)));
    }
    return "{\"prefill_ms\": " + std::to_string(prefill_ms) +
           ", \"decode_ms\": " + join(decode_ms) + "}";
}

// Plain and callback runs alternate, so that a slow spell of the machine meets both.
void run_bench(const options& o, llama_model* model, const std::vector<llama_token>& prompt,
               int n_vocab) {
    capture to;
    to.kq_only = true;
    to.all_rows = o.all_rows;
    context_ptr plain(nullptr, llama_free), callback(nullptr, llama_free);
    if (o.bench != "callback") {
        plain = open_context(o, model, o.flash_attn, nullptr);
    }
    if (o.bench != "plain") {
        callback =
            open_context(o, model, false, &to);  // with flash attention there is no kq to read
    }
    std::vector<llama_token> warm_up = {0, 0};
    decode(plain ? plain.get() : callback.get(), warm_up);  // brings the weights into memory
    std::vector<std::string> plain_runs, callback_runs;
    for (int i = 0; i < o.n_repeat; ++i) {
        if (plain) {
            plain_runs.push_back(bench_once(o, plain.get(), prompt, n_vocab));
        }
        if (callback) {
            callback_runs.push_back(bench_once(o, callback.get(), prompt, n_vocab));
        }
    }
    std::printf(
        "{\"n_prompt\": %zu, \"n_predict\": %d, \"threads\": %d, \"plain_flash_attn\": %s, "
        "\"kv_type\": "
        "\"%s\",\n\"plain\": %s,\n\"callback\": %s}\n",
        prompt.size(), o.n_predict, o.n_threads, o.flash_attn ? "true" : "false", o.kv_type.c_str(),
        join(plain_runs).c_str(), join(callback_runs).c_str());
}

void run(options o) {
    llama_log_set(
        [](ggml_log_level level, const char* text, void*) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                std::fputs(text, stderr);
            }
        },
        nullptr);
    llama_backend_init();
    llama_model_params p = llama_model_default_params();
    p.n_gpu_layers = o.n_gpu_layers;
    const model_ptr model(llama_model_load_from_file(o.model.c_str(), p), llama_model_free);
    if (!model) {
        throw std::runtime_error("model: llama.cpp cannot load '" + o.model +
                                 "'; see the lines above");
    }
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
    std::vector<llama_token> prompt =
        o.ids.empty() ? spread_ids(o.prompt_len, n_vocab) : read_ids("--ids", o.ids, n_vocab);
    if (o.prompt_len > 0) {
        prompt.resize(std::min(prompt.size(), static_cast<size_t>(o.prompt_len)));
    }
    const int n_needed = static_cast<int>(prompt.size()) + o.n_predict;
    o.n_ctx = std::max(o.n_ctx, o.n_ctx == 0 ? n_needed : 0);
    if (prompt.empty() || n_needed > o.n_ctx) {
        throw std::runtime_error("--n-ctx: " + std::to_string(prompt.size()) + " prompt ids and " +
                                 std::to_string(o.n_predict) + " more, n_ctx is " +
                                 std::to_string(o.n_ctx) +
                                 "; pass 1 or more ids and raise --n-ctx");
    }
    if (o.bench.empty()) {
        run_capture(o, model.get(), std::move(prompt), n_vocab);
    } else {
        run_bench(o, model.get(), prompt, n_vocab);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 1) {
        std::fputs(kqview::usage, stderr);
        return 2;
    }
    try {
        run(kqview::parse(argc, argv));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "kq-eval-rows: %s\n", error.what());
        return 1;
    }
    return 0;
}
