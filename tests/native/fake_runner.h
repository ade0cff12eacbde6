// A model without llama.cpp for the scheduler's tests. The next token is a hash of every token in
// the slot's cache, so that one wrong, missing or doubled token in a slot changes all that follow;
// a captured row is filled with the token that comes of it.
// Owner:   the test keeps the fake_model, the scheduler owns a fake_runner over it.
// Threads: fake_runner on the engine thread, which is checked; fake_model from any thread.
// Never:   asserts: what the scheduler does against the contract of runner.h goes to violations().
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "failing_new.h"
#include "sample/token_picker.h"
#include "sched/runner.h"
#include "state/ses1.h"

namespace kqview::test {

inline constexpr token_id end_token = 2;

inline token_id hash_of(std::span<const token_id> tokens) {
    std::uint32_t hash = 2166136261u;
    for (const token_id id : tokens) hash = (hash ^ static_cast<std::uint32_t>(id)) * 16777619u;
    // A float, as which it travels through logits(), holds 24 bits.
    return static_cast<token_id>(10 + hash % 1'000'000u);
}

// What a cache holds of a token that was computed with these scales.
inline token_id cached(token_id id, const lora_scales& scales) {
    for (const float scale : scales) id += static_cast<token_id>(1000 * scale);
    return id;
}

struct fake_options {
    int n_slots = 1;
    int n_ctx = 256;
    int n_chunk = 8;
    int n_outputs = 1024;
    bool can_truncate = true;
    bool has_snapshots = false;  // a cache that cannot drop its tail has snapshots
    int n_slack = 0;             // so many of the newest tokens it drops, as a ring does
    bool can_save = true;
    bool needs_states = false;  // its guesses are of states that another model told
    int n_predicting = 1;       // layers, each with keys and values of its own
    bool can_split_embedding = false;
    bool can_mix_embeddings = false;
    // The token that follows those of a cache.
    std::function<token_id(std::span<const token_id>)> next = hash_of;
    // May throw; called in the phase that its name says, on the engine thread.
    std::function<void(std::span<const step_token>)> on_decode = [](auto) {};
    std::function<void()> on_want = [] {};
    std::function<void()> on_copy = [] {};
    std::function<void(slot_id)> on_truncate = [](slot_id) {};
    std::function<void()> on_snapshot = [] {};  // written or read
    std::function<void(token_id)> on_pick = [](token_id) {};
    // Of a choice from a step with guesses: does rounding decide it?
    std::function<bool(token_id)> is_tied = [](token_id) { return false; };
    // A decode that throws leaves its tokens in the cache, as llama.cpp does after some failures.
    bool leaves_tokens = false;
    // Bytes that were found sound are refused, as llama.cpp never should.
    bool refuses_state = false;
    // What was decoded, truncated and copied; a run of minutes has too much of it.
    bool keeps_records = true;
};

class fake_model {
public:
    using batch = std::vector<step_token>;

    explicit fake_model(fake_options options)
        : options(std::move(options)),
          caches_(static_cast<std::size_t>(this->options.n_slots)),
          seen_(static_cast<std::size_t>(this->options.n_predicting), caches_) {}

    const fake_options options;

    // Lets `n` decodes pass and holds the ones after them, until the next call.
    void allow(int n) {
        const std::lock_guard lock(mutex_);
        n_allowed_ = n;
        changed_.notify_all();
    }
    void allow_all() { allow(std::numeric_limits<int>::max()); }

    // Blocks until the engine thread is held in a decode; false if that does not come about.
    bool wait_held() {
        return wait([this] { return is_held_; });
    }
    bool wait_decodes(std::size_t n) {
        return wait([&] { return decodes_.size() >= n; });
    }

    // Batches in order, those of decodes that threw included.
    std::vector<batch> decodes() const { return copy(decodes_); }
    std::vector<std::pair<slot_id, int>> truncations() const { return copy(truncations_); }
    std::vector<std::pair<slot_id, slot_id>> copies() const { return copy(copies_); }
    std::vector<token_id> cache(slot_id slot) const {
        return copy(caches_)[static_cast<std::size_t>(slot)];
    }
    std::vector<std::string> violations() const { return copy(violations_); }
    std::size_t n_discards() const { return copy(n_discards_); }
    std::size_t n_snapshots() const { return copy(n_snapshots_); }  // written
    // Grows each time the scheduler looks at a slot that may produce a token.
    std::size_t n_looks() const { return copy(n_looks_); }

private:
    friend class fake_runner;

    template <class value>
    value copy(const value& guarded) const {
        const std::lock_guard lock(mutex_);
        return guarded;
    }

    template <class predicate>
    bool wait(predicate is_true) {
        std::unique_lock lock(mutex_);
        const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(20);
        return changed_.wait_until(lock, deadline, is_true);
    }

    void pass_gate(std::unique_lock<std::mutex>& lock) {
        is_held_ = n_allowed_ == 0;
        changed_.notify_all();
        changed_.wait(lock, [this] { return n_allowed_ > 0; });
        is_held_ = false;
        if (n_allowed_ < std::numeric_limits<int>::max()) --n_allowed_;
    }

    void expect(bool is_true, const std::string& what) {
        if (!is_true) violations_.push_back(what);
    }

    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    int n_allowed_ = std::numeric_limits<int>::max();
    bool is_held_ = false;
    std::vector<std::vector<token_id>> caches_;
    // By layer that predicts, then slot: what it has keys and values of; -1: of a guess.
    std::vector<std::vector<std::vector<token_id>>> seen_;
    std::vector<batch> decodes_;
    std::vector<std::pair<slot_id, int>> truncations_;
    std::vector<std::pair<slot_id, slot_id>> copies_;
    std::vector<std::string> violations_;
    std::size_t n_looks_ = 0;
    std::size_t n_discards_ = 0;
    std::size_t n_snapshots_ = 0;
};

class fake_picker : public token_picker {
public:
    explicit fake_picker(std::shared_ptr<fake_model> model) : model_(std::move(model)) {}

    picked_token pick(float* logits) override {
        const uncounted_allocations guard;
        const auto id = static_cast<token_id>(*logits);
        model_->options.on_pick(id);
        return {id, -0.5f, {{id, -0.5f}}};
    }

    bool is_tied(std::span<const float> logits, float) override {
        return model_->options.is_tied(static_cast<token_id>(logits.front()));
    }

    // Each id picked is the one that follows the cache, so a hash of all text needs no history.
    picked_token propose(std::span<const float> logits, std::optional<float>) override {
        float first = logits.front();
        return pick(&first);
    }
    void revise(std::size_t n_removed, std::span<const token_id> ids) override {
        const uncounted_allocations guard;
        accepted_.resize(accepted_.size() - n_removed);
        accepted_.insert(accepted_.end(), ids.begin(), ids.end());
    }

    // The ids that it believes were generated.
    const std::vector<token_id>& accepted() const { return accepted_; }

private:
    const std::shared_ptr<fake_model> model_;
    std::vector<token_id> accepted_;
};

class fake_runner final : public runner {
public:
    explicit fake_runner(std::shared_ptr<fake_model> model,
                         const std::shared_ptr<fake_model>& draft = nullptr)
        : model_(std::move(model)),
          draft_(draft ? std::make_unique<fake_runner>(draft) : nullptr) {}

    runner* draft_model() override { return draft_.get(); }
    bool needs_states() const override { return model_->options.needs_states; }
    int n_predicting() const override { return model_->options.n_predicting; }
    void predict_with(int i_layer) override { i_layer_ = static_cast<std::size_t>(i_layer); }
    int n_slots() const override { return model_->options.n_slots; }
    int n_ctx() const override { return model_->options.n_ctx; }
    bool has_cache() const override { return true; }
    bool can_take_back() const override { return model_->options.can_truncate; }
    bool can_split_embedding() const override { return model_->options.can_split_embedding; }
    bool can_mix_embeddings() const override { return model_->options.can_mix_embeddings; }
    int n_chunk() const override { return model_->options.n_chunk; }
    int n_vocab() const override { return 1; }
    int n_outputs() const override { return model_->options.n_outputs; }
    bool is_end_of_generation(token_id id) const override { return id == end_token; }
    bool can_truncate() const override {
        const std::lock_guard lock(model_->mutex_);
        ++model_->n_looks_;
        return model_->options.can_truncate;
    }

    void want(const graph_plan& plan) override {
        const uncounted_allocations guard;
        check_thread();
        model_->options.on_want();
        wanted_ = plan;
    }

    void use(const lora_scales& scales) override {
        const uncounted_allocations guard;
        check_thread();
        lora_ = scales;
    }

    step_result decode(std::span<const step_token> tokens, std::span<const step_rows> rows,
                       step_output output) override {
        const bool embeds = output == step_output::embeddings;
        const uncounted_allocations guard;
        check_thread();
        std::unique_lock lock(model_->mutex_);
        if (model_->options.keeps_records)
            model_->decodes_.emplace_back(tokens.begin(), tokens.end());
        check_batch(tokens, embeds);
        embedded_.clear();
        for (std::size_t i = 0; embeds && i < tokens.size(); ++i) {
            if (i == 0 || tokens[i].slot != tokens[i - 1].slot)
                embedded_.push_back({tokens[i].slot, static_cast<int>(i), 0});
            ++embedded_.back().n_tokens;
        }
        model_->pass_gate(lock);
        try {
            model_->options.on_decode(tokens);
        } catch (...) {
            if (model_->options.leaves_tokens) append(tokens);
            throw;
        }
        if (model_->options.n_predicting > 1) see(tokens);
        append(tokens);
        step_.assign(tokens.begin(), tokens.end());
        logits_.assign(tokens.size(), -1.0f);
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            if (tokens[i].wants_logits && output == step_output::logits)
                logits_[i] = static_cast<float>(next_after(tokens[i]));
        }
        for (const auto& row : rows) write(tokens, row);
        return {rows.empty() ? nullptr : rows.front().data, 0};
    }

    float* logits(int i_token) override {
        const auto i = static_cast<std::size_t>(i_token);
        const std::lock_guard lock(model_->mutex_);
        model_->expect(i < logits_.size() && logits_[i] >= 0, "logits of a token that wants none");
        return &logits_.at(i);
    }

    token_id likeliest(int i_token) override { return static_cast<token_id>(*logits(i_token)); }

    // The rank is what the model would go on with after that token, less the one that came.
    token_score score(int i_token, token_id id, int) override {
        const uncounted_allocations guard;
        (void)logits(i_token);
        const std::lock_guard lock(model_->mutex_);
        const auto& last = step_.at(static_cast<std::size_t>(i_token));
        const std::span<const token_id> cache(cache_of(last.slot));
        return {-1.0f, hash_of(cache.first(static_cast<std::size_t>(last.position) + 1)) - id, {}};
    }

    // What the slot would go on with, and how many of its tokens the step had.
    text_embedding embedding(slot_id slot, int i_token, int n_tokens) override {
        check_thread();
        const std::lock_guard lock(model_->mutex_);
        const embedded_run wanted{slot, i_token, n_tokens};
        model_->expect(std::find(embedded_.begin(), embedded_.end(), wanted) != embedded_.end(),
                       "an embedding of another step");
        return {1, {static_cast<float>(next_of(slot)), static_cast<float>(n_tokens)}};
    }

    void copy(slot_id from, slot_id to) override {
        const uncounted_allocations guard;
        check_thread();
        const std::lock_guard lock(model_->mutex_);
        if (model_->options.keeps_records) model_->copies_.emplace_back(from, to);
        model_->options.on_copy();
        cache_of(to) = cache_of(from);
        for (auto& seen : model_->seen_)
            seen.at(static_cast<std::size_t>(to)) = seen.at(static_cast<std::size_t>(from));
    }

    bool truncate(slot_id slot, int n_keep) override {
        const uncounted_allocations guard;
        check_thread();
        model_->options.on_truncate(slot);
        const std::lock_guard lock(model_->mutex_);
        auto& cache = cache_of(slot);
        const auto n = static_cast<std::size_t>(n_keep);
        if (model_->options.keeps_records) model_->truncations_.emplace_back(slot, n_keep);
        if (n >= cache.size()) return true;
        if (!drops(cache, n)) return false;
        cache.resize(n);
        return true;
    }

    // A snapshot is the number of tokens and their hash.
    bool needs_snapshots() const override {
        return model_->options.has_snapshots && !model_->options.can_truncate;
    }
    bool drops_tail(slot_id slot, int n_keep) const override {
        const std::lock_guard lock(model_->mutex_);
        return drops(model_->caches_.at(static_cast<std::size_t>(slot)),
                     static_cast<std::size_t>(n_keep));
    }
    std::size_t snapshot_bytes(slot_id) override { return snapshot_size; }

    void write_snapshot(slot_id slot, std::span<std::byte> out) override {
        const uncounted_allocations guard;
        check_thread();
        model_->options.on_snapshot();
        const std::lock_guard lock(model_->mutex_);
        ++model_->n_snapshots_;
        model_->expect(out.size() == snapshot_size, "room of another size for a snapshot");
        const auto seen = snapshot_of(cache_of(slot));
        std::memcpy(out.data(), &seen, sizeof(seen));
    }

    void read_snapshot(slot_id slot, std::span<const std::byte> bytes, int n_tokens) override {
        const uncounted_allocations guard;
        check_thread();
        model_->options.on_snapshot();
        const std::lock_guard lock(model_->mutex_);
        auto& cache = cache_of(slot);
        const auto n = static_cast<std::size_t>(n_tokens);
        model_->expect(n <= cache.size(), "a snapshot of more tokens than the slot has");
        cache.resize(std::min(n, cache.size()));
        const auto seen = snapshot_of(cache);
        model_->expect(std::memcmp(&seen, bytes.data(), sizeof(seen)) == 0,
                       "a snapshot of other tokens");
    }

    bool discard(slot_id slot, std::span<const token_range> gone) override {
        check_thread();
        const std::lock_guard lock(model_->mutex_);
        if (!model_->options.can_truncate) return false;
        ++model_->n_discards_;
        auto& cache = cache_of(slot);
        std::size_t behind = cache.size();
        for (auto i = gone.size(); i-- > 0;) {
            const auto end = gone[i].start + gone[i].n_tokens;
            model_->expect(gone[i].n_tokens > 0 && end <= behind, "ranges that are no ranges");
            behind = gone[i].start;
            cache.erase(cache.begin() + static_cast<std::ptrdiff_t>(behind),
                        cache.begin() + static_cast<std::ptrdiff_t>(end));
        }
        return true;
    }

    // One cache of one layer, a float each of K and V (the id / 32, exact).
    const kv_layout& layout_from(slot_id, std::span<const std::byte> memory) override {
        check_thread();
        layout_ = learn_layout(
            {&memory, 1}, {1u << 30, static_cast<std::uint32_t>(n_ctx()), std::vector<kv_part>(1)});
        return layout_;
    }

    const kv_layout& layout_for(slot_id slot, bool) override {
        return layout_from(slot, bytes_of({0}, 0));
    }

    std::size_t state_bytes(slot_id slot) override {
        check_thread();
        if (!model_->options.can_save) throw error(errc::unsupported_model, "not saved");
        const std::lock_guard lock(model_->mutex_);
        return bytes_of(cache_of(slot), slot).size();
    }

    void write_state(slot_id slot, std::span<std::byte> out) override {
        const std::lock_guard lock(model_->mutex_);
        const auto bytes = bytes_of(cache_of(slot), slot);
        model_->expect(bytes.size() == out.size(), "a state of another size than it was asked for");
        std::memcpy(out.data(), bytes.data(), std::min(bytes.size(), out.size()));
    }

    void read_state(slot_id slot, std::span<const std::byte> memory, int n_tokens) override {
        check_thread();
        const std::lock_guard lock(model_->mutex_);
        auto& cache = cache_of(slot);
        cache.clear();
        if (model_->options.refuses_state) throw error(errc::internal, "refused");
        const auto n = static_cast<std::size_t>(n_tokens);
        for (std::size_t i = 0; i < n; ++i) {
            float value = 0;
            std::memcpy(&value, memory.subspan(8 + 12 * n + 8 + 12 + 4 * i, 4).data(), 4);
            cache.push_back(static_cast<token_id>(value * 32));
        }
    }

    static constexpr std::size_t snapshot_size = 64;

private:
    bool drops(const std::vector<token_id>& cache, std::size_t n_keep) const {
        const auto n_slack = static_cast<std::size_t>(model_->options.n_slack);
        return n_keep == 0 || model_->options.can_truncate || n_keep + n_slack >= cache.size();
    }
    static std::pair<std::size_t, std::size_t> snapshot_of(const std::vector<token_id>& cache) {
        return {cache.size(), static_cast<std::size_t>(hash_of(cache))};
    }

    std::vector<std::byte> bytes_of(const std::vector<token_id>& cache, slot_id slot) const {
        std::vector<std::byte> bytes;
        const auto put = [&](auto value) {
            const auto* const from = reinterpret_cast<const std::byte*>(&value);
            bytes.insert(bytes.end(), from, from + sizeof(value));
        };
        put(std::uint32_t{1});
        put(static_cast<std::uint32_t>(cache.size()));
        if (cache.empty()) return bytes;
        for (std::size_t i = 0; i < cache.size(); ++i) {
            put(static_cast<std::int32_t>(i));
            put(std::uint32_t{1});
            put(slot);
        }
        put(std::uint32_t{0});
        put(std::uint32_t{1});
        for (int i = 0; i < 2; ++i) {
            put(std::int32_t{0});
            put(std::uint64_t{4});
            for (const auto id : cache) put(static_cast<float>(id) / 32);
        }
        return bytes;
    }

    std::vector<token_id>& cache_of(slot_id slot) {
        return model_->caches_.at(static_cast<std::size_t>(slot));
    }

    token_id next_of(slot_id slot) { return model_->options.next(cache_of(slot)); }
    // Behind a token of the step, whatever else follows it there.
    token_id next_after(const step_token& last) {
        const std::span<const token_id> cache(cache_of(last.slot));
        return model_->options.next(cache.first(static_cast<std::size_t>(last.position) + 1));
    }

    void append(std::span<const step_token> tokens) {
        for (const auto& token : tokens) cache_of(token.slot).push_back(cached(token.id, lora_));
    }

    // A layer has to have seen all that comes before what it computes, as it is.
    void see(std::span<const step_token> tokens) {
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            const auto slot = static_cast<std::size_t>(tokens[i].slot);
            const auto& cache = cache_of(tokens[i].slot);
            auto& seen = model_->seen_.at(i_layer_).at(slot);
            if (i == 0 || tokens[i].slot != tokens[i - 1].slot) {
                model_->expect(std::ranges::mismatch(cache, seen).in1 == cache.end(),
                               "a layer that predicts has not seen the text");
            }
            seen.resize(static_cast<std::size_t>(tokens[i].position));
            seen.push_back(tokens[i].wants_logits ? -1 : tokens[i].id);
        }
    }

    struct embedded_run {
        slot_id slot;
        int i_token;
        int n_tokens;
        bool operator==(const embedded_run&) const = default;
    };

    // Runs of adjacent slots, whose embeddings llama.cpp pools in one ubatch.
    void check_embedded(std::span<const step_token> tokens) {
        std::vector<std::size_t> sizes;
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            const auto& token = tokens[i];
            const bool is_first = i == 0 || token.slot != tokens[i - 1].slot;
            if (is_first) sizes.push_back(0);
            model_->expect(!is_first || i == 0 || token.slot == tokens[i - 1].slot + 1,
                           "embeddings of slots that are not adjacent");
            const auto position = cache_of(token.slot).size() + sizes.back()++;
            model_->expect(token.position == static_cast<std::int32_t>(position),
                           "an embedded token at another position");
        }
        for (const auto n : sizes) {
            model_->expect(n == sizes.front() || model_->options.can_mix_embeddings,
                           "embeddings of different lengths");
        }
        model_->expect(tokens.size() <= static_cast<std::size_t>(n_chunk()),
                       "a batch that is too large");
    }

    // One ubatch of llama.cpp: one token each of adjacent slots, or runs of one length.
    void check_batch(std::span<const step_token> tokens, bool embeds) {
        if (embeds) return check_embedded(tokens);
        model_->expect(!tokens.empty(), "an empty batch");
        // Runs of one length, of adjacent slots.
        const auto n_run = static_cast<std::size_t>(
            std::count_if(tokens.begin(), tokens.end(),
                          [&](const auto& token) { return token.slot == tokens[0].slot; }));
        const bool is_run = n_run > 1;
        model_->expect(tokens.size() % n_run == 0, "runs of other lengths");
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            const auto& token = tokens[i];
            const auto slot = tokens[0].slot + static_cast<slot_id>(i / n_run);
            const auto position = cache_of(token.slot).size() + i % n_run;
            model_->expect(token.slot == slot, "a batch of slots that are not adjacent");
            model_->expect(token.position == static_cast<std::int32_t>(position),
                           "position " + std::to_string(token.position) + " follows " +
                               std::to_string(position) + " cached tokens");
            model_->expect(token.position < model_->options.n_ctx, "a token beyond the slot");
        }
        model_->expect(tokens.size() <= static_cast<std::size_t>(is_run ? n_chunk() : n_slots()),
                       "a batch that is too large");
        const auto n_outputs = std::count_if(tokens.begin(), tokens.end(),
                                             [](const auto& token) { return token.wants_logits; });
        model_->expect(!is_run || n_outputs <= model_->options.n_outputs, "too many logits");
    }

    void write(std::span<const step_token> tokens, const step_rows& row) {
        const auto& query = tokens[static_cast<std::size_t>(row.i_token)];
        const auto n_queries = static_cast<std::size_t>(row.layout.n_queries);
        model_->expect(n_queries > 1 || query.wants_logits || row.layout.n_columns > 0,
                       "rows of a token that is not sampled");
        model_->expect(row.i_token + row.layout.n_queries <= static_cast<int>(tokens.size()),
                       "rows of queries that are not in the batch");
        const auto queries = tokens.subspan(static_cast<std::size_t>(row.i_token), n_queries);
        const auto is_output = [](const step_token& one) { return one.wants_logits; };
        model_->expect(
            !row.plan->needs_outputs() || std::all_of(queries.begin(), queries.end(), is_output),
            "the last layer's states of tokens without logits");
        model_->expect(row.n_visible == query.position + 1, "rows that do not end at their query");
        for (const auto& layer : row.plan->layers()) {
            model_->expect(wanted_.wants(layer.il, row.plan->kind()),
                           "rows that no graph provides");
        }
        const auto mark = next_after(queries.back());
        const auto n_bytes = row.layout.size_bytes;
        for (std::size_t at = 0; at + sizeof mark <= n_bytes; at += sizeof mark) {
            std::memcpy(row.data + at, &mark, sizeof mark);
        }
    }

    void check_thread() {
        if (engine_thread_ == std::thread::id{}) engine_thread_ = std::this_thread::get_id();
        const std::lock_guard lock(model_->mutex_);
        model_->expect(engine_thread_ == std::this_thread::get_id(), "a call on another thread");
    }

    const std::shared_ptr<fake_model> model_;
    const std::unique_ptr<fake_runner> draft_;
    graph_plan wanted_;
    std::size_t i_layer_ = 0;
    kv_layout layout_;
    std::vector<step_token> step_;
    std::vector<float> logits_;
    std::vector<embedded_run> embedded_;  // of the last step, if it embedded
    lora_scales lora_;
    std::thread::id engine_thread_;
};

}  // namespace kqview::test
