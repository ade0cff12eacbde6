#include "sample/logit_scan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>

#include "base/error.h"
#include "base/vector_exp.h"

namespace kqview {
namespace {

// The target's vector register as a type of gcc and clang: the same arithmetic on a few numbers at
// once. Compilers do not vectorise plain loops on every target that wheels are built for, and types
// wider than the register compile to slow code.
#if defined(__AVX__)
constexpr std::size_t n_lanes = 8;
#else
constexpr std::size_t n_lanes = 4;
#endif

using float_lanes = float __attribute__((vector_size(n_lanes * sizeof(float))));
using int_lanes = std::int32_t __attribute__((vector_size(n_lanes * sizeof(std::int32_t))));

float_lanes load(const float* from) {
    float_lanes to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

float_lanes larger(float_lanes a, float_lanes b) { return b > a ? b : a; }

constexpr float minus_inf = -std::numeric_limits<float>::infinity();
constexpr std::size_t block_size = 128;
// exp_nonpositive() is constant below it; 0 * -inf of a probability and its log must not arise.
constexpr float lowest_exponent = -87.0F;

// The maximum of a full block; `unordered` gets a bit for every NaN.
float scan_block(const float* x, int_lanes& unordered) {
    // Two accumulators: an instruction need not wait for the previous one.
    float_lanes largest_even = load(x);
    float_lanes largest_odd = load(x + n_lanes);
    int_lanes nan_even = largest_even != largest_even;
    int_lanes nan_odd = largest_odd != largest_odd;
    for (std::size_t i = 2 * n_lanes; i < block_size; i += 2 * n_lanes) {
        const float_lanes even = load(x + i);
        const float_lanes odd = load(x + i + n_lanes);
        largest_even = larger(largest_even, even);
        largest_odd = larger(largest_odd, odd);
        nan_even |= even != even;
        nan_odd |= odd != odd;
    }
    unordered |= nan_even | nan_odd;
    const float_lanes largest = larger(largest_even, largest_odd);
    float result = largest[0];
    for (std::size_t i = 1; i < n_lanes; ++i) result = std::max(result, largest[i]);
    return result;
}

bool is_better(const scored_token& a, const scored_token& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// What a softmax divides by, in logs, and the entropy of its probabilities.
struct softmax_sums {
    double log_sum = 0.0;
    double entropy = 0.0;
};

// Of n finite or -inf logits with maximum `max`. Relative error of the sums below 1e-6:
// exponentials in float32, summed in blocks into a double.
softmax_sums sums_of(const float* logits, std::int32_t n, float max) {
    // Every logit is -inf: there is nothing to normalise.
    if (!(max >= std::numeric_limits<float>::lowest())) return {};

    constexpr std::size_t n_sum_block = 256 * n_lanes;  // 256 float additions between doubles
    const auto count = static_cast<std::size_t>(n);
    double sum = 0.0;
    double weighted = 0.0;  // sum of exp(x) * x, x relative to the maximum
    for (std::size_t begin = 0; begin < count; begin += n_sum_block) {
        const std::size_t end = std::min(count, begin + n_sum_block);
        float_lanes total{};
        float_lanes total_weighted{};
        const auto add = [&](float_lanes some) {
            const float_lanes x = larger(float_lanes{} + lowest_exponent, some - max);
            const float_lanes one = exp_nonpositive(x);
            total += one;
            total_weighted += one * x;
        };
        std::size_t i = begin;
        for (; i + n_lanes <= end; i += n_lanes) add(load(logits + i));
        if (i < end) {
            float rest[n_lanes];
            std::fill(std::begin(rest), std::end(rest), minus_inf);
            std::copy(logits + i, logits + end, rest);
            add(load(rest));
        }
        for (std::size_t j = 0; j < n_lanes; ++j) {
            sum += static_cast<double>(total[j]);
            weighted += static_cast<double>(total_weighted[j]);
        }
    }
    const double log_sum = std::log(sum);
    return {static_cast<double>(max) + log_sum, log_sum - weighted / sum};
}

}  // namespace

void logit_scan::read(const float* logits, std::int32_t n) {
    logits_ = logits;
    n_ = static_cast<std::size_t>(n);
    const std::size_t n_full = n_ / block_size;
    const std::size_t n_rest = n_ % block_size;
    block_max_.resize(n_full + (n_rest > 0 ? 1 : 0));

    int_lanes unordered{};
    for (std::size_t i = 0; i < n_full; ++i) {
        block_max_[i] = scan_block(logits_ + i * block_size, unordered);
    }
    bool has_nan = false;
    for (std::size_t i = 0; i < n_lanes; ++i) has_nan |= unordered[i] != 0;
    if (n_rest > 0) {
        float largest = minus_inf;
        for (std::size_t i = n_full * block_size; i < n_; ++i) {
            largest = std::max(largest, logits_[i]);
            has_nan |= logits_[i] != logits_[i];
        }
        block_max_[n_full] = largest;
    }
    if (has_nan) {
        throw error(errc::decode,
                    "the logits contain NaN; check the model file and its quantization");
    }
    max_ = minus_inf;
    for (const float value : block_max_) max_ = std::max(max_, value);
    if (max_ == std::numeric_limits<float>::infinity()) {
        throw error(errc::decode,
                    "the logits contain infinity; check the model file, and logit_bias if given");
    }
}

token_id logit_scan::argmax() const {
    const auto block = std::find(block_max_.begin(), block_max_.end(), max_);
    const float* first =
        logits_ + static_cast<std::size_t>(block - block_max_.begin()) * block_size;
    return static_cast<token_id>(std::find(first, logits_ + n_, max_) - logits_);
}

std::int32_t logit_scan::rank(token_id id) const {
    const float own = logits_[id];
    const auto i_own = static_cast<std::size_t>(id);
    std::int32_t n_better = 0;
    for (std::size_t i = 0; i < i_own; ++i) n_better += logits_[i] >= own;
    for (std::size_t i = i_own + 1; i < n_; ++i) n_better += logits_[i] > own;
    return n_better;
}

void logit_scan::top(std::int32_t k, std::vector<scored_token>& out) {
    out.clear();
    if (k <= 0) return;
    const auto n_top = static_cast<std::size_t>(k);

    // k blocks hold a logit of at least the k-th largest block maximum, so all of the top do too.
    float threshold = std::numeric_limits<float>::lowest();
    if (n_top < block_max_.size()) {
        ranked_ = block_max_;
        const auto kth = ranked_.begin() + (k - 1);
        std::nth_element(ranked_.begin(), kth, ranked_.end(), std::greater<>());
        threshold = std::max(threshold, *kth);
    }
    for (std::size_t i = 0; i < block_max_.size(); ++i) {
        if (block_max_[i] < threshold) continue;
        const std::size_t end = std::min(n_, (i + 1) * block_size);
        for (std::size_t id = i * block_size; id < end; ++id) {
            if (logits_[id] >= threshold) {
                out.push_back({static_cast<token_id>(id), logits_[id]});
            }
        }
    }
    if (out.size() > n_top) {
        std::nth_element(out.begin(), out.begin() + (k - 1), out.end(), is_better);
        out.resize(n_top);
    }
    std::sort(out.begin(), out.end(), is_better);
}

void logprob_scan::read(const float* logits, std::int32_t n, std::int32_t n_top) {
    scan_.read(logits, n);
    scan_.top(n_top, top_);
    const auto sums = sums_of(logits, n, scan_.max());
    log_sum_ = sums.log_sum;
    entropy_ = sums.entropy;
}

std::vector<std::pair<token_id, float>> logprob_scan::top() const {
    std::vector<std::pair<token_id, float>> result;
    result.reserve(top_.size());
    for (const scored_token& token : top_) result.emplace_back(token.id, of(token.logit));
    return result;
}

}  // namespace kqview
