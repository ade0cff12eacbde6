#include "sched/reuse_plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

namespace kqview {

namespace {

using ids = std::vector<token_id>;

constexpr std::size_t nowhere = std::numeric_limits<std::size_t>::max();
// Places in the cache that are followed at once for one place in the prompt.
constexpr std::size_t n_active_max = 32;

// Maps the hash of each run of n tokens to its places in a sequence; the caller compares the
// tokens.
class run_index {
public:
    run_index(std::span<const token_id> tokens, std::size_t first, std::size_t n) {
        each_hash(tokens, first, n,
                  [&](std::uint64_t hash, std::size_t at) { places_.emplace_back(hash, at); });
        std::sort(places_.begin(), places_.end());
    }

    // Calls `use(hash, place)` for each run of n tokens from `first` on.
    template <class function>
    static void each_hash(std::span<const token_id> tokens, std::size_t first, std::size_t n,
                          function use) {
        if (tokens.size() < first + n) return;
        std::uint64_t hash = 0, power = 1;
        for (std::size_t i = 0; i < n; ++i) {
            hash = hash * base + value(tokens[first + i]);
            if (i > 0) power *= base;
        }
        use(hash, first);
        for (auto at = first + 1; at + n <= tokens.size(); ++at) {
            hash = (hash - value(tokens[at - 1]) * power) * base + value(tokens[at + n - 1]);
            use(hash, at);
        }
    }

    // Places of runs with this hash, from `first` on, in order.
    std::span<const std::pair<std::uint64_t, std::size_t>> find(std::uint64_t hash,
                                                                std::size_t first) const {
        const auto begin = std::lower_bound(places_.begin(), places_.end(), std::pair(hash, first));
        const auto end = std::lower_bound(begin, places_.end(), std::pair(hash, nowhere));
        return {begin, end};
    }

private:
    static constexpr std::uint64_t base = 0x9e3779b97f4a7c15;
    static std::uint64_t value(token_id id) { return static_cast<std::uint64_t>(id) + 1; }

    std::vector<std::pair<std::uint64_t, std::size_t>> places_;
};

// prompt[start ..] == cached[start + offset ..], up to the current place of the search.
struct run {
    std::size_t offset;
    std::size_t start;
};

// Scans the prompt once. For each place, `cached_end` is the shortest prefix of the cache that can
// produce the prompt up to there: using less of the cache leaves more for the rest.
class run_search {
public:
    run_search(const ids& cached, const ids& prompt, std::size_t n_prefix, std::size_t n_run_min)
        : cached_(cached),
          prompt_(prompt),
          n_prefix_(n_prefix),
          n_run_min_(n_run_min),
          // A run that begins earlier also covers this place.
          first_(n_prefix + 1 > n_run_min ? n_prefix + 1 - n_run_min : 0),
          last_run_(prompt.size() + 1) {}

    // The last place up to which the cache can produce the prompt.
    std::size_t search() {
        const run_index index(cached_, first_, n_run_min_);
        std::vector<std::uint64_t> hashes(prompt_.size() + 1, 0);
        run_index::each_hash(prompt_, first_, n_run_min_,
                             [&](std::uint64_t hash, std::size_t at) { hashes[at] = hash; });
        std::size_t best = n_prefix_;
        for (auto at = first_; at <= prompt_.size(); ++at) {
            const auto cached_end = reach(at);
            if (cached_end != nowhere) {
                best = std::max(best, at);
                if (at + n_run_min_ <= prompt_.size())
                    begin_runs(index, hashes[at], at, cached_end);
            }
            if (at == prompt_.size()) break;
            std::erase_if(active_, [&](const run& one) {
                const auto next = at + one.offset;
                return next >= cached_.size() || cached_[next] != prompt_[at];
            });
        }
        return best;
    }

    // The run that ends at a place which search() has reached after the prefix.
    const run& run_to(std::size_t place) const { return last_run_[place]; }

private:
    std::size_t reach(std::size_t at) {
        if (at <= n_prefix_) return at;
        std::size_t cached_end = nowhere;
        for (const auto& one : active_) {
            if (at - one.start < n_run_min_ || at + one.offset >= cached_end) continue;
            cached_end = at + one.offset;
            last_run_[at] = one;
        }
        return cached_end;
    }

    void begin_runs(const run_index& index, std::uint64_t hash, std::size_t at,
                    std::size_t cached_end) {
        for (const auto& [same_hash, place] : index.find(hash, cached_end)) {
            if (active_.size() == n_active_max) return;
            const auto offset = place - at;
            const bool is_known = std::any_of(active_.begin(), active_.end(),
                                              [&](const run& one) { return one.offset == offset; });
            if (!is_known) active_.push_back({offset, at});
        }
    }

    const ids& cached_;
    const ids& prompt_;
    const std::size_t n_prefix_;
    const std::size_t n_run_min_;
    const std::size_t first_;
    std::vector<run> active_;
    std::vector<run> last_run_;
};

}  // namespace

std::size_t reuse_plan::n_kept() const {
    return std::accumulate(
        runs.begin(), runs.end(), std::size_t{0},
        [](std::size_t sum, const token_range& one) { return sum + one.n_tokens; });
}

std::size_t reuse_plan::n_prefix() const {
    return runs.empty() || runs.front().start > 0 ? 0 : runs.front().n_tokens;
}

reuse_plan plan_prefix(const ids& cached, const ids& prompt) {
    const auto n = common_prefix(cached, prompt);
    return n > 0 ? reuse_plan{{{0, n}}} : reuse_plan{};
}

reuse_plan plan_shift(const ids& cached, const ids& prompt, std::size_t n_run_min) {
    auto plan = plan_prefix(cached, prompt);
    const auto n_prefix = plan.n_prefix();
    if (cached.size() == n_prefix || prompt.size() == n_prefix) return plan;
    run_search found(cached, prompt, n_prefix, n_run_min);
    std::vector<token_range> runs;  // last one first
    for (auto end = found.search(); end > n_prefix;) {
        const auto& one = found.run_to(end);
        // The prefix itself is exact: no run replaces a part of it.
        const auto start = std::max(one.start, n_prefix);
        runs.push_back({start + one.offset, end - start});
        end = start;
    }
    plan.runs.insert(plan.runs.end(), runs.rbegin(), runs.rend());
    return plan;
}

void cut(reuse_plan& plan, std::size_t n_kept) {
    for (std::size_t i = 0; i < plan.runs.size(); ++i) {
        auto& one = plan.runs[i];
        if (one.n_tokens < n_kept) {
            n_kept -= one.n_tokens;
            continue;
        }
        one.n_tokens = n_kept;
        plan.runs.resize(n_kept > 0 ? i + 1 : i);
        return;
    }
}

std::vector<token_range> gaps_of(const reuse_plan& plan, std::size_t n_cached) {
    std::vector<token_range> gaps;
    std::size_t end = 0;
    for (const auto& one : plan.runs) {
        if (one.start > end) gaps.push_back({end, one.start - end});
        end = one.start + one.n_tokens;
    }
    if (n_cached > end) gaps.push_back({end, n_cached - end});
    return gaps;
}

}  // namespace kqview
