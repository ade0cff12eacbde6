// attend_op: a node's output and its rows against double precision, for every type of cache, head
// size, group, mask and number of threads; and the vectorised kernel against its scalar twin. Needs
// ggml, like test_row_kernel.cpp, and is built with it.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tap/host/attend_kernel.h"
#include "tap/host/attend_op.h"

using namespace kqview;

namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
constexpr float canary = 12345.0f;

struct shape {
    ggml_type k_type = GGML_TYPE_F16;
    ggml_type v_type = GGML_TYPE_F16;
    int n_embd_k = 64;
    int n_embd_v = 64;
    int n_head = 8;
    int n_head_kv = 2;
    int n_cells = 256;
    int n_tokens = 1;
    int n_streams = 1;
    int n_window = 0;  // cells that a query sees; 0: all before it
    float softcap = 0.0f;
    float max_bias = 0.0f;
    bool has_sinks = false;
    bool has_mask = true;
    ggml_type mask_type = GGML_TYPE_F16;

    std::string text() const {
        return std::string(ggml_type_name(k_type)) + "/" + ggml_type_name(v_type) + " " +
               std::to_string(n_embd_k) + "/" + std::to_string(n_embd_v) + " heads " +
               std::to_string(n_head) + "/" + std::to_string(n_head_kv) + " cells " +
               std::to_string(n_cells) + " tokens " + std::to_string(n_tokens) + " streams " +
               std::to_string(n_streams) + " window " + std::to_string(n_window);
    }
};

// Streams are filled to different lengths; the queries are their last tokens.
int n_filled(const shape& of, int stream) { return of.n_cells - 7 - 13 * stream; }

bool sees(const shape& of, int stream, int token, int cell) {
    if (!of.has_mask) return true;
    const int position = n_filled(of, stream) - of.n_tokens + token;
    return cell <= position && (of.n_window == 0 || cell > position - of.n_window);
}

float bias(const shape& of, int stream, int token, int cell) {
    if (of.max_bias == 0.0f || !of.has_mask) return 0.0f;
    return static_cast<float>(cell - (n_filled(of, stream) - of.n_tokens + token));
}

struct case_of {
    explicit case_of(const shape& of) : s(of) {
        const ggml_init_params parameters{std::size_t{64} << 20, nullptr, false};
        context.reset(ggml_init(parameters));
        auto* const g = context.get();
        std::mt19937 source(7);
        std::normal_distribution<float> normal;
        const auto fill = [&](ggml_tensor* tensor) {
            std::vector<float> row(static_cast<std::size_t>(tensor->ne[0]));
            for (std::int64_t i = 0; i < ggml_nrows(tensor); ++i) {
                std::generate(row.begin(), row.end(), [&] { return normal(source); });
                auto* const to = static_cast<std::byte*>(tensor->data) +
                                 static_cast<std::size_t>(i) * tensor->nb[1];
                ggml_quantize_chunk(tensor->type, row.data(), to, 0, 1, tensor->ne[0], nullptr);
            }
        };
        const auto cache = [&](ggml_type type, int n_embd) {
            auto* const all =
                ggml_new_tensor_3d(g, type, n_embd * s.n_head_kv, s.n_cells, s.n_streams);
            fill(all);
            auto* const view = ggml_view_4d(g, all, n_embd, s.n_head_kv, s.n_cells, s.n_streams,
                                            ggml_row_size(type, n_embd), all->nb[1], all->nb[2], 0);
            return ggml_permute(g, view, 0, 2, 1, 3);
        };
        k = cache(s.k_type, s.n_embd_k);
        v = cache(s.v_type, s.n_embd_v);
        auto* const queries =
            ggml_new_tensor_4d(g, GGML_TYPE_F32, s.n_embd_k, s.n_head, s.n_tokens, s.n_streams);
        fill(queries);
        q = ggml_permute(g, queries, 0, 2, 1, 3);
        if (s.has_mask) {
            mask = ggml_new_tensor_4d(g, s.mask_type, s.n_cells, s.n_tokens, 1, s.n_streams);
            for (int stream = 0; stream < s.n_streams; ++stream)
                for (int token = 0; token < s.n_tokens; ++token)
                    for (int c = 0; c < s.n_cells; ++c) set_mask(stream, token, c);
        }
        // As llama.cpp does with an F32 cache.
        const auto cast = [&](ggml_tensor* cells) {
            return cells->type == GGML_TYPE_F32 ? ggml_cast(g, cells, GGML_TYPE_F16) : cells;
        };
        auto* const f16_mask = mask && mask->type == GGML_TYPE_F16 ? mask : nullptr;
        const float scale = 1.0f / std::sqrt(static_cast<float>(s.n_embd_k));
        node = ggml_flash_attn_ext(g, q, cast(k), cast(v), f16_mask, scale, s.max_bias, s.softcap);
        node->src[3] = mask;
        if (s.has_sinks) {
            sinks = ggml_new_tensor_1d(g, GGML_TYPE_F32, s.n_head);
            fill(sinks);
            node->src[4] = sinks;
        }
        site.il = 3;
        site.flash = node;
        site.q = q;
        site.k = k;
        site.mask = mask;
        site.sinks = sinks;
        site.n_head = s.n_head;
        site.n_head_kv = s.n_head_kv;
        site.n_stream = s.n_streams;
        site.n_cells = s.n_cells;
        site.scale = scale;
        site.max_bias = s.max_bias;
        site.softcap = s.softcap;
        site.q_strides = {q->nb[1], q->nb[2], q->nb[3]};
        site.k_strides = {k->nb[1], k->nb[2], k->nb[3]};
        if (mask) site.mask_strides = {mask->nb[1], 0, s.n_streams == 1 ? 0 : mask->nb[3]};
    }

    void set_mask(int stream, int token, int c) {
        const float value = sees(s, stream, token, c) ? bias(s, stream, token, c) : minus_infinity;
        auto* const at = static_cast<std::byte*>(mask->data) +
                         static_cast<std::size_t>(stream) * mask->nb[3] +
                         static_cast<std::size_t>(token) * mask->nb[1] +
                         static_cast<std::size_t>(c) * mask->nb[0];
        if (mask->type == GGML_TYPE_F32) {
            std::memcpy(at, &value, sizeof value);
        } else {
            const auto half = ggml_fp32_to_fp16(value);
            std::memcpy(at, &half, sizeof half);
        }
    }

    static std::vector<float> cell(const ggml_tensor* cells, int c, int head, int stream) {
        std::vector<float> values(static_cast<std::size_t>(cells->ne[0]));
        const auto* const from = static_cast<const std::byte*>(cells->data) +
                                 static_cast<std::size_t>(c) * cells->nb[1] +
                                 static_cast<std::size_t>(head) * cells->nb[2] +
                                 static_cast<std::size_t>(stream) * cells->nb[3];
        if (cells->type == GGML_TYPE_F32) {
            std::memcpy(values.data(), from, values.size() * sizeof(float));
        } else {
            ggml_get_type_traits(cells->type)->to_float(from, values.data(), cells->ne[0]);
        }
        return values;
    }

    struct expected {
        std::vector<double> logits, scores, probs, output;
    };
    expected attention(int stream, int token, int head) const {
        const int head_kv = head / (s.n_head / s.n_head_kv);
        const auto* const query = reinterpret_cast<const float*>(
            static_cast<const std::byte*>(q->data) + static_cast<std::size_t>(token) * q->nb[1] +
            static_cast<std::size_t>(head) * q->nb[2] +
            static_cast<std::size_t>(stream) * q->nb[3]);
        const double slope = alibi_slope(s.max_bias, s.n_head, head);
        expected all;
        double largest = sinks ? static_cast<const float*>(sinks->data)[head] : -1e300;
        for (int c = 0; c < s.n_cells; ++c) {
            const auto key = cell(k, c, head_kv, stream);
            double logit = 0;
            for (std::size_t i = 0; i < key.size(); ++i)
                logit += static_cast<double>(key[i]) * query[i];
            double score = logit * site.scale;
            if (s.softcap != 0.0f) score = s.softcap * std::tanh(score / s.softcap);
            score += slope * bias(s, stream, token, c);
            const bool is_seen = sees(s, stream, token, c);
            all.logits.push_back(is_seen ? logit : minus_infinity);
            all.scores.push_back(is_seen ? score : minus_infinity);
            largest = std::max(largest, all.scores.back());
        }
        double sum = sinks ? std::exp(static_cast<const float*>(sinks->data)[head] - largest) : 0;
        for (const double score : all.scores) sum += std::exp(score - largest);
        for (const double score : all.scores) all.probs.push_back(std::exp(score - largest) / sum);
        all.output.assign(static_cast<std::size_t>(s.n_embd_v), 0.0);
        for (int c = 0; c < s.n_cells; ++c) {
            const double weight = all.probs[static_cast<std::size_t>(c)];
            if (weight == 0) continue;
            const auto value = cell(v, c, head_kv, stream);
            for (std::size_t i = 0; i < value.size(); ++i) all.output[i] += weight * value[i];
        }
        return all;
    }

    shape s;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> context{nullptr, ggml_free};
    ggml_tensor *q = nullptr, *k = nullptr, *v = nullptr;
    ggml_tensor *mask = nullptr, *sinks = nullptr, *node = nullptr;
    attention_site site;
};

// Runs a node as ggml's compute threads do.
void compute(attend_op& op, int n_threads) {
    struct {
        ggml_custom_op_t run;
        int n_tasks;
        void* data;
    } parameters;
    ggml_tensor* const node = op.site.flash;
    REQUIRE(node->op == GGML_OP_CUSTOM);
    std::memcpy(&parameters, node->op_params, sizeof parameters);
    op.begin();
    std::vector<std::jthread> threads;
    std::atomic<int> n_missing{n_threads};  // all start at once; libstdc++'s barrier hangs in wine
    const auto start = [&] {
        --n_missing;
        while (n_missing > 0) std::this_thread::yield();
    };
    for (int i = 1; i < n_threads; ++i) {
        threads.emplace_back([&, i] {
            start();
            parameters.run(node, i, n_threads, parameters.data);
        });
    }
    start();
    parameters.run(node, 0, n_threads, parameters.data);
}

double error_of(const float* got, const std::vector<double>& expected, std::size_t n) {
    double worst = 0, largest = 1e-30;
    for (std::size_t i = 0; i < n; ++i) {
        if (std::isinf(expected[i])) {
            if (got[i] != expected[i]) return 1e30;
            continue;
        }
        if (std::isnan(got[i])) return 1e30;
        largest = std::max(largest, std::abs(expected[i]));
        worst = std::max(worst, std::abs(got[i] - expected[i]));
    }
    return worst / largest;
}

capture_source source_of(const shape& s, const attention_site& site) {
    capture_source source;
    source.attention.push_back({site.il, s.n_head, s.n_head_kv, site.scale, false, false});
    return source;
}

std::vector<double> sums_over(const std::vector<column_range>& spans,
                              const std::vector<double>& row) {
    std::vector<double> sums;
    for (const auto& [start, stop] : spans) {
        sums.push_back(0.0);
        for (int c = start; c < std::min(stop, static_cast<int>(row.size())); ++c)
            sums.back() += row[static_cast<std::size_t>(c)];
    }
    return sums;
}

// Every output and every wanted row of one shape; rows have a canary behind them.
double worst_error(const shape& s, row_kind kind, int n_threads,
                   std::optional<std::vector<int>> heads = {},
                   const std::vector<column_range>& spans = {}) {
    case_of one(s);
    row_table table;
    attend_memory memory;
    table.scratch.resize(static_cast<std::size_t>(n_threads));
    attend_op op(one.site, table, memory);
    REQUIRE(can_attend(one.site));
    replace_flash(op, n_threads);

    capture_options options;
    options.kind = kind;
    options.heads = heads;
    options.spans = spans;
    const auto plan = std::make_shared<const capture_plan>(options, source_of(s, one.site));
    std::vector<std::vector<float>> rows;
    for (int stream = 0; stream < s.n_streams; ++stream) {
        const int n_columns = n_filled(s, stream);
        row_layout layout = plan->layout(n_columns, s.n_tokens);
        rows.emplace_back(layout.size_bytes / sizeof(float) + 1, canary);
        table.targets.push_back({plan, stream, 0, stream, n_columns - s.n_tokens + 1, layout,
                                 reinterpret_cast<std::byte*>(rows.back().data())});
    }
    table.prepare_reductions();
    memory.prepare(table, s.n_streams, s.n_tokens);
    compute(op, n_threads);

    double worst = 0;
    int n_rows = 0;
    const auto wanted = plan->find(one.site.il)->heads;
    for (int stream = 0; stream < s.n_streams; ++stream) {
        const auto n_columns = static_cast<std::size_t>(n_filled(s, stream));
        const auto& row = rows[static_cast<std::size_t>(stream)];
        REQUIRE(row.back() == canary);
        for (int token = 0; token < s.n_tokens; ++token) {
            for (int head = 0; head < s.n_head; ++head) {
                const auto expected = one.attention(stream, token, head);
                const auto* const out = reinterpret_cast<const float*>(
                    static_cast<const std::byte*>(one.node->data) +
                    static_cast<std::size_t>(head) * one.node->nb[1] +
                    static_cast<std::size_t>(token) * one.node->nb[2] +
                    static_cast<std::size_t>(stream) * one.node->nb[3]);
                worst = std::max(worst, error_of(out, expected.output, expected.output.size()));
                const auto found = std::find(wanted.begin(), wanted.end(), head);
                if (found == wanted.end()) continue;
                const auto i = static_cast<std::size_t>(found - wanted.begin());
                auto values = kind == row_kind::logits   ? expected.logits
                              : kind == row_kind::scores ? expected.scores
                                                         : expected.probs;
                values.resize(n_columns);
                if (!spans.empty()) values = sums_over(spans, values);
                const auto at =
                    (i * static_cast<std::size_t>(s.n_tokens) + static_cast<std::size_t>(token)) *
                    values.size();
                worst = std::max(worst, error_of(row.data() + at, values, values.size()));
                ++n_rows;
            }
        }
    }
    REQUIRE(table.n_rows_written.load() == n_rows);
    return worst;
}

}  // namespace

TEST_CASE("attend: outputs and rows equal double precision for every type and head size") {
    for (const auto type :
         {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
          GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL}) {
        for (const int n_embd : {32, 64, 80, 96, 112, 128, 192, 256}) {
            if (n_embd % ggml_blck_size(type) != 0) continue;
            for (const int n_tokens : {1, 7, most_shared_queries + 1}) {
                if (n_tokens > most_attended_queries()) continue;
                shape s;
                s.k_type = s.v_type = type;
                s.n_embd_k = s.n_embd_v = n_embd;
                s.n_tokens = n_tokens;
                if (n_tokens > 1) s.n_head = 4, s.n_cells = 128;
                INFO(s.text());
                REQUIRE(worst_error(s, row_kind::probs, 2) < 1e-5);
            }
        }
    }
}

TEST_CASE("attend: every group of heads, kind of row and number of threads") {
    for (const auto& [n_head, n_head_kv] : {std::pair{1, 1},
                                            {2, 2},
                                            {4, 2},
                                            {6, 2},
                                            {4, 1},
                                            {5, 1},
                                            {7, 1},
                                            {14, 2},
                                            {16, 1},
                                            {24, 8},
                                            {71, 1}}) {
        for (const auto kind : {row_kind::logits, row_kind::scores, row_kind::probs}) {
            for (const int n_threads : {1, 2, 5}) {
                shape s;
                s.n_head = n_head;
                s.n_head_kv = n_head_kv;
                s.n_cells = 320;
                INFO(s.text(), " threads ", n_threads);
                REQUIRE(worst_error(s, kind, n_threads) < 1e-5);
            }
        }
    }
}

TEST_CASE("attend: several tokens, streams of different lengths, windows") {
    for (const int n_tokens : {1, 2, 5, 17, most_shared_queries, most_shared_queries + 1, 150}) {
        if (n_tokens > most_attended_queries()) continue;
        for (const int n_streams : {1, 3}) {
            for (const int n_window : {0, 20, 100}) {
                for (const int n_threads : {1, 3}) {
                    shape s;
                    s.n_tokens = n_tokens;
                    s.n_streams = n_streams;
                    s.n_window = n_window;
                    s.n_cells = 384;
                    if (n_tokens > most_shared_queries) s.n_head = 4, s.n_head_kv = 2;
                    INFO(s.text(), " threads ", n_threads);
                    REQUIRE(worst_error(s, row_kind::probs, n_threads) < 1e-5);
                }
            }
        }
    }
}

TEST_CASE("attend: more threads than KV heads share the queries of a prompt") {
    for (const int n_head_kv : {1, 4}) {
        for (const auto kind : {row_kind::logits, row_kind::probs}) {
            shape s;
            s.n_head = 4;
            s.n_head_kv = n_head_kv;
            s.n_tokens = most_shared_queries;
            s.n_cells = 128;
            INFO(s.text());
            REQUIRE(worst_error(s, kind, 6) < 1e-5);
        }
    }
}

TEST_CASE("attend: sums over spans that overlap, touch, begin within a tile or behind the row") {
    const std::vector<column_range> spans{{0, 1},      {3, 70},
                                          {60, 64},    {64, 65},
                                          {10, 300},   {50, column_range::no_stop},
                                          {130, 131},  {200, column_range::no_stop},
                                          {1000, 1001}};
    for (const int n_tokens : {1, 5, most_shared_queries + 1}) {
        if (n_tokens > most_attended_queries()) continue;
        for (const int n_threads : {1, 3}) {
            shape s;
            s.n_cells = 256;
            s.n_tokens = n_tokens;
            s.n_streams = n_tokens == 5 ? 3 : 1;
            s.n_window = n_tokens == 5 ? 90 : 0;
            REQUIRE(worst_error(s, row_kind::probs, n_threads, {}, spans) < 1e-4);
            REQUIRE(worst_error(s, row_kind::probs, n_threads, std::vector{3, 0}, spans) < 1e-4);
            REQUIRE(worst_error(s, row_kind::probs, n_threads, {}, {{5000, 6000}}) < 1e-4);
        }
    }
}

TEST_CASE("attend: softcap, ALiBi, sinks, no mask, an F32 mask, values of another size or type") {
    for (const int feature : {0, 1, 2, 3, 4, 5, 6, 7}) {
        shape s;
        if (feature == 0) s.softcap = 5.0f;
        if (feature == 1) s.max_bias = 8.0f;
        if (feature == 2) s.has_sinks = true;
        if (feature == 3) s.has_mask = false;
        if (feature == 4) s.mask_type = GGML_TYPE_F32;
        if (feature == 5) s.n_embd_k = 192, s.n_embd_v = 128;
        if (feature == 6) s.v_type = GGML_TYPE_Q8_0;
        if (feature == 7) s.n_embd_k = 10, s.n_embd_v = 6;
        for (const int n_tokens : {1, 9, most_shared_queries + 10}) {
            if (n_tokens > most_attended_queries()) continue;
            if (n_tokens > 1 && !s.has_mask) continue;  // all of them would see all cells
            s.n_tokens = n_tokens;
            for (const auto kind : {row_kind::logits, row_kind::scores, row_kind::probs}) {
                INFO("feature ", feature, " ", s.text());
                REQUIRE(worst_error(s, kind, 2) < 1e-5);
            }
        }
    }
}

TEST_CASE("attend: chosen heads in any order") {
    REQUIRE(worst_error({}, row_kind::probs, 2, std::vector<int>{5, 0, 7}) < 1e-5);
}

TEST_CASE("attend: the last row of a prompt is that of the first token as well") {
    shape s;
    s.n_tokens = 5;
    case_of one(s);
    row_table table;
    attend_memory memory;
    table.scratch.resize(2);
    attend_op op(one.site, table, memory);
    replace_flash(op, 2);
    const auto source = source_of(s, one.site);
    for (const auto type : {row_type::f32, row_type::f16}) {
        for (const auto kind : {row_kind::logits, row_kind::probs}) {
            capture_options options;
            options.kind = kind;
            options.type = type;
            const auto plan = std::make_shared<const capture_plan>(options, source);
            const int n_columns = n_filled(s, 0);
            const auto prompt = plan->layout(n_columns, s.n_tokens), last = plan->layout(n_columns);
            std::vector<std::byte> prompt_rows(prompt.size_bytes), last_rows(last.size_bytes);
            table.targets = {
                {plan, 0, 0, 0, n_columns - s.n_tokens + 1, prompt, prompt_rows.data()},
                {plan, 0, s.n_tokens - 1, s.n_tokens - 1, n_columns, last, last_rows.data()}};
            table.n_rows_written = 0;
            table.prepare_reductions();
            memory.prepare(table, s.n_streams, s.n_tokens);
            compute(op, 2);
            REQUIRE(table.n_rows_written.load() == s.n_head * (s.n_tokens + 1));
            const auto row_bytes = last.size_bytes / static_cast<std::size_t>(s.n_head);
            for (std::size_t h = 0; h < static_cast<std::size_t>(s.n_head); ++h) {
                const auto* const in_prompt = prompt_rows.data() + (h * 5 + 4) * row_bytes;
                REQUIRE(std::memcmp(in_prompt, last_rows.data() + h * row_bytes, row_bytes) == 0);
            }
        }
    }
}

TEST_CASE("attend: a cast of an F32 cache is left out") {
    shape s;
    s.k_type = s.v_type = GGML_TYPE_F32;
    case_of one(s);
    row_table table;
    attend_memory memory;
    attend_op op(one.site, table, memory);
    auto *const k_cast = one.node->src[1], *const v_cast = one.node->src[2];
    REQUIRE(k_cast->op == GGML_OP_CPY);
    replace_flash(op, 2);
    REQUIRE(one.node->src[1] == one.k);
    REQUIRE(one.node->src[2] == one.v);
    REQUIRE(k_cast->op == GGML_OP_NONE);
    REQUIRE(v_cast->op == GGML_OP_NONE);
}

TEST_CASE("attend: what stays with llama.cpp") {
    if (const int n_most = most_attended_queries(); n_most < std::numeric_limits<int>::max()) {
        shape s;
        s.n_tokens = n_most + 1;
        REQUIRE(!can_attend(case_of(s).site));
    }
    case_of one(shape{});
    one.site.n_extra_cells = 1;
    REQUIRE(!can_attend(one.site));
    one.site.n_extra_cells = 0;
    one.site.gathered = one.q;
    REQUIRE(!can_attend(one.site));
}

TEST_CASE("attend: the vectorised kernel and its scalar twin agree") {
    shape s;
    s.n_cells = attend_tile;
    case_of one(s);
    const tile_mask mask = read_tile_mask(one.mask->data, one.mask->type, s.n_cells);
    row_scratch scratch;
    const auto run = [&](auto&& kernel) {
        std::vector<attended_head> heads(4);
        std::vector<float> values(4 * 64, 0.0f), rows(4 * attend_tile), row_max(4);
        for (std::size_t h = 0; h < 4; ++h) {
            heads[h].q = static_cast<const float*>(one.q->data) + h * 64;
            heads[h].mask = &mask;
            heads[h].values = values.data() + h * 64;
            heads[h].row = rows.data() + h * attend_tile;
            heads[h].row_max = row_max.data() + h;
            heads[h].n_row = attend_tile;
            heads[h].kind = row_kind::probs;
        }
        const key_rows keys{static_cast<const std::byte*>(one.k->data), one.k->nb[1], one.k->type,
                            64, s.n_cells};
        const key_rows cells{static_cast<const std::byte*>(one.v->data), one.v->nb[1], one.v->type,
                             64, s.n_cells};
        kernel(cell_tile{keys, cells, s.n_cells}, heads.data());
        for (const auto& head : heads) values.push_back(head.max), values.push_back(head.sum);
        values.insert(values.end(), rows.begin(), rows.end());
        return values;
    };
    const auto fast = run([&](const cell_tile& tile, attended_head* heads) {
        attend(tile, 0.125f, 0.0f, heads, 4, scratch);
    });
    const auto plain = run([&](const cell_tile& tile, attended_head* heads) {
        attend_scalar(tile, 0.125f, 0.0f, heads, 4);
    });
    REQUIRE(error_of(fast.data(), {plain.begin(), plain.end()}, plain.size()) < 1e-5);
}
