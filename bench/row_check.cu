// Checks the kernels of cpp/tap/device/cuda/rows.cu against float64, and times them. Neither ggml
// nor a model: bench/row_check.sh builds and runs it on a machine with a GPU.
//
//   row_check                  all cases: one line a group with its worst errors
//   row_check --quick          few and small cases, for compute-sanitizer
//   row_check --time [--quick] times at the shape of a 7B model and of MLA, alone and beside a step
//   --only WORD                groups whose name has WORD;  --seed N: other cases
//
// Exit status 1: a value was wrong.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tap/device/cuda/rows.h"

namespace {

using namespace kqview;

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    std::printf("FAILED: %s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
}
#define CUDA(x) check((x), #x)

class device_buffer {
public:
    explicit device_buffer(std::size_t n) {
        CUDA(cudaMalloc(&data_, std::max<std::size_t>(n, 16)));
    }
    ~device_buffer() { cudaFree(data_); }
    device_buffer(const device_buffer&) = delete;
    std::byte* data() const { return static_cast<std::byte*>(data_); }

private:
    void* data_ = nullptr;
};

class pinned_buffer {
public:
    explicit pinned_buffer(std::size_t n) {
        CUDA(cudaHostAlloc(&data_, std::max<std::size_t>(n, 16), cudaHostAllocMapped));
    }
    ~pinned_buffer() { cudaFreeHost(data_); }
    pinned_buffer(const pinned_buffer&) = delete;
    std::byte* data() const { return static_cast<std::byte*>(data_); }

private:
    void* data_ = nullptr;
};

using random_source = std::mt19937;
int below(random_source& random, int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
}
bool one_in(random_source& random, int n) { return below(random, n) == 0; }
float normal(random_source& random) { return std::normal_distribution<float>(0.f, 1.f)(random); }
float uniform(random_source& random, float a, float b) {
    return std::uniform_real_distribution<float>(a, b)(random);
}

// Draws every value once before any comes again.
template <class T>
class deck {
public:
    explicit deck(std::vector<T> all) : all_(std::move(all)) {}
    T draw(random_source& random) {
        if (left_.empty()) {
            left_ = all_;
            std::shuffle(left_.begin(), left_.end(), random);
        }
        const T one = left_.back();
        left_.pop_back();
        return one;
    }

private:
    std::vector<T> all_, left_;
};

void in_parallel(int n, const std::function<void(int)>& work) {
    const int n_threads =
        std::min({n, 16, static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))});
    std::atomic<int> next{0};
    const auto loop = [&] {
        for (int i = next++; i < n; i = next++) work(i);
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < n_threads; ++i) threads.emplace_back(loop);
    loop();
    for (auto& one : threads) one.join();
}

// ---- keys

struct key_type {
    int number;  // ggml_type
    const char* name;
    int n_dims, n_bytes;  // of a block
    bool is_quantised() const { return n_dims > 1; }
    std::size_t bytes_of(int n_dim) const {
        return static_cast<std::size_t>(n_dim / n_dims) * n_bytes;
    }
};
constexpr std::array<key_type, 9> key_types{{
    {1, "f16", 1, 2},
    {30, "bf16", 1, 2},
    {0, "f32", 1, 4},
    {8, "q8_0", 32, 34},
    {2, "q4_0", 32, 18},
    {3, "q4_1", 32, 20},
    {6, "q5_0", 32, 22},
    {7, "q5_1", 32, 24},
    {20, "iq4_nl", 32, 18},
}};

float half_to_float(std::uint16_t x) {
    __half h;
    std::memcpy(&h, &x, 2);
    return __half2float(h);
}
std::uint16_t float_to_half(float x) {
    const __half h = __float2half_rn(x);
    std::uint16_t bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}
template <class T>
T at(const std::byte* from, std::size_t i = 0) {
    T x;
    std::memcpy(&x, from + i * sizeof(T), sizeof(T));
    return x;
}
template <class T>
void put(std::byte* to, std::size_t i, T x) {
    std::memcpy(to + i * sizeof(T), &x, sizeof(T));
}

// Random keys whose values are about 1 in size.
void make_key(const key_type& type, int n_dim, random_source& random, std::byte* to) {
    if (!type.is_quantised()) {
        for (int i = 0; i < n_dim; ++i) {
            const float x = normal(random);
            const auto j = static_cast<std::size_t>(i);
            std::uint32_t bits;
            std::memcpy(&bits, &x, 4);
            if (type.number == 0) put(to, j, x);
            if (type.number == 1) put(to, j, float_to_half(x));
            if (type.number == 30) put(to, j, static_cast<std::uint16_t>(bits >> 16));
        }
        return;
    }
    for (int b = 0; b < n_dim / type.n_dims; ++b, to += type.n_bytes) {
        for (int i = 0; i < type.n_bytes; ++i) to[i] = static_cast<std::byte>(random() & 255);
        const bool has_fifth = type.number == 6 || type.number == 7;
        const float spread = type.number == 8    ? 73.f
                             : type.number == 20 ? 68.f
                             : has_fifth         ? 9.2f
                                                 : 4.6f;
        const float d = uniform(random, 0.5f, 1.5f) / spread;
        const bool has_least = type.number == 3 || type.number == 7;
        put(to, 0, float_to_half(one_in(random, 2) && !has_least ? -d : d));
        if (has_least)
            put(to, 1, float_to_half(normal(random) * 0.5f - d * (has_fifth ? 15.5f : 7.5f)));
    }
}

void decode_key(const key_type& type, int n_dim, const std::byte* from, double* to) {
    static constexpr int table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
    if (!type.is_quantised()) {
        for (int i = 0; i < n_dim; ++i) {
            const auto j = static_cast<std::size_t>(i);
            if (type.number == 0) to[i] = at<float>(from, j);
            if (type.number == 1) to[i] = half_to_float(at<std::uint16_t>(from, j));
            if (type.number == 30) {
                const auto bits = static_cast<std::uint32_t>(at<std::uint16_t>(from, j)) << 16;
                float x;
                std::memcpy(&x, &bits, 4);
                to[i] = x;
            }
        }
        return;
    }
    for (int b = 0; b < n_dim / 32; ++b, from += type.n_bytes, to += 32) {
        const double d = half_to_float(at<std::uint16_t>(from));
        if (type.number == 8) {
            for (int i = 0; i < 32; ++i)
                to[i] = d * static_cast<std::int8_t>(std::to_integer<int>(from[2 + i]));
            continue;
        }
        const bool has_least = type.number == 3 || type.number == 7;
        const bool has_fifth = type.number == 6 || type.number == 7;
        const double least = has_least ? half_to_float(at<std::uint16_t>(from, 1)) : 0.;
        const std::byte* const fifth = from + (has_least ? 4 : 2);
        const std::byte* const nibbles = fifth + (has_fifth ? 4 : 0);
        for (int i = 0; i < 32; ++i) {
            const int both = std::to_integer<int>(nibbles[i % 16]);
            int v = i < 16 ? both & 15 : both >> 4;
            if (has_fifth) v += (std::to_integer<int>(fifth[i / 8]) >> (i % 8) & 1) * 16;
            if (type.number == 2) v -= 8;
            if (type.number == 6) v -= 16;
            if (type.number == 20) v = table[v];
            to[i] = v * d + least;
        }
    }
}

// ---- cases

enum mask_kind { no_mask, float_mask, half_mask };

// A layer's keys repeat a pool of distinct ones, so that float64 has little to do.
struct layer_case {
    int n_dim = 128, n_head = 8, n_head_kv = 2, n_cells = 256;
    int n_pool = 4099;
    mask_kind mask = no_mask;
    bool has_sinks = false, is_all_masked = false, is_biased = false;
    float softcap = 0.f, max_bias = 0.f;
    float query_size = 1.f;

    float scale = 1.f;
    std::vector<std::byte> pool;
    std::vector<double> decoded, norms;  // (n_pool, n_dim), (n_pool)
    std::vector<float> queries;          // (stream, head, dim)
    std::vector<float> mask_values;      // (stream, cell)
    std::vector<float> sinks;

    int n_group() const { return n_head / n_head_kv; }
    std::size_t key_at(int stream, int cell, int kv) const {
        return (static_cast<std::size_t>(cell) + 977u * kv + 3511u * stream) % n_pool;
    }
};

struct span {
    int start, stop;
};

struct job_case {
    int stream = 0, n_columns = 256;
    std::vector<int> layers;                     // empty: all
    std::vector<std::vector<int>> heads;         // of each layer of the job; empty: all
    int k = 0;                                   // of `top`
    std::vector<span> spans;                     // of `sums`
    std::vector<int> ends;                       // of groups; the first is 0
    bool is_direct = false;                      // to page-locked memory
    std::vector<std::pair<int, int>> rows = {};  // layer, head
    int n_values = 0;
    std::size_t n_out = 0;  // rows that are handed out
    row_job job = {};
    std::unique_ptr<pinned_buffer> block, block_positions;
};

struct launch_case {
    row_form form;
    std::vector<job_case> jobs;
};

struct step_case {
    const key_type* type = nullptr;
    int n_streams = 1;
    std::vector<layer_case> layers;
    std::vector<launch_case> launches;
};

// As many heads as an item of these keys may have: queries and a tile fit into shared memory.
int most_heads(const key_type& type, int n_dim) {
    const int n_parts = type.number == 0 || type.number == 30 ? 3 : 2;
    const int n_at_once = type.number == 0 ? 2 : 4;
    const int n_chunks = (n_dim + 32 * n_at_once - 1) / (32 * n_at_once) * n_at_once;
    int n = 32;
    while (n > 8 && n_parts * n / 8 * n_chunks * 512 +
                            (type.is_quantised() ? n_chunks * n * 4 : 0) + n * (row_tile + 4) * 4 >
                        99 * 1024)
        n /= 2;
    return n;
}

// ---- what rows should be

struct wanted_row {
    std::vector<double> x;
    double size = 0.;       // what errors of logits and scores are measured by
    double tolerance = 0.;  // absolute
};

double slope_of(const layer_case& layer, int head) {
    if (layer.max_bias <= 0.f) return 1.;
    const int n = 1 << static_cast<int>(std::floor(std::log2(layer.n_head)));
    // llama.cpp defines slopes by float32 bases.
    const float m0 = std::exp2(-layer.max_bias / n), m1 = std::exp2(-layer.max_bias / 2.f / n);
    return head < n ? std::pow(m0, head + 1) : std::pow(m1, 2 * (head - n) + 1);
}

wanted_row row_of(const layer_case& layer, int stream, int head, int n_columns, int kind) {
    const int n_dim = layer.n_dim, kv = head / layer.n_group();
    const float* const q =
        layer.queries.data() + (static_cast<std::size_t>(stream) * layer.n_head + head) * n_dim;
    const int n_seen = std::min(n_columns, layer.n_cells);
    std::vector<double> products(static_cast<std::size_t>(layer.n_pool), NAN);
    double of_query = 0.;
    for (int d = 0; d < n_dim; ++d) of_query += static_cast<double>(q[d]) * q[d];
    of_query = std::sqrt(of_query / n_dim);
    wanted_row want;
    want.x.assign(static_cast<std::size_t>(n_columns), -INFINITY);
    double most = -INFINITY;
    for (int c = 0; c < n_seen; ++c) {
        const auto i = layer.key_at(stream, c, kv);
        double& product = products[i];
        if (std::isnan(product)) {
            const double* const key = layer.decoded.data() + i * n_dim;
            product = 0.;
            for (int d = 0; d < n_dim; ++d) product += key[d] * q[d];
        }
        double x = product, size = std::max(std::fabs(product), of_query * layer.norms[i]);
        const double bias =
            layer.mask == no_mask
                ? 0.
                : layer.mask_values[static_cast<std::size_t>(stream) * layer.n_cells + c];
        if (bias == -INFINITY) continue;
        if (kind != row_form::logits) {
            x *= layer.scale, size *= layer.scale;
            if (layer.softcap != 0.f) {
                x = layer.softcap * std::tanh(x / layer.softcap);
                size = std::min(size, static_cast<double>(layer.softcap));
            }
            x += slope_of(layer, head) * bias;
            size = std::max(size, std::fabs(slope_of(layer, head) * bias));
        }
        want.x[static_cast<std::size_t>(c)] = x;
        want.size = std::max(want.size, size);
        most = std::max(most, x);
    }
    want.tolerance = 2e-6 * want.size;
    if (kind != row_form::probs) return want;
    if (layer.has_sinks) most = std::max<double>(most, layer.sinks[static_cast<std::size_t>(head)]);
    double all = 0.;
    if (most != -INFINITY) {
        for (const double x : want.x) all += std::exp(x - most);
        if (layer.has_sinks) all += std::exp(layer.sinks[static_cast<std::size_t>(head)] - most);
    }
    want.size = 0.;
    for (double& x : want.x) {
        x = all > 0. ? std::exp(x - most) / all : 0.;
        want.size = std::max(want.size, x);
    }
    // A float32 score as large as a distance times a slope is rounded more coarsely.
    want.tolerance = 1e-6 * std::max(1., most == -INFINITY ? 0. : std::fabs(most) / 8.);
    return want;
}

wanted_row finished_row(const step_case& step, const row_form& form, const job_case& job, int row) {
    const auto own = [&](int i) {
        const auto [layer, head] = job.rows[static_cast<std::size_t>(i)];
        return row_of(step.layers[static_cast<std::size_t>(layer)], job.stream, head, job.n_columns,
                      form.kind);
    };
    if (form.reduce == row_form::none) return own(row);
    const int begin = job.ends[static_cast<std::size_t>(row)],
              end = job.ends[static_cast<std::size_t>(row) + 1];
    wanted_row all;
    for (int i = begin; i < end; ++i) {
        auto one = own(i);
        if (i == begin) {
            all = std::move(one);
            continue;
        }
        for (std::size_t c = 0; c < all.x.size(); ++c) {
            all.x[c] =
                form.reduce == row_form::mean ? all.x[c] + one.x[c] : std::max(all.x[c], one.x[c]);
        }
        all.size = std::max(all.size, one.size);
        all.tolerance = std::max(all.tolerance, one.tolerance);
    }
    if (form.reduce == row_form::mean)
        for (double& x : all.x) x /= end - begin;
    return all;
}

// ---- comparisons

struct tally {
    double logits = 0., probs = 0., halves = 0., sums = 0.;  // worst errors
    long n_values = 0;
    int n_cases = 0, n_failed = 0;
    std::vector<std::string> failures;

    void add(const tally& other) {
        logits = std::max(logits, other.logits), probs = std::max(probs, other.probs);
        halves = std::max(halves, other.halves), sums = std::max(sums, other.sums);
        n_values += other.n_values, n_cases += other.n_cases, n_failed += other.n_failed;
        for (const auto& one : other.failures)
            if (failures.size() < 6) failures.push_back(one);
    }
    void fail(const std::string& what) {
        ++n_failed;
        if (failures.size() < 6) failures.push_back(what);
    }
};

std::string text(const char* format, auto... values) {
    char to[512];
    std::snprintf(to, sizeof to, format, values...);
    return to;
}

double value_at(const std::byte* from, std::size_t i, bool is_half) {
    return is_half ? half_to_float(at<std::uint16_t>(from, i)) : at<float>(from, i);
}

// Whether a value is right; keeps the worst error.
bool is_right(tally& all, const row_form& form, double got, double want, double tolerance,
              double size) {
    ++all.n_values;
    if (form.is_half && std::isfinite(want)) want = std::clamp(want, -65504., 65504.);
    if (!std::isfinite(want)) return got == want;
    const double error = std::fabs(got - want);
    if (!std::isfinite(error)) return false;
    const double relative = size > 0. ? error / size : error;
    if (form.is_half) {
        all.halves = std::max(all.halves, relative);
        return error <= tolerance + 1e-3 * std::fabs(want) + 6e-8;
    }
    double& worst = form.finish == row_form::sums  ? all.sums
                    : form.kind == row_form::probs ? all.probs
                                                   : all.logits;
    worst = std::max(worst, form.kind == row_form::probs ? error : relative);
    return error <= tolerance;
}

void compare_whole(tally& all, const row_form& form, const wanted_row& want, const std::byte* got,
                   std::size_t first) {
    for (std::size_t c = 0; c < want.x.size(); ++c) {
        const double x = value_at(got, first + c, form.is_half);
        if (is_right(all, form, x, want.x[c], want.tolerance, want.size)) continue;
        all.fail(
            text("column %zu is %.9g, not %.9g (tolerance %.2g)", c, x, want.x[c], want.tolerance));
        return;
    }
}

void compare_top(tally& all, const row_form& form, const wanted_row& want, const std::byte* got,
                 const std::byte* got_positions, std::size_t first, int k) {
    const auto n = want.x.size(), n_top = static_cast<std::size_t>(k);
    std::vector<std::size_t> order(n), rank(n, n);
    for (std::size_t i = 0; i < n; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return want.x[a] > want.x[b]; });
    for (std::size_t i = 0; i < n_top; ++i) {
        const auto p = at<std::int32_t>(got_positions, first + i);
        if (p < 0 || static_cast<std::size_t>(p) >= n)
            return all.fail(text("place %zu has column %d of %zu", i, p, n));
        const auto column = static_cast<std::size_t>(p);
        if (rank[column] != n) return all.fail(text("column %d is there twice", p));
        rank[column] = i;
        const double x = value_at(got, first + i, form.is_half);
        if (!is_right(all, form, x, want.x[column], want.tolerance, want.size))
            return all.fail(text("place %zu, column %d: %.9g, not %.9g", i, p, x, want.x[column]));
        if (!is_right(all, form, x, want.x[order[i]], want.tolerance, want.size))
            return all.fail(text("place %zu is %.9g, not %.9g", i, x, want.x[order[i]]));
        if (i == 0) continue;
        const double before = value_at(got, first + i - 1, form.is_half);
        if (!(before >= x)) return all.fail(text("place %zu is larger than the one before", i));
        if (!form.is_half && before == x && at<std::int32_t>(got_positions, first + i - 1) > p)
            return all.fail(text("place %zu: equal values, the later column first", i));
    }
    const double last = want.x[order[n_top - 1]];
    for (std::size_t c = 0; c < n; ++c) {
        const bool is_in = rank[c] != n;
        if (!is_in && want.x[c] > last + 2. * want.tolerance)
            return all.fail(
                text("column %zu is missing: %.9g, the last is %.9g", c, want.x[c], last));
        if (is_in && want.x[c] < last - 2. * want.tolerance)
            return all.fail(
                text("column %zu is there: %.9g, the last is %.9g", c, want.x[c], last));
    }
    // Of columns with the same value those that are earlier come first.
    for (std::size_t i = 1; i < n; ++i) {
        const auto a = order[i - 1], b = order[i];
        if (want.x[a] == want.x[b] && rank[a] > rank[b])
            return all.fail(text("columns %zu and %zu are equal: places %zu, %zu of %zu", a, b,
                                 rank[a], rank[b], n_top));
    }
}

void compare_sums(tally& all, const row_form& form, const wanted_row& want, const std::byte* got,
                  std::size_t first, const std::vector<span>& spans) {
    for (std::size_t i = 0; i < spans.size(); ++i) {
        double sum = 0., size = 0.;
        const auto stop =
            std::min<std::size_t>(want.x.size(), static_cast<std::size_t>(spans[i].stop));
        for (auto c = static_cast<std::size_t>(spans[i].start); c < stop; ++c) {
            sum += want.x[c];
            size += std::fabs(want.x[c]);
        }
        size = form.kind == row_form::probs ? 1. : std::max(size, want.size);
        const double x = value_at(got, first + i, form.is_half);
        const double tolerance =
            1e-5 * std::max(size, form.kind == row_form::probs ? want.tolerance / 1e-6 : 0.);
        if (!is_right(all, form, x, sum, tolerance, size))
            return all.fail(text("span %zu, [%d, %d): %.9g, not %.9g", i, spans[i].start,
                                 spans[i].stop, x, sum));
    }
}

// ---- a step, run

std::vector<std::int32_t> numbers_of_spans(const std::vector<span>& spans, int& n_cuts) {
    std::vector<std::int32_t> cuts;
    for (const auto& one : spans) cuts.insert(cuts.end(), {one.start, one.stop});
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    n_cuts = static_cast<int>(cuts.size());
    auto numbers = cuts;
    for (const auto& one : spans) {
        for (const int column : {one.start, one.stop})
            numbers.push_back(static_cast<std::int32_t>(
                std::lower_bound(cuts.begin(), cuts.end(), column) - cuts.begin()));
    }
    return numbers;
}

constexpr std::size_t guard = 64;  // bytes after each region that nothing may write to
struct region {
    std::size_t begin, n_bytes;
};

// Items and numbers of a job's layers and heads; fills its rows.
void add_items(row_step& step, const std::vector<layer_case>& layers, job_case& one, int n_most) {
    auto& job = one.job;
    job.first_item = static_cast<std::int32_t>(step.items.size());
    one.rows.clear();
    std::vector<int> chosen = one.layers;
    if (chosen.empty())
        for (int i = 0; i < static_cast<int>(layers.size()); ++i) chosen.push_back(i);
    for (std::size_t c = 0; c < chosen.size(); ++c) {
        const auto& layer = layers[static_cast<std::size_t>(chosen[c])];
        std::vector<std::int32_t> row_of_head(static_cast<std::size_t>(layer.n_head), -1);
        std::vector<int> heads = c < one.heads.size() ? one.heads[c] : std::vector<int>{};
        if (heads.empty())
            for (int h = 0; h < layer.n_head; ++h) heads.push_back(h);
        for (const int h : heads) {
            row_of_head[static_cast<std::size_t>(h)] = static_cast<std::int32_t>(one.rows.size());
            one.rows.emplace_back(chosen[c], h);
        }
        for (int kv = 0; kv < layer.n_head_kv; ++kv) {
            for (int i = 0; i < layer.n_group(); i += n_most) {
                const int first = kv * layer.n_group() + i,
                          n = std::min(n_most, layer.n_group() - i);
                const auto* const begin = row_of_head.data() + first;
                if (std::all_of(begin, begin + n, [](int row) { return row < 0; })) continue;
                step.items.push_back(
                    {chosen[c], first, n, static_cast<std::int32_t>(step.numbers.size())});
                step.numbers.insert(step.numbers.end(), begin, begin + n);
            }
        }
    }
    job.n_items = static_cast<std::int32_t>(step.items.size()) - job.first_item;
    job.n_rows = static_cast<std::int32_t>(one.rows.size());
}

// All of a job but its pointers.
void add_job(row_step& step, const std::vector<layer_case>& layers, const row_form& form,
             job_case& one, int n_most, const std::function<std::uint64_t(std::size_t)>& take) {
    auto& job = one.job;
    job = {};
    job.stream = one.stream;
    job.n_columns = one.n_columns;
    add_items(step, layers, one, n_most);
    job.n_tiles = (one.n_columns + row_tile - 1) / row_tile;
    if (form.reduce != row_form::none) {
        job.first_group = static_cast<std::int32_t>(step.numbers.size());
        job.n_groups = static_cast<std::int32_t>(one.ends.size()) - 1;
        step.numbers.insert(step.numbers.end(), one.ends.begin(), one.ends.end());
    }
    one.n_values = form.finish == row_form::top    ? one.k
                   : form.finish == row_form::sums ? static_cast<int>(one.spans.size())
                                                   : one.n_columns;
    job.n_values = one.n_values;
    if (form.finish == row_form::sums) {
        const auto numbers = numbers_of_spans(one.spans, job.n_cuts);
        job.first_cut = static_cast<std::int32_t>(step.numbers.size());
        job.n_spans = one.n_values;
        step.numbers.insert(step.numbers.end(), numbers.begin(), numbers.end());
    }
    const auto n_rows = static_cast<std::size_t>(job.n_rows),
               n_columns = static_cast<std::size_t>(one.n_columns);
    one.n_out = form.reduce == row_form::none ? n_rows : static_cast<std::size_t>(job.n_groups);
    if (form.needs_values()) job.values = take(n_rows * n_columns * 4);
    if (form.kind == row_form::probs) {
        job.parts = take(n_rows * static_cast<std::size_t>(job.n_tiles) * 8);
        job.joined = take(n_rows * 8);
    }
    if (form.reduce != row_form::none && form.finish != row_form::whole)
        job.reduced = take(one.n_out * n_columns * 4);
    const auto n_out = one.n_out * static_cast<std::size_t>(one.n_values);
    job.out = take(n_out * (form.is_half ? 2 : 4));
    if (form.finish == row_form::top) job.positions = take(n_out * 4);
    step.jobs.push_back(job);
}

void fill_layer(const key_type& type, layer_case& layer, int n_streams, random_source& random) {
    const auto n_bytes = type.bytes_of(layer.n_dim);
    const auto n_pool = static_cast<std::size_t>(layer.n_pool),
               n_dim = static_cast<std::size_t>(layer.n_dim);
    layer.pool.resize(n_pool * n_bytes);
    layer.decoded.resize(n_pool * n_dim);
    layer.norms.resize(n_pool);
    double keys = 0., queries = 0.;
    for (std::size_t i = 0; i < n_pool; ++i) {
        make_key(type, layer.n_dim, random, layer.pool.data() + i * n_bytes);
        double* const own = layer.decoded.data() + i * n_dim;
        decode_key(type, layer.n_dim, layer.pool.data() + i * n_bytes, own);
        double norm = 0.;
        for (std::size_t d = 0; d < n_dim; ++d) norm += own[d] * own[d];
        keys += norm;
        layer.norms[i] = std::sqrt(norm);
    }
    layer.queries.resize(static_cast<std::size_t>(n_streams) * layer.n_head * n_dim);
    for (float& x : layer.queries) {
        x = normal(random) * layer.query_size * (one_in(random, 100) ? 10.f : 1.f);
        queries += static_cast<double>(x) * x;
    }
    keys /= static_cast<double>(n_pool * n_dim);
    queries /= static_cast<double>(layer.queries.size());
    layer.scale = static_cast<float>(1.5 / std::sqrt(keys * queries * layer.n_dim));
    if (layer.has_sinks) {
        layer.sinks.resize(static_cast<std::size_t>(layer.n_head));
        for (float& x : layer.sinks) x = normal(random) * 3.f;
    }
    if (layer.mask == no_mask) return;
    for (int s = 0; s < n_streams; ++s) {
        const int n = layer.n_cells;
        const bool is_window = one_in(random, 2), has_holes = one_in(random, 2);
        const int stop = n - below(random, (n + 3) / 4),
                  start = is_window ? below(random, stop) : 0;
        for (int c = 0; c < n; ++c) {
            float x = 0.f;
            if (layer.max_bias > 0.f) x = static_cast<float>(c - stop);
            if (layer.is_biased) x += normal(random) * 0.5f;
            if (c < start || c >= stop || (has_holes && one_in(random, 20)) || layer.is_all_masked)
                x = -INFINITY;
            if (layer.mask == half_mask) x = half_to_float(float_to_half(x));
            layer.mask_values.push_back(x);
        }
    }
}

bool is_poison(const std::byte* from, std::size_t n) {
    return std::all_of(from, from + n, [](std::byte x) { return x == std::byte{0xff}; });
}

std::string describe(const step_case& step, const row_form& form, const job_case& job,
                     std::size_t row) {
    static constexpr const char* kinds[] = {"logits", "scores", "probs"};
    static constexpr const char* reductions[] = {"", " mean", " max"};
    static constexpr const char* finishes[] = {"", " top", " sums"};
    const auto& [il, head] =
        job.rows[form.reduce == row_form::none ? row : static_cast<std::size_t>(job.ends[row])];
    const auto& layer = step.layers[static_cast<std::size_t>(il)];
    std::string to = text(
        "%s %s%s%s%s, dim %d, heads %d/%d, stream %d, columns %d, cells %d, layer %d head %d row "
        "%zu%s",
        step.type->name, kinds[form.kind], reductions[form.reduce], finishes[form.finish],
        form.is_half ? " f16" : "", layer.n_dim, layer.n_head, layer.n_head_kv, job.stream,
        job.n_columns, layer.n_cells, il, head, row, job.is_direct ? " direct" : "");
    if (form.finish == row_form::top) to += text(", k %d", job.k);
    if (layer.mask != no_mask) to += layer.mask == half_mask ? ", half mask" : ", float mask";
    if (layer.is_all_masked) to += " of all";
    if (layer.has_sinks) to += ", sinks";
    if (layer.softcap != 0.f) to += ", softcap";
    if (layer.max_bias != 0.f) to += ", alibi";
    return to;
}

constexpr std::size_t n_rows_checked = 8;  // of a job, and 3 groups

// Fills in data, runs it twice, and compares.
tally run_step(step_case& one, random_source& random) {
    const auto& type = *one.type;
    row_step step;
    step.key_type = type.number;
    std::vector<std::unique_ptr<device_buffer>> buffers;
    const auto to_device = [&](const void* from, std::size_t n) {
        buffers.push_back(std::make_unique<device_buffer>(n));
        CUDA(cudaMemcpy(buffers.back()->data(), from, n, cudaMemcpyHostToDevice));
        return buffers.back()->data();
    };
    std::vector<std::byte> saved;
    const auto save = [&](const void* from, std::size_t n) {
        const auto begin = saved.size();
        saved.resize(begin + (n + 15) / 16 * 16 + 16, std::byte{0xff});
        std::memcpy(saved.data() + begin, from, n);
        return static_cast<std::uint64_t>(begin);
    };
    int n_most = 32;
    for (auto& layer : one.layers) {
        fill_layer(type, layer, one.n_streams, random);
        n_most = std::min(n_most, most_heads(type, layer.n_dim));
        const auto n_bytes = type.bytes_of(layer.n_dim);
        constexpr int n_extra = 5;  // cells that are NaN
        const auto n_stream =
            static_cast<std::size_t>(layer.n_cells + n_extra) * layer.n_head_kv * n_bytes;
        std::vector<std::byte> keys(n_stream * one.n_streams, std::byte{0xff});
        for (int s = 0; s < one.n_streams; ++s) {
            std::byte* to = keys.data() + s * n_stream;
            for (int c = 0; c < layer.n_cells; ++c) {
                for (int kv = 0; kv < layer.n_head_kv; ++kv, to += n_bytes)
                    std::memcpy(to, layer.pool.data() + layer.key_at(s, c, kv) * n_bytes, n_bytes);
            }
        }
        row_layer to{};
        to.keys = to_device(keys.data(), keys.size());
        to.key_head_stride = n_bytes;
        to.key_cell_stride = n_bytes * layer.n_head_kv;
        to.key_stream_stride = n_stream;
        to.query = save(layer.queries.data(), layer.queries.size() * 4);
        to.query_head_stride = static_cast<std::uint64_t>(layer.n_dim) * 4;
        to.query_stream_stride = to.query_head_stride * layer.n_head;
        to.mask = row_layer::nothing;
        if (layer.mask == float_mask) {
            to.mask = save(layer.mask_values.data(), layer.mask_values.size() * 4);
            to.mask_stream_stride = static_cast<std::uint64_t>(layer.n_cells) * 4;
        } else if (layer.mask == half_mask) {
            std::vector<std::uint16_t> halves;
            for (const float x : layer.mask_values) halves.push_back(float_to_half(x));
            to.mask = save(halves.data(), halves.size() * 2);
            to.mask_stream_stride = static_cast<std::uint64_t>(layer.n_cells) * 2;
            to.mask_is_half = 1;
        }
        if (layer.has_sinks)
            to.sinks = reinterpret_cast<const float*>(
                to_device(layer.sinks.data(), layer.sinks.size() * 4));
        to.scale = layer.scale, to.softcap = layer.softcap, to.max_bias = layer.max_bias;
        to.n_dim = layer.n_dim, to.n_head = layer.n_head, to.n_head_kv = layer.n_head_kv;
        to.n_cells = layer.n_cells;
        step.layers.push_back(to);
    }
    const auto* const saved_there = to_device(saved.data(), saved.size());

    std::vector<region> regions;
    std::size_t n_bytes = guard;
    const auto take = [&](std::size_t n) {
        const auto begin = n_bytes;
        regions.push_back({begin, n});
        n_bytes = (begin + n + guard + 15) / 16 * 16;
        return static_cast<std::uint64_t>(begin);
    };
    for (auto& launch : one.launches) {
        step.launches.push_back({launch.form, step.jobs.size(), launch.jobs.size()});
        for (auto& job : launch.jobs) {
            add_job(step, one.layers, launch.form, job, n_most, take);
            if (!job.is_direct) continue;
            const auto n_out = job.n_out * static_cast<std::size_t>(job.n_values);
            job.block = std::make_unique<pinned_buffer>(n_out * 4 + guard);
            job.block_positions = std::make_unique<pinned_buffer>(n_out * 4 + guard);
            step.jobs.back().block_out = job.job.block_out = job.block->data();
            if (launch.form.finish == row_form::top)
                step.jobs.back().block_positions = job.block_positions->data();
        }
    }
    step.n_bytes = n_bytes;
    device_buffer memory(n_bytes), table(cuda::table_bytes(step));
    pinned_buffer table_here(cuda::table_bytes(step));
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    tally all;
    all.n_cases = 1;
    std::vector<std::byte> got(n_bytes), before;
    std::vector<std::vector<std::byte>> blocks_before;
    for (int run = 0; run < 2; ++run) {
        CUDA(cudaMemset(memory.data(), 0xff, n_bytes));
        for (auto& launch : one.launches) {
            for (auto& job : launch.jobs) {
                if (!job.is_direct) continue;
                const auto n = job.n_out * static_cast<std::size_t>(job.n_values) * 4 + guard;
                std::memset(job.block->data(), 0xff, n);
                std::memset(job.block_positions->data(), 0xff, n);
            }
        }
        CUDA(cudaDeviceSynchronize());
        const cuda::row_tables tables{table_here.data(), table.data(), cuda::table_bytes(step)};
        const auto status = cuda::launch_rows(step, tables, saved_there, memory.data(), stream);
        if (status != cudaSuccess) {
            const auto& first = one.launches.front();
            all.fail(
                text("launch_rows: %s; ", cudaGetErrorString(static_cast<cudaError_t>(status))) +
                describe(one, first.form, first.jobs.front(), 0));
            cudaGetLastError();
            cudaDeviceSynchronize();
            cudaStreamDestroy(stream);
            return all;
        }
        CUDA(cudaStreamSynchronize(stream));
        CUDA(cudaMemcpy(got.data(), memory.data(), n_bytes, cudaMemcpyDeviceToHost));
        if (run == 0) before = got;
        std::size_t i = 0;
        for (auto& launch : one.launches) {
            for (auto& job : launch.jobs) {
                const auto n_out = job.n_out * static_cast<std::size_t>(job.n_values) *
                                   (launch.form.is_half ? 2 : 4);
                const std::byte* const out =
                    job.is_direct ? job.block->data() : got.data() + job.job.out;
                if (run == 0) {
                    blocks_before.emplace_back(out, out + n_out);
                } else if (std::memcmp(out, blocks_before[i].data(), n_out) != 0) {
                    all.fail("two runs differ: " + describe(one, launch.form, job, 0));
                }
                ++i;
            }
        }
    }
    cudaStreamDestroy(stream);

    std::size_t end = 0;
    for (const auto& here : regions) {
        if (!is_poison(got.data() + end, here.begin - end))
            all.fail(text("bytes [%zu, %zu) are written to, of no region", end, here.begin));
        end = here.begin + here.n_bytes;
    }
    if (!is_poison(got.data() + end, n_bytes - end)) all.fail("bytes after the last region");

    struct piece {
        const launch_case* launch;
        const job_case* job;
        std::size_t row;
    };
    std::vector<piece> pieces;
    for (const auto& launch : one.launches) {
        const auto& form = launch.form;
        for (const auto& job : launch.jobs) {
            const auto n_values = job.n_out * static_cast<std::size_t>(job.n_values);
            const auto size = form.is_half ? std::size_t{2} : std::size_t{4};
            const std::byte* out = got.data() + job.job.out;
            if (job.is_direct) {
                if (!is_poison(out, n_values * size))
                    all.fail("memory is written to: " + describe(one, form, job, 0));
                out = job.block->data();
                if (!is_poison(out + n_values * size, guard))
                    all.fail("beyond a block: " + describe(one, form, job, 0));
            }
            for (std::size_t i = 0; i < n_values; ++i) {
                if (!std::isnan(value_at(out, i, form.is_half))) continue;
                all.fail(text("value %zu of row %zu is not a number: ",
                              i % static_cast<std::size_t>(job.n_values),
                              i / static_cast<std::size_t>(job.n_values)) +
                         describe(one, form, job, i / static_cast<std::size_t>(job.n_values)));
                break;
            }
            std::vector<std::size_t> rows(job.n_out);
            for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = i;
            std::shuffle(rows.begin(), rows.end(), random);
            const auto most = form.reduce == row_form::none ? n_rows_checked : 3;
            rows.resize(std::min(rows.size(), most));
            for (const auto row : rows) pieces.push_back({&launch, &job, row});
        }
    }
    std::mutex mutex;
    in_parallel(static_cast<int>(pieces.size()), [&](int i) {
        const auto& [launch, job, row] = pieces[static_cast<std::size_t>(i)];
        const auto& form = launch->form;
        tally own;
        const auto want = finished_row(one, form, *job, static_cast<int>(row));
        const std::byte* const out =
            job->is_direct ? job->block->data() : got.data() + job->job.out;
        const std::byte* const positions =
            job->is_direct ? job->block_positions->data() : got.data() + job->job.positions;
        const auto first = row * static_cast<std::size_t>(job->n_values);
        if (form.finish == row_form::whole) compare_whole(own, form, want, out, first);
        if (form.finish == row_form::top)
            compare_top(own, form, want, out, positions, first, job->k);
        if (form.finish == row_form::sums) compare_sums(own, form, want, out, first, job->spans);
        for (auto& failure : own.failures) failure += ": " + describe(one, form, *job, row);
        const std::lock_guard lock(mutex);
        all.add(own);
    });
    return all;
}

// ---- groups of cases

struct run_options {
    bool is_quick = false, is_timed = false;
    std::string only;
    unsigned seed = 1;
};

class suite {
public:
    explicit suite(const run_options& options) : options_(options) {}

    // Runs `make(i)` for i < n.
    void group(const std::string& name, int n,
               const std::function<step_case(int, random_source&)>& make) {
        if (name.find(options_.only) == std::string::npos) return;
        const auto start = std::chrono::steady_clock::now();
        random_source random(options_.seed * 1000003u +
                             static_cast<unsigned>(std::hash<std::string>{}(name)));
        tally of_group;
        for (int i = 0; i < n; ++i) {
            auto one = make(i, random);
            of_group.add(run_step(one, random));
        }
        const auto worst = [](double x) { return x > 0. ? text("%.1e", x) : std::string("-"); };
        std::printf(
            "%-24s %3d cases %9ld values  logits %-7s probs %-7s f16 %-7s sums %-7s %5.1f s  %s\n",
            name.c_str(), of_group.n_cases, of_group.n_values, worst(of_group.logits).c_str(),
            worst(of_group.probs).c_str(), worst(of_group.halves).c_str(),
            worst(of_group.sums).c_str(),
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
            of_group.n_failed ? "FAILED" : "right");
        for (const auto& failure : of_group.failures) std::printf("  FAILED %s\n", failure.c_str());
        std::fflush(stdout);
        all_.add(of_group);
    }

    int finish() const {
        if (all_.n_failed) {
            std::printf("FAILED: %d comparisons in %d cases\n", all_.n_failed, all_.n_cases);
            return 1;
        }
        std::printf("all %d cases right\n", all_.n_cases);
        return 0;
    }

private:
    const run_options& options_;
    tally all_;
};

std::vector<row_form> all_forms() {
    std::vector<row_form> forms;
    for (int kind : {row_form::logits, row_form::scores, row_form::probs})
        for (int reduce : {row_form::none, row_form::mean, row_form::max})
            for (int finish : {row_form::whole, row_form::top, row_form::sums})
                for (int is_half : {0, 1}) forms.push_back({kind, reduce, finish, is_half});
    return forms;
}

struct decks {
    deck<int> dims{{64, 80, 96, 112, 128, 192, 256, 576}};
    deck<int> quantised_dims{{64, 96, 128, 192, 256, 576}};
    deck<int> groups{{1, 2, 7, 8, 12, 16, 71, 128}};
    deck<int> columns{{1, 7, 255, 256, 257, 1000, 4096 + 3, 16384}};
    deck<int> jobs{{1, 2, 3, 5, 8}};
    deck<int> layers{{1, 2, 3}};
    deck<int> tops{{1, 8, 40, 300, INT_MAX, max_top_k}};
    deck<int> masks{{no_mask, float_mask, half_mask}};
};

// Runs of rows that cover all of them.
std::vector<int> random_ends(int n_rows, random_source& random) {
    std::vector<int> ends{0};
    if (one_in(random, 4) && n_rows <= 64) return {0, n_rows};
    while (ends.back() < n_rows)
        ends.push_back(std::min(n_rows, ends.back() + 1 + below(random, 24)));
    return ends;
}

std::vector<span> random_spans(int n_columns, int n, random_source& random) {
    std::vector<span> spans;
    for (int i = 0; i < n; ++i) {
        const int start = below(random, n_columns + 2);
        const int stop = one_in(random, 4) ? INT_MAX : start + 1 + below(random, n_columns);
        spans.push_back({start, stop});
    }
    spans.push_back({0, INT_MAX});
    return spans;
}

int rows_of(const step_case& step, const job_case& job) {
    int n = 0;
    for (std::size_t i = 0; i < step.layers.size(); ++i) {
        if (job.layers.empty()) n += step.layers[i].n_head;
    }
    for (std::size_t i = 0; i < job.layers.size(); ++i) {
        n += i < job.heads.size() && !job.heads[i].empty()
                 ? static_cast<int>(job.heads[i].size())
                 : step.layers[static_cast<std::size_t>(job.layers[i])].n_head;
    }
    return n;
}

void complete(const step_case& step, const row_form& form, job_case& job, decks& from,
              random_source& random) {
    if (form.reduce != row_form::none) job.ends = random_ends(rows_of(step, job), random);
    if (form.finish == row_form::top && job.k == 0) job.k = from.tops.draw(random);
    job.k = std::min({job.k, job.n_columns, max_top_k});
    if (form.finish == row_form::sums && job.spans.empty())
        job.spans = random_spans(job.n_columns, 1 + below(random, 20), random);
}

step_case sampled(const key_type& type, const std::vector<row_form>& forms, decks& from,
                  random_source& random, bool is_quick) {
    step_case step;
    step.type = &type;
    const int n_layers = from.layers.draw(random);
    const auto draw_columns = [&] {
        int n = from.columns.draw(random);
        while (is_quick && n > 1000) n = from.columns.draw(random);
        return n;
    };
    std::vector<int> columns;
    for (int i = 0; i < 8; ++i) columns.push_back(draw_columns());
    const int longest = *std::max_element(columns.begin(), columns.end());
    std::size_t n_bytes_of_stream = 0;
    for (int i = 0; i < n_layers; ++i) {
        layer_case layer;
        layer.n_dim = (type.is_quantised() ? from.quantised_dims : from.dims).draw(random);
        const int n_group = from.groups.draw(random);
        layer.n_head_kv = n_group > 16 ? 1 : 1 + below(random, 4);
        layer.n_head = n_group * layer.n_head_kv;
        if (layer.n_dim == 576) layer.n_head_kv = 1, layer.n_head = 128;
        if (is_quick && layer.n_head > 40) layer.n_head = 40, layer.n_head_kv = 1;
        layer.n_cells = one_in(random, 3) ? std::max(1, longest - 1 - below(random, longest))
                                          : (longest + 31) / 32 * 32;
        layer.n_pool = is_quick ? 251 : 4099;
        layer.mask = static_cast<mask_kind>(from.masks.draw(random));
        layer.is_biased = one_in(random, 2);
        layer.is_all_masked = one_in(random, 12);
        layer.has_sinks = one_in(random, 4);
        if (one_in(random, 4)) layer.softcap = 2.f;
        if (one_in(random, 4)) layer.max_bias = 8.f;
        layer.query_size = one_in(random, 4) ? 0.06f : one_in(random, 4) ? 20.f : 1.f;
        n_bytes_of_stream +=
            static_cast<std::size_t>(layer.n_cells) * layer.n_head_kv * type.bytes_of(layer.n_dim);
        step.layers.push_back(std::move(layer));
    }
    constexpr std::size_t most_bytes = std::size_t{128} << 20;
    step.n_streams = static_cast<int>(
        std::clamp<std::size_t>(most_bytes / std::max<std::size_t>(n_bytes_of_stream, 1), 1, 8));
    for (const auto& form : forms) {
        launch_case launch;
        launch.form = form;
        const int n_jobs = from.jobs.draw(random);
        long budget = 6'000'000;  // values of a launch
        for (int j = 0; j < n_jobs; ++j) {
            job_case job;
            job.stream = (j + below(random, 2)) % step.n_streams;
            job.n_columns = columns[static_cast<std::size_t>((j + below(random, 8)) % 8)];
            for (int l = 0; l < n_layers; ++l) {
                if (n_layers > 1 && one_in(random, 4)) continue;
                job.layers.push_back(l);
                std::vector<int> heads;
                if (one_in(random, 3)) {
                    for (int h = 0; h < step.layers[static_cast<std::size_t>(l)].n_head; ++h)
                        if (one_in(random, 3)) heads.push_back(h);
                    std::shuffle(heads.begin(), heads.end(), random);
                }
                job.heads.push_back(std::move(heads));
            }
            if (job.layers.empty()) job.layers = {0}, job.heads = {{}};
            const long n = static_cast<long>(rows_of(step, job)) * job.n_columns;
            if (n > budget) job.n_columns = std::min(job.n_columns, 257);
            budget -= static_cast<long>(rows_of(step, job)) * job.n_columns;
            job.is_direct = one_in(random, 3);
            complete(step, form, job, from, random);
            launch.jobs.push_back(std::move(job));
        }
        step.launches.push_back(std::move(launch));
    }
    return step;
}

// One layer, one job for each number of columns, one launch for each form.
step_case plain(const key_type& type, layer_case layer, const std::vector<row_form>& forms,
                const std::vector<int>& columns, decks& from, random_source& random, int k = 0) {
    step_case step;
    step.type = &type;
    step.n_streams = std::min(2, static_cast<int>(columns.size()));
    step.layers.push_back(std::move(layer));
    for (const auto& form : forms) {
        launch_case launch;
        launch.form = form;
        for (std::size_t i = 0; i < columns.size(); ++i) {
            job_case job;
            job.stream = static_cast<int>(i) % step.n_streams;
            job.n_columns = columns[i];
            job.k = k;
            complete(step, form, job, from, random);
            launch.jobs.push_back(std::move(job));
        }
        step.launches.push_back(std::move(launch));
    }
    return step;
}

int run_checks(const run_options& options) {
    suite all(options);
    const bool is_quick = options.is_quick;
    const auto forms = all_forms();
    const row_form logits{}, scores{row_form::scores}, probs{row_form::probs};
    const row_form half_logits{row_form::logits, row_form::none, row_form::whole, 1};
    const row_form half_scores{row_form::scores, row_form::none, row_form::whole, 1};

    // Head sizes and groups, all pairs with each type.
    for (const auto& type : key_types) {
        std::vector<std::pair<int, int>> shapes;  // n_dim, group
        for (int n_dim : {64, 80, 96, 112, 128, 192, 256, 576})
            for (int n_group : {1, 2, 7, 8, 12, 16, 71, 128}) shapes.emplace_back(n_dim, n_group);
        std::erase_if(shapes, [&](const auto& shape) {
            const auto [n_dim, n_group] = shape;
            return (type.is_quantised() && n_dim % 32 != 0) || (n_dim == 576 && n_group < 16) ||
                   (is_quick && (n_dim + n_group) % 5 != 0);
        });
        decks from;
        all.group(std::string("shapes ") + type.name, static_cast<int>(shapes.size()),
                  [&](int i, random_source& random) {
                      layer_case layer;
                      const auto [n_dim, n_group] = shapes[static_cast<std::size_t>(i)];
                      layer.n_dim = n_dim;
                      layer.n_head_kv = n_group > 16 || n_dim == 576 ? 1 : 1 + i % 3;
                      layer.n_head = n_group * layer.n_head_kv;
                      layer.n_cells = 600, layer.n_pool = 601;
                      return plain(type, layer, {logits, probs}, {599, 300}, from, random);
                  });
    }
    // Every form with each type, all else as it is drawn.
    for (const auto& type : key_types) {
        decks from;
        auto left = forms;
        constexpr int n_forms = 6;
        const int n = is_quick ? 2 : 18;
        all.group(std::string("forms ") + type.name, n, [&](int i, random_source& random) {
            if (i % 9 == 0) std::shuffle(left.begin(), left.end(), random);
            const auto begin = left.begin() + i % 9 * n_forms;
            return sampled(type, {begin, begin + n_forms}, from, random, is_quick);
        });
    }
    decks from;
    const auto top_forms = [&] {
        std::vector<row_form> some;
        for (const auto& form : forms)
            if (form.finish == row_form::top && (!is_quick || form.kind != row_form::scores))
                some.push_back(form);
        return some;
    }();
    const std::vector<int> lengths = is_quick
                                         ? std::vector<int>{7, 257, 1000}
                                         : std::vector<int>{1, 7, 257, 1000, 2049, 5000, 16384};
    // 0: as many as there are.
    const std::vector<int> tops{1, 8, 40, 255, 256, 257, 300, max_top_k - 1, max_top_k, INT_MAX};
    const int n_tops = is_quick ? 4 : static_cast<int>(tops.size());
    for (const auto& [name, n_pool] :
         {std::pair{"top, values apart", 20011}, {"top, many equal", 3}, {"top, all equal", 1}}) {
        all.group(name, n_tops, [&, n_pool = n_pool](int i, random_source& random) {
            layer_case layer;
            layer.n_head = 6, layer.n_head_kv = 2, layer.n_dim = 64;
            layer.n_cells = lengths.back() + 3,
            layer.n_pool = is_quick ? std::min(n_pool, 1009) : n_pool;
            layer.mask = static_cast<mask_kind>(i % 3);
            return plain(key_types[0], layer, top_forms, lengths, from, random,
                         tops[static_cast<std::size_t>(is_quick ? 3 * i : i)]);
        });
    }
    all.group("all masked", is_quick ? 2 : 4, [&](int i, random_source& random) {
        layer_case layer;
        layer.n_cells = lengths.back(), layer.n_pool = 997;
        layer.mask = i % 2 ? half_mask : float_mask;
        layer.is_all_masked = true, layer.has_sinks = i >= 2;
        auto step = plain(key_types[static_cast<std::size_t>(i)], layer,
                          is_quick ? top_forms : forms, lengths, from, random, 40);
        // Beside a layer that is not masked.
        layer.is_all_masked = false;
        step.layers.push_back(layer);
        for (auto& launch : step.launches)
            for (auto& job : launch.jobs)
                if (launch.form.reduce != row_form::none) job.ends = {0, 3, 11, 16};
        return step;
    });
    all.group("many spans", is_quick ? 2 : 6, [&](int i, random_source& random) {
        layer_case layer;
        layer.n_head = 4, layer.n_head_kv = 1, layer.n_cells = lengths.back();
        layer.mask = i % 2 ? float_mask : no_mask;
        step_case step = plain(key_types[0], layer, {}, {}, from, random);
        step.n_streams = 1;
        for (const int kind : {row_form::logits, row_form::probs}) {
            launch_case launch;
            launch.form = {kind, i % 3, row_form::sums, 0};
            for (const int n : lengths) {
                job_case job;
                job.n_columns = n;
                // As many cuts as are kept at most, or few.
                if (i % 2 == 0) {
                    for (int s = 0; s < max_row_cuts / 2; ++s)
                        job.spans.push_back({2 * s, i == 0 || s % 7 ? 2 * s + 1 : 2 * s + 2});
                } else {
                    job.spans = random_spans(n, 40, random);
                    job.spans.push_back(job.spans.front());
                }
                job.is_direct = one_in(random, 2);
                complete(step, launch.form, job, from, random);
                launch.jobs.push_back(std::move(job));
            }
            step.launches.push_back(std::move(launch));
        }
        return step;
    });
    const int n_types = static_cast<int>(key_types.size());
    all.group("float16, saturated", n_types, [&](int i, random_source& random) {
        layer_case layer;
        layer.query_size = 4000.f, layer.n_cells = 1000, layer.n_pool = 1009;
        layer.mask = float_mask;
        return plain(key_types[static_cast<std::size_t>(i)], layer,
                     {half_logits, half_scores, logits}, {1000, 257}, from, random);
    });
    for (const float size : {0.1f, 0.01f, 0.001f, 1e-5f, 300.f}) {
        all.group(text("queries of size %g", size), n_types, [&](int i, random_source& random) {
            layer_case layer;
            layer.query_size = size, layer.n_cells = 500, layer.n_pool = 509;
            return plain(key_types[static_cast<std::size_t>(i)], layer, {logits, probs}, {500},
                         from, random);
        });
    }
    for (const auto& name : {"scale", "softcap", "alibi", "sinks", "window", "no cell"}) {
        const std::string what = name;
        all.group(what, n_types, [&](int i, random_source& random) {
            layer_case layer;
            layer.n_head = 12, layer.n_head_kv = 4, layer.n_cells = 1100, layer.n_pool = 1103;
            if (what == "softcap") layer.softcap = i % 2 ? 2.f : 30.f;
            if (what == "sinks") layer.has_sinks = true;
            if (what == "no cell") layer.n_cells = 300 + i;
            if (what == "alibi") layer.max_bias = 8.f;
            if (what == "alibi" || what == "window" || i % 2 == 1)
                layer.mask = i % 2 ? half_mask : float_mask;
            if (what == "window") layer.is_biased = true;
            return plain(key_types[static_cast<std::size_t>(i)], layer, {logits, scores, probs},
                         {1000, 257, 256, 1}, from, random);
        });
    }
    return all.finish();
}

// ---- times

// A stand-in for a step: reads memory, as weights are read.
__global__ void read_all(const uint4* from, std::size_t n, std::uint32_t* sink) {
    std::uint32_t x = 0;
    for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
         i += std::size_t{gridDim.x} * blockDim.x) {
        const uint4 v = __ldcs(from + i);
        x ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (x == 0x12345678u) *sink = x;
}

template <class T>
T median(std::vector<T> all) {
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
}

class stand_in {
public:
    static constexpr std::size_t n_bytes = std::size_t{7600} << 20;

    explicit stand_in(cudaStream_t stream) : weights_(n_bytes), sink_(16), stream_(stream) {
        constexpr std::size_t n_kernels = 200;
        int n_processors = 0;
        CUDA(cudaDeviceGetAttribute(&n_processors, cudaDevAttrMultiProcessorCount, 0));
        CUDA(cudaMemset(weights_.data(), 0x5a, n_bytes));
        CUDA(cudaDeviceSynchronize());
        cudaGraph_t graph;
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (std::size_t i = 0; i < n_kernels; ++i) {
            const auto n = n_bytes / n_kernels / 16;
            const auto* const from = reinterpret_cast<const uint4*>(weights_.data()) + i * n;
            read_all<<<static_cast<unsigned>(n_processors * 4), 512, 0, stream>>>(
                from, n, reinterpret_cast<std::uint32_t*>(sink_.data()));
        }
        CUDA(cudaStreamEndCapture(stream, &graph));
        CUDA(cudaGraphInstantiate(&exec_, graph, 0));
        CUDA(cudaGraphDestroy(graph));
    }
    ~stand_in() { cudaGraphExecDestroy(exec_); }
    void launch() const { CUDA(cudaGraphLaunch(exec_, stream_)); }

private:
    device_buffer weights_, sink_;
    cudaStream_t stream_;
    cudaGraphExec_t exec_ = nullptr;
};

struct timed_form {
    const char* name;
    row_form form;
    int n_layers;   // 0: all
    bool is_small;  // written to page-locked memory by the kernels
};
const std::vector<timed_form>& timed_forms() {
    static const std::vector<timed_form> all{
        {"logits f32", {row_form::logits, row_form::none, row_form::whole, 0}, 0, false},
        {"logits f16", {row_form::logits, row_form::none, row_form::whole, 1}, 0, false},
        {"probs f32", {row_form::probs, row_form::none, row_form::whole, 0}, 0, false},
        {"mean over heads", {row_form::probs, row_form::mean, row_form::whole, 0}, 0, true},
        {"top 8", {row_form::probs, row_form::none, row_form::top, 0}, 0, true},
        {"16 spans", {row_form::probs, row_form::none, row_form::sums, 0}, 0, true},
        {"logits f32, 1 layer", {row_form::logits, row_form::none, row_form::whole, 0}, 1, false},
    };
    return all;
}

struct shape {
    const char* name;
    int n_layers, n_head, n_head_kv, n_dim;
};

// Keys of all layers and of more slots than a run reads, so that none finds them in the L2 cache.
void time_shape(const shape& model, const key_type& type, int n_columns, int n_slots,
                const stand_in& step, cudaStream_t high, cudaStream_t low) {
    const auto key_bytes = type.bytes_of(model.n_dim) * static_cast<std::size_t>(model.n_head_kv);
    const auto stream_bytes = key_bytes * static_cast<std::size_t>(n_columns);
    const auto slot_bytes = stream_bytes * static_cast<std::size_t>(model.n_layers);
    const int n_sets = static_cast<int>(std::clamp<std::size_t>(
        (std::size_t{400} << 20) / (slot_bytes * static_cast<std::size_t>(n_slots)) + 1, 2, 16));
    const int n_streams = n_sets * n_slots;
    random_source random(7);
    std::vector<std::byte> pool;
    while (pool.size() < (std::size_t{4} << 20)) {
        const auto begin = pool.size(), n = type.bytes_of(model.n_dim);
        pool.resize(begin + n);
        make_key(type, model.n_dim, random, pool.data() + begin);
    }
    const auto n_keys = stream_bytes * static_cast<std::size_t>(n_streams);
    std::vector<std::unique_ptr<device_buffer>> keys;
    std::vector<layer_case> layers(static_cast<std::size_t>(model.n_layers));
    row_step common;
    common.key_type = type.number;
    const auto n_queries = static_cast<std::size_t>(n_streams) * model.n_head * model.n_dim;
    std::vector<float> queries(n_queries);
    for (float& x : queries) x = normal(random);
    const auto n_mask = static_cast<std::size_t>(n_columns);
    device_buffer saved(n_queries * 4 + n_mask * 2);  // all layers have the same queries
    CUDA(cudaMemcpy(saved.data(), queries.data(), n_queries * 4, cudaMemcpyHostToDevice));
    CUDA(cudaMemset(saved.data() + n_queries * 4, 0, n_mask * 2));
    device_buffer pool_there(pool.size());
    CUDA(cudaMemcpy(pool_there.data(), pool.data(), pool.size(), cudaMemcpyHostToDevice));
    for (int il = 0; il < model.n_layers; ++il) {
        keys.push_back(std::make_unique<device_buffer>(n_keys));
        for (std::size_t i = 0; i < n_keys; i += pool.size())
            CUDA(cudaMemcpyAsync(keys.back()->data() + i, pool_there.data(),
                                 std::min(pool.size(), n_keys - i), cudaMemcpyDeviceToDevice, low));
        auto& here = layers[static_cast<std::size_t>(il)];
        here.n_dim = model.n_dim, here.n_head = model.n_head, here.n_head_kv = model.n_head_kv;
        here.n_cells = n_columns;
        row_layer to{};
        to.keys = keys.back()->data();
        to.key_head_stride = type.bytes_of(model.n_dim);
        to.key_cell_stride = key_bytes, to.key_stream_stride = stream_bytes;
        to.query_head_stride = static_cast<std::uint64_t>(model.n_dim) * 4;
        to.query_stream_stride = to.query_head_stride * model.n_head;
        to.mask = n_queries * 4, to.mask_stream_stride = 0, to.mask_is_half = 1;
        to.scale = 1.f / std::sqrt(static_cast<float>(model.n_dim));
        to.n_dim = model.n_dim, to.n_head = model.n_head, to.n_head_kv = model.n_head_kv;
        to.n_cells = n_columns;
        common.layers.push_back(to);
    }
    CUDA(cudaDeviceSynchronize());
    cudaEvent_t start, stop;
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&stop));

    for (const auto& one : timed_forms()) {
        const int n_layers = one.n_layers ? one.n_layers : model.n_layers;
        // A step for each set of slots: the same memory, other keys.
        std::vector<row_step> steps;
        struct whole_copy {
            std::uint64_t from;
            std::size_t n_bytes;
        };
        std::vector<whole_copy> copies;
        std::size_t n_bytes = 0, n_host = 0;
        for (int set = 0; set < n_sets; ++set) {
            auto here = common;
            n_bytes = 0;
            copies.clear();
            const auto take = [&](std::size_t n) {
                const auto begin = n_bytes;
                n_bytes += (n + 255) / 256 * 256;
                return static_cast<std::uint64_t>(begin);
            };
            here.launches.push_back({one.form, 0, static_cast<std::size_t>(n_slots)});
            for (int s = 0; s < n_slots; ++s) {
                job_case job;
                job.stream = set * n_slots + s, job.n_columns = n_columns, job.k = 8;
                for (int il = 0; il < n_layers; ++il) job.layers.push_back(il);
                for (int il = 0; il <= n_layers; ++il) job.ends.push_back(il * model.n_head);
                for (int i = 0; i < 16; ++i)
                    job.spans.push_back({i * n_columns / 16, (i + 1) * n_columns / 16});
                add_job(here, layers, one.form, job, most_heads(type, model.n_dim), take);
                copies.push_back({job.job.out, job.n_out * static_cast<std::size_t>(job.n_values) *
                                                   (one.form.is_half ? 2 : 4)});
            }
            steps.push_back(std::move(here));
        }
        for (const auto& copy : copies) n_host += copy.n_bytes;
        device_buffer memory(n_bytes), table(cuda::table_bytes(steps[0]));
        pinned_buffer table_here(cuda::table_bytes(steps[0])), host(n_host),
            positions(one.form.finish == row_form::top ? n_host : 0);
        if (one.is_small) {
            for (auto& here : steps) {
                std::size_t begin = 0;
                for (std::size_t s = 0; s < here.jobs.size(); begin += copies[s++].n_bytes) {
                    here.jobs[s].block_out = host.data() + begin;
                    if (one.form.finish == row_form::top)
                        here.jobs[s].block_positions = positions.data() + begin;
                }
            }
        }
        const cuda::row_tables tables{table_here.data(), table.data(), cuda::table_bytes(steps[0])};
        std::vector<double> call_us;
        const auto run = [&](int i) {
            const auto& here = steps[static_cast<std::size_t>(i % n_sets)];
            const auto before = std::chrono::steady_clock::now();
            const auto status = cuda::launch_rows(here, tables, saved.data(), memory.data(), low);
            call_us.push_back(
                std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - before)
                    .count());
            check(static_cast<cudaError_t>(status), "launch_rows");
        };
        const auto copy_rows = [&] {
            std::size_t begin = 0;
            for (const auto& copy : copies) {
                CUDA(cudaMemcpyAsync(host.data() + begin, memory.data() + copy.from, copy.n_bytes,
                                     cudaMemcpyDeviceToHost, low));
                begin += copy.n_bytes;
            }
        };
        const auto time_of = [&](bool has_copy) {
            std::vector<float> all;
            constexpr int n_warm = 5, n_runs = 40;
            for (int i = 0; i < n_warm + n_runs; ++i) {
                CUDA(cudaEventRecord(start, low));
                run(i);
                if (has_copy) copy_rows();
                CUDA(cudaEventRecord(stop, low));
                CUDA(cudaEventSynchronize(stop));
                float ms = 0.f;
                CUDA(cudaEventElapsedTime(&ms, start, stop));
                if (i >= n_warm) all.push_back(ms);
            }
            return median(all);
        };
        const float ms = time_of(false), with_copy = one.is_small ? ms : time_of(true);
        const double alone_us = median(call_us);
        // Pairs of steps with and without rows, so that both see the same clocks.
        call_us.clear();
        std::vector<double> with, without;
        constexpr int n_pairs = 16, n_each = 4;
        for (int i = 0; i < 2 * n_pairs + 4; ++i) {
            const bool has_rows = i % 2 == 1;
            const auto before = std::chrono::steady_clock::now();
            for (int j = 0; j < n_each; ++j) {
                if (has_rows) {
                    run(i * n_each + j);
                    if (!one.is_small) copy_rows();
                }
                step.launch();
                CUDA(cudaStreamSynchronize(high));
                CUDA(cudaStreamSynchronize(low));
            }
            const double each =
                std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - before)
                    .count() /
                n_each;
            if (i >= 4) (has_rows ? with : without).push_back(each);
        }
        const double read = static_cast<double>(slot_bytes) * n_slots * n_layers / model.n_layers;
        std::printf("%-4s %-5s %6d %2d  %-20s %8.3f %6.0f %8.3f %6.1f %6.1f  %7.3f %6.3f\n",
                    model.name, type.name, n_columns, n_slots, one.name, ms, read / ms / 1e6,
                    with_copy, alone_us, median(call_us), median(without),
                    median(with) / median(without));
        std::fflush(stdout);
    }
    CUDA(cudaEventDestroy(start));
    CUDA(cudaEventDestroy(stop));
}

int run_times(const run_options& options) {
    int least = 0, greatest = 0;
    CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t high, low;
    CUDA(cudaStreamCreateWithPriority(&high, cudaStreamNonBlocking, greatest));
    CUDA(cudaStreamCreateWithPriority(&low, cudaStreamNonBlocking, least));
    const stand_in step(high);
    std::printf(
        "ms: kernels alone; GB/s: of keys; copied: with the copy to page-locked memory; us: of a "
        "call\n"
        "of launch_rows alone and beside a step; step: ms without rows; ratio: with / without.\n"
        "%-4s %-5s %6s %2s  %-20s %8s %6s %8s %6s %6s  %7s %6s\n",
        "", "keys", "cells", "n", "rows", "ms", "GB/s", "copied", "us", "beside", "step", "ratio");
    const shape dense{"7B", 28, 28, 4, 128}, mla{"MLA", 27, 16, 1, 576};
    const std::vector<int> lengths =
        options.is_quick ? std::vector{4096} : std::vector{1024, 4096, 16384};
    const auto of = [&](const shape& model, int type_at) {
        const auto& type = key_types[static_cast<std::size_t>(type_at)];
        if ((std::string(model.name) + " " + type.name).find(options.only) == std::string::npos)
            return;
        for (const int n : lengths)
            for (const int n_slots : {1, 8}) time_shape(model, type, n, n_slots, step, high, low);
    };
    of(dense, 0);
    of(dense, 3);
    of(mla, 0);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    run_options options;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word == "--quick") {
            options.is_quick = true;
        } else if (word == "--time") {
            options.is_timed = true;
        } else if (word == "--only" && i + 1 < argc) {
            options.only = argv[++i];
        } else if (word == "--seed" && i + 1 < argc) {
            options.seed = static_cast<unsigned>(std::atoi(argv[++i]));
        } else {
            std::printf("usage: row_check [--quick] [--time] [--only WORD] [--seed N]\n");
            return 2;
        }
    }
    std::string why;
    if (!cuda::can_run(why)) {
        std::printf("FAILED: the kernels do not run here: %s\n", why.c_str());
        return 1;
    }
    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, 0));
    std::printf("%s, compute capability %d.%d\n", device.name, device.major, device.minor);
    return options.is_timed ? run_times(options) : run_checks(options);
}
