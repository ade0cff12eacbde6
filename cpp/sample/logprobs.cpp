#include "sample/logprobs.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "sample/lanes.h"

namespace kqview {
namespace {

// exp(x) for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2], about 2 units in the last
// place. Below -87 it stays at 1.6e-38, which no sum that holds exp(0) can notice.
float_lanes exp_of_negative(float_lanes x) {
    constexpr float log2_e = 1.44269504F;
    constexpr float ln2_high = 0.693359375F;  // few digits, so that n * ln2_high is exact
    constexpr float ln2_low = -2.12194440e-4F;
    constexpr float to_integer = 12582912.0F;  // 1.5 * 2^23: adding it rounds to a whole number

    x = larger(x, float_lanes{} - 87.0F);
    const float_lanes shifted = x * log2_e + to_integer;
    const float_lanes n = shifted - to_integer;
    const float_lanes r = (x - n * ln2_high) - n * ln2_low;
    float_lanes poly = r * 1.9875691500e-4F + 1.3981999507e-3F;
    poly = poly * r + 8.3334519073e-3F;
    poly = poly * r + 4.1665795894e-2F;
    poly = poly * r + 1.6666665459e-1F;
    poly = poly * r + 5.0000001201e-1F;
    poly = poly * r * r + r + 1.0F;
    int_lanes bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    float_lanes power;
    std::memcpy(&power, &bits, sizeof power);
    return poly * power;
}

}  // namespace

double log_sum_exp(const float* logits, std::int32_t n, float max) {
    // Every logit is -inf: there is nothing to normalise.
    if (!(max >= std::numeric_limits<float>::lowest())) return 0.0;

    constexpr std::size_t block_size = 256 * n_lanes;  // 256 float additions between doubles
    const auto count = static_cast<std::size_t>(n);
    double sum = 0.0;
    for (std::size_t begin = 0; begin < count; begin += block_size) {
        const std::size_t end = std::min(count, begin + block_size);
        float_lanes total{};
        std::size_t i = begin;
        for (; i + n_lanes <= end; i += n_lanes) total += exp_of_negative(load(logits + i) - max);
        if (i < end) {
            float rest[n_lanes];
            std::fill(std::begin(rest), std::end(rest), std::numeric_limits<float>::lowest());
            std::copy(logits + i, logits + end, rest);
            total += exp_of_negative(load(rest) - max);
        }
        for (std::size_t j = 0; j < n_lanes; ++j) sum += static_cast<double>(total[j]);
    }
    return static_cast<double>(max) + std::log(sum);
}

void logprob_scan::read(const float* logits, std::int32_t n, std::int32_t n_top) {
    scan_.read(logits, n);
    scan_.top(n_top, top_);
    log_sum_ = log_sum_exp(logits, n, scan_.max());
}

std::vector<std::pair<token_id, float>> logprob_scan::top() const {
    std::vector<std::pair<token_id, float>> result;
    result.reserve(top_.size());
    for (const scored_token& token : top_) result.emplace_back(token.id, of(token.logit));
    return result;
}

}  // namespace kqview
