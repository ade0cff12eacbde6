#include "sched/slot_cache.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "state/ses1.h"

namespace kqview {

namespace {

// The exact mark of a cache with `n_tokens` tokens, the first `n_exact` of them exact.
constexpr std::size_t exact_mark(std::size_t n_exact, std::size_t n_tokens) {
    return n_exact < n_tokens ? n_exact : all_exact;
}

}  // namespace

void slot_cache::set(std::vector<token_id> tokens, std::size_t n_exact) {
    ++n_changes_;
    kept_.drop_after(id_, tokens.size());
    const std::lock_guard lock(readers_);
    tokens_.swap(tokens);
    n_exact_ = exact_mark(n_exact, tokens_.size());
}

void slot_cache::shrink(std::size_t n_keep, std::size_t n_exact) {
    ++n_changes_;
    kept_.drop_after(id_, n_keep);
    const std::lock_guard lock(readers_);
    tokens_.resize(n_keep);
    n_exact_ = exact_mark(n_exact, n_keep);
    edits_.cut(n_keep);
}

// ---- decoding

void slot_cache::make_place(std::size_t n_tokens) {
    const auto n_needed = tokens_.size() + n_tokens;
    if (tokens_.capacity() >= n_needed) return;
    const std::lock_guard lock(readers_);
    tokens_.reserve(std::max(n_needed, 2 * tokens_.capacity()));
}

void slot_cache::append(token_id id, bool is_exact) {
    tokens_.push_back(id);
    if (!is_exact) n_exact_ = 0;
}

void slot_cache::drop_unknown() {
    if (const auto n_left = cut(tokens_.size()); n_left < tokens_.size()) shrink(n_left, n_exact_);
}

// ---- truncate, copy

void slot_cache::truncate(std::size_t n_keep) {
    if (n_keep > tokens_.size()) {
        throw error(errc::request, "n is ", n_keep, ", but the slot has ", tokens_.size(),
                    " tokens");
    }
    if (n_keep < tokens_.size()) shrink(cut(n_keep), n_exact_);
}

std::size_t slot_cache::n_left_by(std::size_t n_keep) const {
    const bool drops_tail = n_keep >= tokens_.size() || !model_.needs_snapshots() ||
                            model_.drops_tail(id_, static_cast<int>(n_keep));
    return drops_tail ? std::min(n_keep, tokens_.size()) : kept_.last_of(id_, n_keep);
}

// Returns how many tokens the model's cache has then.
std::size_t slot_cache::cut(std::size_t n_keep) {
    has_unknown_ = false;
    if (model_.truncate(id_, static_cast<int>(n_keep))) return n_keep;
    if (const auto n_left = kept_.go_back(id_, n_keep); n_left > 0) return n_left;
    model_.truncate(id_, 0);  // dropping everything always works
    return 0;
}

void slot_cache::clear() {
    has_unknown_ = false;
    model_.truncate(id_, 0);
    shrink(0, all_exact);
}

void slot_cache::use(const lora_scales& scales) {
    if (lora_ == scales) return;
    auto copy = scales;
    if (!tokens_.empty()) clear();
    const std::lock_guard lock(readers_);
    lora_.swap(copy);
}

void slot_cache::use(const edit_changes& edits) {
    truncate(std::min(tokens_.size(), edits_.n_agreeing(edits)));
    go_on_with(edits.at(tokens_.size()));
}

void slot_cache::go_on_with(const edit_plan* plan) {
    edits_.use(tokens_.size(), plan ? plan->keys : no_edits);
}

void slot_cache::copy_from(const slot_cache& source, std::size_t n_tokens) {
    shrink(0, all_exact);
    try {
        const auto first = source.tokens_.begin();
        std::vector<token_id> tokens(first, first + static_cast<std::ptrdiff_t>(n_tokens));
        model_.copy(source.id_, id_);  // whole
        kept_.copy(source.id_, id_, n_tokens);
        if (n_tokens < source.size() || source.has_unknown_) tokens.resize(cut(n_tokens));
        set(std::move(tokens), source.n_exact_);
        edits_.copy_from(source.edits_, tokens_.size());
    } catch (...) {
        clear();
        throw;
    }
}

// ---- discard

void slot_cache::discard(std::span<const token_range> gone) {
    if (gone.size() == 1 && gone[0].start + gone[0].n_tokens == tokens_.size()) {
        return truncate(gone[0].start);
    }
    // Allocated before anything changes: there may be no memory for a second copy of the cache.
    const auto n_room_bytes = model_.state_bytes(id_);
    const auto room = std::make_unique_for_overwrite<std::byte[]>(n_room_bytes);
    bool is_done = false;
    try {
        is_done = model_.discard(id_, gone);
        if (is_done) {
            erase_ids(gone);
            // If nothing follows the first range, there is no gap.
            if (tokens_.size() > gone.front().start) close_gaps({room.get(), n_room_bytes});
        }
    } catch (...) {
        clear();
        throw;
    }
    if (is_done) return;
    throw error(errc::unsupported_model,
                "this model's positions cannot be moved; send the ids again");
}

void slot_cache::erase_ids(std::span<const token_range> gone) {
    ++n_changes_;
    kept_.drop_after(id_, gone.front().start);
    const std::lock_guard lock(readers_);
    const auto n_before = gone.front().start;
    std::size_t n_left = 0, at = 0;
    for (const auto& range : gone) {
        for (; at < range.start; ++at) tokens_[n_left++] = tokens_[at];
        at += range.n_tokens;
    }
    for (; at < tokens_.size(); ++at) tokens_[n_left++] = tokens_[at];
    tokens_.resize(n_left);
    n_exact_ = exact_mark(std::min(n_exact_, n_before), n_left);
    edits_.move_up(n_before, n_left);
}

// A column is a cell: tokens must be at their positions, or the next one would fill a gap.
void slot_cache::close_gaps(std::span<std::byte> room) {
    const auto memory = room.first(model_.state_bytes(id_));
    model_.write_state(id_, memory);
    model_.read_state(id_, memory, static_cast<int>(tokens_.size()));
}

void slot_cache::remove(std::span<const token_range> gone) {
    if (gone.empty()) return;
    const auto& last = gone.back();
    if (last.start > tokens_.size() || last.n_tokens > tokens_.size() - last.start) {
        throw error(errc::request, "ranges end at ", last.start + last.n_tokens,
                    ", but the slot has ", tokens_.size(),
                    " tokens; remove only tokens that it has");
    }
    discard(gone);
}

// ---- save, restore

std::size_t slot_cache::save_checkpoints(std::span<std::byte> out) const {
    return write_checkpoints(out, kept_.all_of(id_));
}

std::size_t slot_cache::save(std::span<std::byte> out) {
    const auto memory_at = ses1_header_bytes(tokens_.size());
    const auto n_bytes = memory_at + model_.state_bytes(id_);
    if (out.size() < n_bytes) return n_bytes;
    const auto blob = out.first(n_bytes);
    const auto memory = blob.subspan(memory_at);
    write_ses1_header(blob, tokens_, id_);
    model_.write_state(id_, memory);
    if (tokens_.empty()) return n_bytes;
    const auto& layout = model_.layout_from(id_, memory);
    try {
        const auto view = read_ses1(blob, layout, ses1_source::own);
        if (!view.is_in_order) std::ranges::copy(to_plain(view, layout), memory.begin());
    } catch (const error& failure) {
        throw error(errc::internal, "the cache is not what its ids say: ", failure.what());
    }
    return n_bytes;
}

void slot_cache::restore(std::span<const std::byte> blob, std::size_t n_exact,
                         const lora_scales& lora, std::vector<edit_history::run> edits,
                         std::span<const std::byte> checkpoints) {
    auto scales = lora;  // copied while nothing has changed
    const auto& layout = model_.layout_for(id_, tokens_.empty());
    auto view = read_ses1(blob, layout, ses1_source::foreign);
    const auto kept = read_checkpoints(checkpoints, view.tokens, layout);
    if (view.tokens.empty()) return clear();  // llama.cpp would keep the existing cells
    // A blob that is written as this engine does is not copied.
    const bool is_plain = view.has_one_stream && view.is_in_order;
    const auto plain = is_plain ? std::vector<std::byte>{} : to_plain(view, layout);
    try {
        model_.read_state(id_, is_plain ? view.memory : std::span(plain),
                          static_cast<int>(view.tokens.size()));
    } catch (...) {
        clear();
        throw;
    }
    kept_.drop_after(id_, 0);
    set(std::move(view.tokens), n_exact);
    edits_.set(std::move(edits));
    {
        const std::lock_guard lock(readers_);
        lora_.swap(scales);
    }
    for (const auto& one : kept) kept_.put(id_, one);
}

}  // namespace kqview
