// The attention of a decoded token alone: kqview's op, llama.cpp's, and a plain read of the same
// keys and values, each as a graph of as many layers as a model has, run in turn by ggml's threads.
//   attend_speed [NAME=NUMBER...] [type=f16|bf16|f32|q8_0|q4_0]
// Prints one JSON object with the milliseconds of every round. bench/alone.py builds and runs it.
#include <ggml-cpu.h>
#include <ggml.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tap/host/attend_op.h"

using namespace kqview;

namespace {

struct shape {
    std::map<std::string, int> numbers{
        {"layers", 24}, {"heads", 16},      {"kv_heads", 4}, {"embd", 64},   {"context", 4096},
        {"queries", 1}, {"streams", 1},     {"threads", 1},  {"rounds", 20}, {"cpu_clock", 0},
        {"stock", 1},   {"small_pages", 0}, {"f16", 0}};
    ggml_type type = GGML_TYPE_F16;

    int operator[](const char* name) const { return numbers.at(name); }
    // As llama.cpp pads it.
    int n_cells() const { return (numbers.at("context") + 255) / 256 * 256; }
    bool read(const std::string& argument) {
        const auto at = argument.find('=');
        if (at == std::string::npos) return false;
        const auto name = argument.substr(0, at), value = argument.substr(at + 1);
        if (name == "type") {
            for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
                type = static_cast<ggml_type>(i);
                const char* const known = ggml_type_name(type);
                if (known && value == known) return true;
            }
            return false;
        }
        const auto found = numbers.find(name);
        if (found == numbers.end()) return false;
        found->second = std::atoi(value.c_str());
        return true;
    }
};

std::size_t zu(int i) { return static_cast<std::size_t>(i); }

double now_ms(bool of_process) {
    timespec time{};
    clock_gettime(of_process ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

// Reads K and V as they lie in memory, each thread its part.
void run_read(ggml_tensor* node, int ith, int nth, void*) {
    typedef std::uint64_t words __attribute__((vector_size(32), aligned(8), may_alias));
    words found[2]{};
    for (const int i : {0, 1}) {
        const auto* const data = static_cast<const std::byte*>(node->src[i]->data);
        const auto n_lines = ggml_nbytes(node->src[i]) / sizeof found;
        const auto end = n_lines * zu(ith + 1) / zu(nth);
        for (auto line = n_lines * zu(ith) / zu(nth); line < end; ++line) {
            const auto* const here = reinterpret_cast<const words*>(data + line * sizeof found);
            found[0] ^= here[0], found[1] ^= here[1];
        }
    }
    found[0] ^= found[1];
    auto* const to = static_cast<float*>(node->data);
    // What nobody uses, the compiler would not read.
    if ((found[0][0] ^ found[0][1] ^ found[0][2] ^ found[0][3]) == 1) to[0] = 1.0f;
}

constexpr std::size_t huge_page = 2u << 20;

struct free_memory {
    void operator()(void* memory) const { std::free(memory); }
};

struct graphs {
    graphs(const shape& of, ggml_threadpool* threads, bool is_huge = true) : s(of), pool(threads) {
        const auto n_layers = zu(s["layers"]);
        const auto n_streams = s["streams"], n_queries = s["queries"];
        const auto row = ggml_row_size(s.type, s["embd"] * s["kv_heads"]);
        const auto layer_bytes = 2 * row * zu(s.n_cells()) * zu(n_streams) +
                                 16 * zu(s["embd"] * s["heads"] * n_queries * n_streams) + 65536;
        const auto mask_bytes = 2 * zu(s.n_cells()) * zu(n_queries * n_streams);
        const auto n_bytes =
            ((n_layers + 1) * layer_bytes + mask_bytes + (64 << 20)) / huge_page * huge_page;
        arena.reset(std::aligned_alloc(huge_page, n_bytes));
#ifdef MADV_HUGEPAGE
        // As a cache's (cpp/llama/cache_pages.cpp).
        (void)::madvise(arena.get(), n_bytes, is_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
        context.reset(ggml_init({n_bytes, arena.get(), false}));
        auto* const g = context.get();
        std::vector<float> noise(1 << 20);
        std::mt19937 source(1);
        std::normal_distribution<float> normal;
        std::generate(noise.begin(), noise.end(), [&] { return normal(source); });
        std::size_t at = 0;
        const auto fill = [&](ggml_tensor* tensor) {
            const auto n = zu(static_cast<int>(tensor->ne[0]));
            for (std::int64_t i = 0; i < ggml_nrows(tensor); ++i) {
                at = (at + 977) % (noise.size() - n);
                ggml_quantize_chunk(tensor->type, noise.data() + at,
                                    static_cast<std::byte*>(tensor->data) +
                                        static_cast<std::size_t>(i) * tensor->nb[1],
                                    0, 1, tensor->ne[0], nullptr);
            }
        };
        auto* const mask =
            ggml_new_tensor_4d(g, GGML_TYPE_F16, s.n_cells(), n_queries, 1, n_streams);
        auto* const bits = static_cast<ggml_fp16_t*>(mask->data);
        for (int i = 0; i < n_queries * n_streams; ++i) {
            const int n_seen = s["context"] - n_queries + 1 + i % n_queries;
            for (int c = 0; c < s.n_cells(); ++c)
                bits[i * s.n_cells() + c] = c < n_seen ? 0 : 0xFC00;  // -inf
        }
        table.scratch.resize(zu(s["threads"]));
        for (std::size_t il = 0; il < n_layers; ++il) {
            const auto cache = [&] {
                auto* const all = ggml_new_tensor_3d(g, s.type, s["embd"] * s["kv_heads"],
                                                     s.n_cells(), n_streams);
                fill(all);
                auto* const view =
                    ggml_view_4d(g, all, s["embd"], s["kv_heads"], s.n_cells(), n_streams,
                                 ggml_row_size(s.type, s["embd"]), all->nb[1], all->nb[2], 0);
                return ggml_permute(g, view, 0, 2, 1, 3);
            };
            auto* const k = cache();
            auto* const v = cache();
            auto* const queries =
                ggml_new_tensor_4d(g, GGML_TYPE_F32, s["embd"], s["heads"], n_queries, n_streams);
            fill(queries);
            auto* const q = ggml_permute(g, queries, 0, 2, 1, 3);
            const float scale = 1.0f / std::sqrt(static_cast<float>(s["embd"]));
            const auto flash = [&] {
                auto* const node = ggml_flash_attn_ext(g, q, k, v, mask, scale, 0.0f, 0.0f);
                ggml_prec_set_acc(node, GGML_PREC_F32);
                return node;
            };
            stock.push_back(flash());
            auto* const own = flash();
            attention_site site;
            site.il = static_cast<int>(il);
            site.flash = own;
            site.q = q, site.k = k, site.mask = mask;
            site.n_head = s["heads"], site.n_head_kv = s["kv_heads"];
            site.n_stream = n_streams, site.n_cells = s.n_cells(), site.scale = scale;
            site.q_strides = {q->nb[1], q->nb[2], q->nb[3]};
            site.k_strides = {k->nb[1], k->nb[2], k->nb[3]};
            site.mask_strides = {mask->nb[1], 0, n_streams == 1 ? 0 : mask->nb[3]};
            source_of.attention.push_back(
                {site.il, s["heads"], s["kv_heads"], scale, false, false});
            if (can_attend(site)) {
                replace_flash(ops.emplace_back(site, table, memory), s["threads"]);
                ours.push_back(own);
            }
            ggml_tensor* sources[] = {k->view_src, v->view_src};
            read.push_back(ggml_custom_4d(g, GGML_TYPE_F32, 1, 1, 1, 1, sources, 2, run_read,
                                          GGML_N_TASKS_MAX, nullptr));
        }
    }

    ggml_cgraph* graph_of(const std::vector<ggml_tensor*>& nodes) {
        auto* const graph = ggml_new_graph_custom(context.get(), 16 * nodes.size() + 64, false);
        for (auto* const node : nodes) ggml_build_forward_expand(graph, node);
        return graph;
    }

    double ms(ggml_cgraph* graph) {
        auto plan = ggml_graph_plan(graph, s["threads"], pool);
        if (work.size() < plan.work_size + 64) work.resize(plan.work_size + 64);
        plan.work_data = work.data();
        const double start = now_ms(s["cpu_clock"] != 0);
        for (auto& op : ops) op.begin();
        ggml_graph_compute(graph, &plan);
        return now_ms(s["cpu_clock"] != 0) - start;
    }

    // Rows of all layers and heads, into blocks of which none is used twice in a row.
    void capture(const char* kind) {
        table.targets.clear();
        if (!kind) return;
        capture_options options;
        options.kind = std::strcmp(kind, "probs") == 0 ? row_kind::probs : row_kind::logits;
        const auto plan = std::make_shared<const capture_plan>(options, source_of);
        i_block = (i_block + 1) % blocks.size();
        for (int i = 0; i < s["streams"]; ++i) {
            const auto layout = plan->layout(s["context"], s["queries"]);
            auto& block = blocks[i_block];
            block.resize(layout.size_bytes * zu(s["streams"]));
            table.targets.push_back({plan, i, 0, i * s["queries"], s["context"] - s["queries"] + 1,
                                     layout, block.data() + layout.size_bytes * zu(i)});
        }
        table.prepare_reductions();
        memory.prepare(table, s["streams"], s["queries"]);
    }

    shape s;
    std::unique_ptr<void, free_memory> arena;  // of the context
    std::unique_ptr<ggml_context, decltype(&ggml_free)> context{nullptr, ggml_free};
    ggml_threadpool* pool;  // the caller's
    std::vector<ggml_tensor*> stock, ours, read;
    std::deque<attend_op> ops;
    row_table table;
    attend_memory memory;
    capture_source source_of;
    std::vector<std::vector<std::byte>> blocks{10};  // as many as an engine that runs ahead
    std::size_t i_block = 0;
    std::vector<std::uint8_t> work;
};

}  // namespace

int main(int n_arguments, char** arguments) {
    shape s;
    for (int i = 1; i < n_arguments; ++i) {
        if (s.read(arguments[i])) continue;
        std::fprintf(stderr, "attend_speed: cannot read %s\n", arguments[i]);
        return 1;
    }
    // One for all graphs: threads of another would poll beside those that are measured.
    auto parameters = ggml_threadpool_params_default(s["threads"]);
    const std::unique_ptr<ggml_threadpool, decltype(&ggml_threadpool_free)> pool{
        ggml_threadpool_new(&parameters), ggml_threadpool_free};
    graphs g(s, pool.get());
    auto *const read = g.graph_of(g.read), *const stock = g.graph_of(g.stock);
    std::map<std::string, std::function<double()>> ways{{"read", [&] { return g.ms(read); }},
                                                        {"stock", [&] { return g.ms(stock); }}};
    if (s["stock"] == 0) ways.erase("stock");
    auto* const ours = g.ours.empty() ? nullptr : g.graph_of(g.ours);
    for (const char* const kind : {"", "logits", "probs"}) {
        if (!ours) break;
        ways[*kind ? std::string("ours, ") + kind : "ours"] = [&g, ours, kind] {
            g.capture(*kind ? kind : nullptr);
            return g.ms(ours);
        };
    }
    // The same in pages of 4 KiB, and over a cache in F16.
    std::deque<graphs> others;
    const auto add = [&](const char* name, const shape& of, bool is_huge) {
        auto& other = others.emplace_back(of, pool.get(), is_huge);
        ways[name] = [&other, graph = other.graph_of(other.ours)] { return other.ms(graph); };
    };
    if (ours && s["small_pages"] != 0) add("ours, small pages", s, false);
    if (ours && s["f16"] != 0) {
        shape f16 = s;
        f16.type = GGML_TYPE_F16;
        add("ours, F16", f16, true);
    }
    std::map<std::string, std::vector<double>> times;
    for (int i = -11; i < s["rounds"]; ++i) {  // first all blocks are touched
        for (auto& [name, way] : ways) {
            if (i < -1 && name.find(',') == std::string::npos) continue;
            const double ms = way();
            if (i >= 0) times[name].push_back(ms);
        }
    }
    std::string text = "{";
    for (const auto& [name, ms] : times) {
        text += (text.size() > 1 ? ", \"" : "\"") + name + "\": [";
        for (std::size_t i = 0; i < ms.size(); ++i) text += (i ? ", " : "") + std::to_string(ms[i]);
        text += "]";
    }
    std::puts((text + "}").c_str());
}
