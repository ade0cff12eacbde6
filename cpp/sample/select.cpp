#include "sample/select.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "base/error.h"
#include "sample/lanes.h"

namespace kqview {
namespace {

constexpr float minus_inf = -std::numeric_limits<float>::infinity();
constexpr std::size_t block_size = 128;

// The largest of a full block; `unordered` keeps a bit of every NaN that was seen.
float scan_block(const float* x, int_lanes& unordered) {
    // Two of each: an instruction need not wait for the one before it.
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

}  // namespace kqview
