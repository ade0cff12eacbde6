// row_kernel: products against double precision and the scalar twin, softmax, mask, ALiBi, softcap.
// Needs ggml's conversions and so llama.cpp's source: built only with KQVIEW_LLAMA_CPP_DIR, once
// for each vector width. Buffers end where their contract ends, for the sanitizer to see.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tap/host/row_kernel.h"
#include "tap/host/row_sink.h"

using namespace kqview;

namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
constexpr float canary = 12345.0f;
constexpr int n_columns_max = 300;
// Of a probability, relative. The distance to the largest score is rounded to a float, which alone
// makes 2e-6 where it is 32 to 64.
constexpr double softmax_tolerance = 4e-6;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool is_sanitized = true;
#else
constexpr bool is_sanitized = false;
#endif

#if defined(__F16C__) || defined(__ARM_NEON)
constexpr bool converts_f16 = true;
#else
constexpr bool converts_f16 = false;
#endif

std::vector<float> random_values(std::size_t n, unsigned seed) {
    std::mt19937 source(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    std::generate(values.begin(), values.end(), [&] { return normal(source); });
    return values;
}

// Keys of one KV head in a cache of several, and what the type made of their values.
struct key_cache {
    key_cache(ggml_type type, int n_embd, int n_cells, int n_head_kv)
        : values(random_values(static_cast<std::size_t>(n_embd) * static_cast<std::size_t>(n_cells),
                               1)) {
        const auto cell_bytes = ggml_row_size(type, n_embd);
        const auto stride = cell_bytes * static_cast<std::size_t>(n_head_kv);
        bytes.resize(stride * static_cast<std::size_t>(n_cells - 1) + cell_bytes);
        for (std::size_t c = 0; c < static_cast<std::size_t>(n_cells); ++c) {
            float* const cell = values.data() + c * static_cast<std::size_t>(n_embd);
            ggml_quantize_chunk(type, cell, bytes.data() + c * stride, 0, 1, n_embd, nullptr);
            if (const auto to_float = ggml_get_type_traits(type)->to_float) {
                to_float(bytes.data() + c * stride, cell, n_embd);
            }
        }
        bytes.shrink_to_fit();
        keys = {bytes.data(), stride, type, n_embd, n_cells};
    }

    std::vector<float> values;  // as float, (n_cells, n_embd)
    std::vector<std::byte> bytes;
    key_rows keys;
};

struct queries {
    explicit queries(int n_embd)
        : values(random_values(static_cast<std::size_t>(n_embd) * max_heads_at_once, 2)) {
        for (int h = 0; h < max_heads_at_once; ++h) rows[h] = values.data() + h * n_embd;
    }
    std::vector<float> values;
    const float* rows[max_heads_at_once];
};

// Rows of exactly n_columns floats with a canary behind them.
struct row_outputs {
    explicit row_outputs(int n_columns) {
        for (int h = 0; h < max_heads_at_once; ++h) {
            values[h].assign(static_cast<std::size_t>(n_columns) + 1, canary);
            rows[h] = values[h].data();
        }
    }
    std::vector<float> values[max_heads_at_once];
    float* rows[max_heads_at_once];
};

struct product {
    double sum;
    double magnitude;  // sum of absolute terms, the scale of rounding errors
};

std::vector<product> products(const key_cache& cache, const float* q) {
    const auto n_embd = static_cast<std::size_t>(cache.keys.n_embd);
    std::vector<product> all;
    for (std::size_t c = 0; c < static_cast<std::size_t>(cache.keys.n_cells); ++c) {
        product one{0, 0};
        for (std::size_t i = 0; i < n_embd; ++i) {
            const double term = static_cast<double>(q[i]) * cache.values[c * n_embd + i];
            one.sum += term;
            one.magnitude += std::abs(term);
        }
        all.push_back(one);
    }
    return all;
}

// Values that are further from double precision than float sums may be, canaries that were written.
int n_wrong(const row_outputs& out, const std::vector<std::vector<product>>& expected, int n_heads,
            int n_columns) {
    int n = 0;
    for (int h = 0; h < max_heads_at_once; ++h) {
        for (int c = 0; c < n_columns; ++c) {
            const auto& [sum, magnitude] =
                expected[static_cast<std::size_t>(h)][static_cast<std::size_t>(c)];
            const float got = out.rows[h][c];
            n += h < n_heads ? !(std::abs(got - sum) <= 1e-5 * magnitude) : got != canary;
        }
        n += out.rows[h][n_columns] != canary;
    }
    return n;
}

std::vector<int> column_counts(int n_cells) {
    std::vector<int> counts;
    for (int n = 1; n <= 36; ++n) counts.push_back(n);
    for (const int n : {47, 63, 64, 65, 99, 127, 128, 129, 200, 255, 256, 257, 299, 300})
        counts.push_back(n);
    std::erase_if(counts, [&](int n) { return n > n_cells; });
    return counts;
}

std::vector<double> softmax(const std::vector<float>& scores, const float* sink) {
    double largest = sink ? *sink : minus_infinity;
    for (const float score : scores) largest = std::max(largest, static_cast<double>(score));
    double sum = sink ? std::exp(*sink - largest) : 0;
    std::vector<double> probs;
    for (const float score : scores) {
        probs.push_back(std::exp(score - largest));
        sum += probs.back();
    }
    for (double& prob : probs) prob /= sum;
    return probs;
}

double largest_error(const std::vector<float>& got, const std::vector<double>& expected) {
    double worst = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        const double error = std::abs(got[i] - expected[i]) / std::max(expected[i], 1e-30);
        worst =
            std::isnan(got[i]) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
    }
    return worst;
}

// A mask in both of its types.
struct masks {
    explicit masks(std::vector<float> values) : f32(std::move(values)), f16(f32.size()) {
        ggml_fp32_to_fp16_row(f32.data(), f16.data(), static_cast<std::int64_t>(f32.size()));
    }
    int n() const { return static_cast<int>(f32.size()); }
    mask_row of(ggml_type type) const {
        return type == GGML_TYPE_F16 ? read_mask(f16.data(), type, n())
                                     : read_mask(f32.data(), type, n());
    }
    std::vector<float> f32;
    std::vector<ggml_fp16_t> f16;
};

constexpr ggml_type mask_types[]{GGML_TYPE_F16, GGML_TYPE_F32};

}  // namespace

TEST_CASE("row_kernel: products equal double precision for every type, shape and column count") {
    for (const auto type :
         {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
        for (const int n_embd : {2, 10, 32, 34, 48, 64, 80, 96, 128}) {
            if (n_embd % ggml_blck_size(type) != 0) continue;
            for (const int n_cells : {17, n_columns_max, 512}) {
                const key_cache cache(type, n_embd, n_cells, 1 + n_embd % 3);
                const queries q(n_embd);
                std::vector<std::vector<product>> expected;
                for (const float* row : q.rows) expected.push_back(products(cache, row));
                row_scratch scratch;
                for (int n_heads = 1; n_heads <= max_heads_at_once; ++n_heads) {
                    for (const int n_columns : column_counts(n_cells)) {
                        row_outputs out(n_columns);
                        dot_rows(cache.keys, q.rows, n_heads, n_columns, out.rows, scratch);
                        const int wrong = n_wrong(out, expected, n_heads, n_columns);
                        INFO(ggml_type_name(type), " n_embd ", n_embd, " n_cells ", n_cells,
                             " n_heads ", n_heads, " n_columns ", n_columns);
                        REQUIRE(wrong == 0);
                    }
                    row_outputs out(n_cells);
                    dot_rows_scalar(cache.keys, q.rows, n_heads, n_cells, out.rows);
                    REQUIRE(n_wrong(out, expected, n_heads, n_cells) == 0);
                }
            }
        }
    }
}

TEST_CASE("row_kernel: a product does not depend on how many columns and heads are asked for") {
    const key_cache cache(GGML_TYPE_F16, 80, n_columns_max, 2);
    const queries q(80);
    row_scratch scratch;
    row_outputs all(256);
    dot_rows(cache.keys, q.rows, 4, 256, all.rows, scratch);
    row_outputs some(100);
    dot_rows(cache.keys, q.rows, 4, 96, some.rows, scratch);
    for (int h = 0; h < 4; ++h) CHECK(std::equal(some.rows[h], some.rows[h] + 96, all.rows[h]));
}

TEST_CASE("row_kernel: probabilities equal a softmax in double precision") {
    for (int n = 1; n <= 70; ++n) {
        CAPTURE(n);
        auto scores = random_values(static_cast<std::size_t>(n), static_cast<unsigned>(n));
        for (float& score : scores) score *= 8;
        const float sink = scores[0] + 1;
        for (const float* const extra : {static_cast<const float*>(nullptr), &sink}) {
            auto row = scores;
            scores_to_probs(row.data(), n, extra);
            CHECK(largest_error(row, softmax(scores, extra)) < softmax_tolerance);
        }
    }
}

TEST_CASE("row_kernel: hidden columns have probability 0 and take nothing from the others") {
    auto scores = random_values(131, 5);
    for (std::size_t i = 0; i < scores.size(); i += 3) scores[i] = minus_infinity;
    auto row = scores;
    scores_to_probs(row.data(), 131, nullptr);
    CHECK(largest_error(row, softmax(scores, nullptr)) < softmax_tolerance);
    for (std::size_t i = 0; i < scores.size(); i += 3) CHECK(row[i] == 0.0f);
}

TEST_CASE("row_kernel: a row that sees nothing is zero, not NaN") {
    for (const int n : {1, 16, 33}) {
        std::vector<float> row(static_cast<std::size_t>(n), minus_infinity);
        scores_to_probs(row.data(), n, nullptr);
        CHECK(std::all_of(row.begin(), row.end(), [](float x) { return x == 0.0f; }));
    }
}

TEST_CASE("row_kernel: scores far apart neither overflow nor turn into NaN") {
    std::vector<float> scores(40, -3e38f);
    scores[7] = 3e38f;
    scores[8] = 3e38f - 1e37f;
    scores_to_probs(scores.data(), 40, nullptr);
    CHECK(scores[7] == doctest::Approx(1.0));
    for (std::size_t i = 0; i < scores.size(); ++i) {
        if (i != 7) CHECK(std::abs(scores[i]) < 1e-30f);
    }
}

TEST_CASE("row_kernel: read_mask tells hidden columns from a bias") {
    struct expectation {
        std::vector<float> values;
        bool hides;
        bool biases;
    };
    const std::vector<expectation> all{{{0, 0, 0}, false, false},
                                       {{0, -0.0f, 0}, false, false},
                                       {{0, minus_infinity, 0}, true, false},
                                       {{0, -1, -2}, false, true},
                                       {{minus_infinity, -1, 0}, true, true}};
    for (const auto& [values, hides, biases] : all) {
        const masks both(values);
        for (const auto type : mask_types) {
            CHECK(both.of(type).hides_columns == hides);
            CHECK(both.of(type).has_bias == biases);
        }
    }
    CHECK_FALSE(read_mask(nullptr, GGML_TYPE_F16, 3).hides_columns);
}

TEST_CASE("row_kernel: read_mask looks at the columns asked for and no further") {
    const std::vector<float> values{0, 0, minus_infinity, -1};
    const auto mask = read_mask(values.data(), GGML_TYPE_F32, 2);
    CHECK_FALSE(mask.hides_columns);
    CHECK_FALSE(mask.has_bias);
}

TEST_CASE("row_kernel: scores are scaled, capped, biased and masked in that order") {
    const int n = 50;
    const auto logits = random_values(50, 9);
    std::vector<float> bias(50);
    for (std::size_t c = 0; c < bias.size(); ++c) {
        bias[c] = c % 7 == 3 ? minus_infinity : -static_cast<float>(c);
    }
    std::vector<float> hidden = bias;
    for (float& value : hidden) value = value == minus_infinity ? value : 0.0f;
    const masks with_bias(bias);
    const masks plain(hidden);
    for (const auto type : mask_types) {
        for (const float softcap : {0.0f, 2.5f}) {
            for (const masks* const mask : {&with_bias, &plain}) {
                const score_params params{0.3f, softcap, mask == &with_bias ? 0.25f : 1.0f};
                auto row = logits;
                logits_to_scores(row.data(), n, params, mask->of(type));
                for (std::size_t c = 0; c < row.size(); ++c) {
                    CAPTURE(c);
                    double expected = logits[c] * 0.3;
                    if (softcap != 0) expected = softcap * std::tanh(expected / softcap);
                    if (mask->f32[c] == minus_infinity) {
                        CHECK(row[c] == minus_infinity);
                    } else {
                        CHECK(
                            row[c] ==
                            doctest::Approx(expected + params.slope * mask->f32[c]).epsilon(1e-5));
                    }
                }
            }
        }
    }
}

TEST_CASE("row_kernel: hide_masked changes hidden columns alone") {
    const masks both({0, minus_infinity, -1, minus_infinity, 0});
    for (const auto type : mask_types) {
        std::vector<float> row{1, 2, 3, 4, 5};
        hide_masked(row.data(), 5, both.of(type));
        CHECK(row == std::vector<float>{1, minus_infinity, 3, minus_infinity, 5});
    }
}

TEST_CASE("row_kernel: ALiBi slopes are those of the paper") {
    for (int head = 0; head < 8; ++head) {
        CHECK(alibi_slope(8, 8, head) == doctest::Approx(std::exp2(-(head + 1))));
        CHECK(alibi_slope(0, 8, head) == 1.0f);
    }
    // 12 heads: those of 8, then every other one of 16.
    for (int head = 8; head < 12; ++head) {
        CHECK(alibi_slope(8, 12, head) == doctest::Approx(std::exp2(-0.5 * (2 * (head - 8) + 1))));
    }
}

// Without instructions that convert half precision the conversion is the same calls in both.
TEST_CASE("row_kernel: the vector code is faster than its scalar twin" *
          doctest::skip(is_sanitized || !converts_f16)) {
    constexpr int n_cells = 1024;
    const key_cache cache(GGML_TYPE_F16, 64, n_cells, 1);
    const queries q(64);
    row_outputs out(n_cells);
    row_scratch scratch;
    const auto best_ns = [&](const auto& call) {
        double best = std::numeric_limits<double>::infinity();
        for (int i = 0; i < 200; ++i) {
            const auto started = std::chrono::steady_clock::now();
            call();
            const std::chrono::duration<double, std::nano> took =
                std::chrono::steady_clock::now() - started;
            best = std::min(best, took.count());
        }
        return best / (n_cells * max_heads_at_once);
    };
    const double vector_ns =
        best_ns([&] { dot_rows(cache.keys, q.rows, 4, n_cells, out.rows, scratch); });
    const double scalar_ns =
        best_ns([&] { dot_rows_scalar(cache.keys, q.rows, 4, n_cells, out.rows); });
    std::printf(
        "row_kernel: 4 heads x 64 x f16 over 1024 cells: %.2f ns a product, scalar %.2f ns\n",
        vector_ns, scalar_ns);
    CHECK(vector_ns < scalar_ns);
}

TEST_CASE(
    "row_sink: the k largest values, the earlier column first among equals, and NaN is safe") {
    std::mt19937 source(3);
    for (const int n_columns : {1, 7, 31, 32, 33, 700, 5000}) {
        for (const int k : {1, 8, 40, 1024}) {
            for (const int n_values : {1000000, 5}) {  // 5: nearly all are equal to others
                std::vector<float> row(static_cast<std::size_t>(n_columns));
                for (auto& value : row)
                    value = static_cast<float>(static_cast<int>(source() % 1000000) % n_values);
                capture_options options;
                options.top_k = k;
                capture_source from;
                from.attention.push_back({0, 1, 1, 1.0f, false, false});
                const auto plan = std::make_shared<const capture_plan>(options, from);
                const auto layout = plan->layout(n_columns);
                const auto n = static_cast<std::size_t>(layout.n_values);
                REQUIRE(n == static_cast<std::size_t>(std::min(k, n_columns)));
                std::vector<std::byte> block(layout.size_bytes);
                row_table table;
                table.scratch.resize(1);
                table.targets.push_back({plan, 0, 0, 0, n_columns, layout, block.data()});
                table.prepare_reductions();
                const auto write = [&] {
                    row_sink sink(table, 0, plan->layers()[0], 0);
                    sink.begin_query(0);
                    sink.finish(0, row.data());
                    sink.end_query(1);
                };
                write();
                std::vector<std::int32_t> order(row.size());
                std::iota(order.begin(), order.end(), 0);
                std::ranges::stable_sort(order, std::ranges::greater{}, [&](std::int32_t c) {
                    return row[static_cast<std::size_t>(c)];
                });
                std::vector<float> values(n);
                std::vector<std::int32_t> positions(n);
                std::memcpy(values.data(), block.data(), n * sizeof(float));
                std::memcpy(positions.data(), block.data() + layout.positions_offset,
                            n * sizeof(std::int32_t));
                for (std::size_t i = 0; i < n; ++i) {
                    REQUIRE(positions[i] == order[i]);
                    REQUIRE(values[i] == row[static_cast<std::size_t>(order[i])]);
                }
                for (std::size_t i = 0; i < row.size(); i += 3) row[i] = std::nanf("");
                write();
                std::fill(row.begin(), row.end(), std::nanf(""));
                write();
            }
        }
    }
}
