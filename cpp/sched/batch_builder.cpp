#include "sched/batch_builder.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include "base/error.h"

namespace kqview {

namespace {

// How long prompts wait for others before they begin, at most.
constexpr std::chrono::milliseconds lone_wait{5};               // one, for a second
constexpr std::chrono::milliseconds company_wait{8};            // several, after the last that came
constexpr std::chrono::milliseconds longest_company_wait{100};  // in all
constexpr int company_share = 100;  // and no more than this part, 1/100, of the time that they take
// Decode steps in a row with one set of LoRA scales while slots with others wait: a change makes
// llama.cpp build its graphs anew, which may take as long as a step.
constexpr int n_steps_alike = 4;
// Prompts that go through the model together have at most this many tokens left in all: those of
// longer ones would all wait for the last of them.
constexpr std::size_t n_cohort_tokens = 2048;
constexpr std::size_t n_each_min = 16;                // of each of them in one step, if it has more
constexpr std::size_t n_blocks_of_budget = 4;         // for prompt rows
constexpr std::chrono::hours longest_wait{24 * 365};  // well within the clock's range

// Layout of the rows of prompt tokens, the last of which sees all columns.
row_layout prompt_layout(const request& active, int n_rows) {
    return active.capture->layout(static_cast<int>(active.prompt.size()), n_rows, false);
}

bool needs_outputs(const request& active) {
    return active.capture && active.capture->needs_outputs();
}

// Not with a recurrent state: llama.cpp's graph of plamo2 takes the tokens of one prompt for those
// of another.
bool can_mix_prompts(const runner& model) { return !model.has_cache() || model.can_truncate(); }

// Nodes of a device that read rows are for one run, or for one token of each slot.
bool can_share_prompts(const runner& model, const slot_table& slots) {
    return can_mix_prompts(model) && model.has_cache() && model.is_causal() &&
           (model.reads_on_host() || std::none_of(slots.begin(), slots.end(), [](const slot& one) {
                return one.active && one.active->capture;
            }));
}

// Whether its prompt may go through the model together with others: not if it has rows itself, nor
// if it is scored. Quantised weights give other logits in larger steps (0.6 nats were seen with
// Q4_1, where a token is unlikely), and scores are the same in any number of slots.
bool may_share(const slot& one) {
    return one.is_in_prompt() && !one.fork && one.text.empty() && !one.active->embeds &&
           !one.active->is_alone && one.active->n_scores == 0 && one.n_prompt_rows == 0;
}

// True if another slot generates, and so waits for this one's prompt.
bool is_shared_step(const slot_table& slots, const slot& target) {
    if (target.active->is_alone) return false;
    return std::any_of(slots.begin(), slots.end(), [&](const slot& one) {
        return one.id() != target.id() &&
               (one.state == slot_state::decode || one.state == slot_state::sampling ||
                one.state == slot_state::steered);
    });
}

// Says which of the part's tokens, the last of the prompt, have their rows captured, and takes
// fewer tokens where a step cannot give the rows of all: those would fill more than a fraction of
// the pool, so that a consumer can hold some blocks while others are filled, or want more of the
// last layer's output than a step has.
void fit_rows(batch_part& part, const runner& model, const block_pool& pool) {
    const auto& target = *part.target;
    const auto& active = *target.active;
    // Number of tokens before the first one with captured rows.
    const auto n_before =
        std::max(0, static_cast<int>(target.prompt().size()) - target.n_prompt_rows -
                        static_cast<int>(target.cache.size()));
    part.n_rows = std::max(0, part.n_tokens - n_before);
    const auto row_bytes = std::max<std::size_t>(1, prompt_layout(active, 1).size_bytes);
    auto n_rows_max = std::min(pool.stats().budget_bytes / n_blocks_of_budget / row_bytes,
                               static_cast<std::size_t>(model.n_prompt_rows()));
    if (needs_outputs(active)) {
        n_rows_max = std::min(n_rows_max, static_cast<std::size_t>(model.n_outputs()));
    }
    if (!model.has_cache() || static_cast<std::size_t>(part.n_rows) <= n_rows_max) return;
    part.n_rows = std::max(1, static_cast<int>(n_rows_max));
    part.n_tokens = n_before + part.n_rows;
}

// Takes a block for the row of a likely answer. What may turn out to be for nothing takes none that
// another slot might need.
bool take_rows_ahead(block_pool& pool, std::size_t n_slots, slot& target) {
    const auto& plan = target.active->capture;
    if (!plan || target.rows.block) return true;
    const auto layout = plan->layout(static_cast<int>(target.cache.size()) + 1);
    const auto stats = pool.stats();
    const auto n_wanted = (1 + n_slots) * block_pool::block_bytes(layout.size_bytes);
    if (stats.leased_bytes + n_wanted > stats.budget_bytes) return false;
    bool is_coming = false;
    auto block = pool.try_take(layout.size_bytes, &is_coming);
    if (!block) return false;
    target.rows = {std::move(block), plan, layout, nullptr};
    return true;
}

}  // namespace

bool batch_builder::fill() {
    step_.tokens.clear();
    step_.rows.clear();
    step_.parts.clear();
    step_.n_guessed = 0;
    ++n_fills_;
    const auto now = clock::now();
    if (is_prefill_) texts_until_ = delays_others_ ? now + (now - filled_) : now;
    filled_ = now;
    if ((is_prefill_ || now < texts_until_) && fill_decode()) return true;
    // A prompt whose cells were copied from another slot may have but its last token left.
    if (fill_prefill() || fill_decode()) return true;
    delays_others_ = false;  // what follows is a wait, and no prompt's step
    return false;
}

// Owners take turns; an owner's prompts go in the order in which they came to their slots.
bool batch_builder::fill_prefill() {
    order_.clear();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        if (slots_[i].active) order_.push_back(i);
    }
    std::sort(order_.begin(), order_.end(), [this](std::size_t left, std::size_t right) {
        const auto turn = [this](std::size_t i) {
            return std::tuple(slots_[i].active->share->last_chunk, slots_[i].started, i);
        };
        return turn(left) < turn(right);
    });
    for (const auto first : order_) {
        if (!slots_[first].active) continue;  // ended while another one was tried
        plan_cohort(first);
        if (try_add(slots_[first], &batch_builder::add_prompt)) {
            for (auto i = first + 1; i < slots_.size(); ++i) {
                if (may_join(slots_[i])) try_add(slots_[i], &batch_builder::add_prompt);
            }
            is_prefill_ = true;
            const auto* const share = slots_[first].active->share.get();
            delays_others_ = std::any_of(slots_.begin(), slots_.end(), [&](const slot& one) {
                return one.is_generating() && one.active->share.get() != share;
            });
        }
        n_each_ = 0;
        if (!step_.tokens.empty()) return true;
    }
    return false;
}

// Which prompts go through the model together with the first one, and how many tokens of each.
// Texts that begin together then go on in steps of all of them, and none waits for another one's
// prompt.
void batch_builder::plan_cohort(std::size_t first) {
    n_each_ = 0;
    end_of_cohort_ = first + 1;
    if (!can_share_prompts(model_, slots_) || !may_share(slots_[first])) return;
    const auto n_left = [](const slot& one) { return one.n_in_chunks() - one.cache.size(); };
    const auto n_step = static_cast<std::size_t>(is_shared_step(slots_, slots_[first])
                                                     ? costs_.n_between(model_.n_chunk())
                                                     : model_.n_chunk());
    // What cuts the prompt of one cuts the step of all: their chunks are equal.
    const auto n_next = [&](const slot& one) {
        return std::min(n_left(one), static_cast<std::size_t>(one.n_to_cut()));
    };
    auto n_least = n_next(slots_[first]);
    auto n_sum = n_left(slots_[first]);
    for (auto i = first + 1; i < slots_.size() && may_share(slots_[i]); ++i) {
        n_sum += n_left(slots_[i]);
        n_least = std::min(n_least, n_next(slots_[i]));
        const bool is_worth = n_step / (i + 1 - first) >= std::min(n_least, n_each_min);
        if (slots_[i].cache.lora() != slots_[first].cache.lora() || n_sum > n_cohort_tokens ||
            !is_worth) {
            break;
        }
        n_each_ = static_cast<int>(std::min(n_least, n_step / (i + 1 - first)));
        end_of_cohort_ = i + 1;
    }
}

std::optional<batch_builder::clock::time_point> batch_builder::company_until() {
    std::size_t n_prompts = 0, n_tokens = 0;
    bool has_begun = false;
    for (const auto& one : slots_) {
        if (!one.active) continue;
        has_begun |=
            !may_share(one) || one.cache.size() > static_cast<std::size_t>(one.usage.cached_tokens);
        ++n_prompts;
        n_tokens += has_begun ? 0 : one.n_in_chunks() - one.cache.size();
    }
    if (n_prompts == 0 || has_begun || n_prompts == slots_.size() ||
        !can_share_prompts(model_, slots_)) {
        n_gathered_ = 0;
        return {};
    }
    const auto now = clock::now();
    if (n_gathered_ == 0) first_came_ = now;
    if (n_prompts > n_gathered_) last_came_ = now;
    n_gathered_ = n_prompts;
    const auto worth =
        std::chrono::duration_cast<clock::duration>(costs_.of_prompt(n_tokens)) / company_share;
    const auto until = std::min(
        last_came_ + std::min<clock::duration>(n_prompts > 1 ? company_wait : lone_wait, worth),
        first_came_ + std::min<clock::duration>(longest_company_wait, worth));
    return now < until ? std::optional(until) : std::nullopt;
}

// Prompts share a step if they were planned to, or if they are embedded: those that end with the
// step, and that llama.cpp pools alike.
bool batch_builder::may_join(slot& target) const {
    if (!target.active) return false;
    const auto& before = step_.parts.back();
    const bool is_adjacent = target.id() == before.target->id() + 1;
    if (n_each_ > 0) {
        return is_adjacent && static_cast<std::size_t>(target.id()) < end_of_cohort_;
    }
    if (!target.active->embeds || !target.is_in_prompt()) return false;
    const auto part = next_chunk(target);
    return can_mix_prompts(model_) && before.ends_embedding() && part.ends_embedding() &&
           static_cast<int>(step_.tokens.size()) + part.n_tokens <= model_.n_chunk() &&
           target.cache.lora() == before.target->cache.lora() &&
           (!model_.has_cache() || is_adjacent) &&
           (model_.can_mix_embeddings() || part.n_tokens == before.n_tokens);
}

// Slots with different LoRA scales never share a step: those of one take a turn of a few steps,
// then a slot with others has waited longest.
bool batch_builder::fill_decode() {
    if (n_left_ > 0 && fill_decode(&slots_[i_leader_].cache.lora())) {
        --n_left_;
        return true;
    }
    if (!fill_decode(nullptr)) return false;
    const auto& leader = *step_.parts.front().target;
    i_leader_ = static_cast<std::size_t>(leader.id());
    const bool is_mixed = std::any_of(slots_.begin(), slots_.end(), [&](const slot& one) {
        return one.active && one.cache.lora() != leader.cache.lora();
    });
    n_left_ = is_mixed ? n_steps_alike - 1 : 0;
    return true;
}

// The slot that has waited longest for a token, and the ready slots on both sides of it without a
// gap: none is left out, whatever arrives. `only`: slots with these scales; null: any, but those of
// one step alike. Guesses are behind tokens that are decided on.
bool batch_builder::fill_decode(const lora_scales* only) {
    const bool has_guesses = std::ranges::any_of(
        slots_, [](const slot& one) { return one.active && one.active->n_draft_max > 0; });
    const auto may_decode = [&](const slot& one, const lora_scales* scales) {
        return (one.is_generating() || (one.may_go_ahead() && !has_guesses)) &&
               (!scales || one.cache.lora() == *scales);
    };
    order_.clear();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        if (may_decode(slots_[i], only)) order_.push_back(i);
    }
    std::sort(order_.begin(), order_.end(), [this](std::size_t left, std::size_t right) {
        return std::pair(served_at_[left], left) < std::pair(served_at_[right], right);
    });
    for (const auto first : order_) {
        const auto& lora = slots_[first].cache.lora();
        const auto is_ready = [&](std::size_t i) {
            if (!may_decode(slots_[i], &lora)) return false;
            const bool may_share = !slots_[first].active->is_alone && !slots_[i].active->is_alone;
            return (i == first || may_share) && try_add(slots_[i], &batch_builder::prepare_token);
        };
        if (!is_ready(first)) continue;
        auto begin = first, end = first + 1;
        while (end < slots_.size() && is_ready(end)) ++end;
        while (begin > 0 && is_ready(begin - 1)) --begin;
        for (auto i = begin; i < end && try_add(slots_[i], &batch_builder::add_token);) ++i;
        if (!step_.tokens.empty()) {
            is_prefill_ = false;
            guesser_.add_to(step_);
            return true;
        }
    }
    return false;
}

// Adds one slot to the step by calling `add`. If that fails, the slot's request ends and the step
// is unchanged.
bool batch_builder::try_add(slot& target, bool (batch_builder::*add)(slot&)) {
    const auto n_tokens = step_.tokens.size();
    const auto n_rows = step_.rows.size();
    const auto n_parts = step_.parts.size();
    try {
        return (this->*add)(target);
    } catch (...) {
        auto failure = failure_of_request();
        step_.tokens.resize(n_tokens);
        step_.rows.resize(n_rows);
        step_.parts.resize(n_parts);
        out_.finish(target, finish_reason::error, std::move(failure));
        return false;
    }
}

bool batch_builder::add_prompt(slot& target) {
    if (slots_.await_fork(target) || !target.is_in_prompt() || target.gives_way) return false;
    if (!target.text.empty()) slots_.make_room(target);
    auto part = next_chunk(target);
    if (!make_ready(part)) return false;
    const auto& prompt = target.prompt();
    const auto n_done = target.cache.size();
    const auto n = static_cast<std::size_t>(part.n_tokens);
    target.cache.make_place(n);
    const auto* const edits = target.edits.at(n_done);
    target.cache.go_on_with(edits);
    const int n_rows_out = needs_outputs(*target.active) ? part.n_rows : 0;
    const auto n_outputs = static_cast<std::size_t>(std::max(n_rows_out, part.samples ? 1 : 0));
    for (std::size_t i = 0; i < n; ++i) {
        step_.tokens.push_back(
            {target.id(), prompt[n_done + i], static_cast<std::int32_t>(n_done + i),
             i + n_outputs >= n || target.active->is_scored(n_done + i + 1), edits});
    }
    part.i_token = static_cast<int>(step_.tokens.size()) - 1;
    target.active->share->last_chunk = n_fills_;
    add_rows(part);
    return true;
}

bool batch_builder::prepare_token(slot& target) {
    const bool is_ready = target.state == slot_state::steered
                              ? take_rows_ahead(pool_, slots_.size(), target)
                              : make_ready({&target, 1, 0, true, true});
    if (!is_ready) return false;
    target.cache.make_place(1);
    return true;
}

// Requires prepare_token().
bool batch_builder::add_token(slot& target) {
    if (!target.active) return false;  // ended while another one was prepared
    batch_part part{&target, 1, 0, true, true};
    part.is_ahead = target.state == slot_state::steered;
    const auto* const edits = target.edits.at(target.cache.size());
    if (!part.is_ahead) target.cache.go_on_with(edits);
    part.i_token = static_cast<int>(step_.tokens.size());
    const auto id = part.is_ahead ? *target.likely : target.pending;
    step_.tokens.push_back(
        {target.id(), id, static_cast<std::int32_t>(target.cache.size()), true, edits});
    add_rows(part);
    return true;
}

void batch_builder::add_rows(const batch_part& part) {
    const auto& target = *part.target;
    if (part.samples) served_at_[static_cast<std::size_t>(target.id())] = n_fills_;
    const int n_columns = step_.tokens.back().position + 1;
    if (const auto& rows = target.prompt_rows; rows.block) {
        const int n_visible = model_.has_cache() ? n_columns - part.n_rows + 1 : n_columns;
        step_.rows.push_back({rows.plan, part.i_token - part.n_rows + 1, n_visible, rows.layout,
                              rows.block->data()});
    }
    if (const auto& rows = target.rows; rows.block)
        step_.rows.push_back({rows.plan, part.i_token, n_columns, rows.layout, rows.block->data()});
    step_.parts.push_back(part);
}

// The most tokens of a prompt that its next step takes.
int batch_builder::n_most(const slot& target) const {
    if (n_each_ > 0) return n_each_;
    const auto& active = *target.active;
    // A pooled embedding must be one step.
    const bool is_whole = active.embeds && !model_.can_split_embedding();
    const int n_chunk = model_.n_chunk();
    const int n_most =
        is_whole || !is_shared_step(slots_, target) ? n_chunk : costs_.n_between(n_chunk);
    if (!active.is_alone || active.is_steered || target.text.empty()) return n_most;
    // Evaluated again in the steps in which it was evaluated first, to the last bit.
    const auto n_first = active.prompt.size() - 1, n_done = target.cache.size();
    return n_done < n_first ? std::min(n_most, static_cast<int>(n_first - n_done)) : 1;
}

// As much of the prompt as one step holds, and whose rows and scores it can give.
batch_part batch_builder::next_chunk(slot& target) const {
    const auto& active = *target.active;
    const auto n_prompt = static_cast<int>(target.prompt().size());
    const auto n_done = static_cast<int>(target.cache.size());
    const int n_left = static_cast<int>(target.n_in_chunks()) - n_done;
    // A step has the edits of its first token.
    const auto n_alike = static_cast<int>(
        target.edits.n_alike(target.cache.size(), static_cast<std::size_t>(std::max(0, n_left))));
    const int n_room = model_.n_ctx() - n_done;  // a text may have to discard tokens first
    batch_part part{&target, std::min({n_alike, n_most(target), n_room, target.n_to_cut()}), 0,
                    false, false};
    if (target.n_prompt_rows > 0 && target.text.empty()) fit_rows(part, model_, pool_);
    if (active.n_scores > 0) {  // whose logits one step gives
        const int n_before = std::max(0, n_prompt - static_cast<int>(active.n_scores) - 1 - n_done);
        part.n_tokens = static_cast<int>(
            std::min<std::int64_t>(part.n_tokens, std::int64_t{n_before} + model_.n_outputs()));
    }
    part.is_last = n_done + part.n_tokens == n_prompt;
    part.samples = part.is_last && !active.only_attends;
    return part;
}

// Decides whether this slot can take part. Sets its state, and takes the blocks that its rows need.
bool batch_builder::make_ready(const batch_part& part) {
    auto& target = *part.target;
    const auto& active = *target.active;
    if (!part.samples && part.n_rows == 0) return true;  // nothing to deliver
    const bool is_prompt = target.is_in_prompt();
    const int run_ahead = slots_.n_ahead(active, part.n_rows > 0);
    const int n_coming = out_.n_on_the_way(target.active);
    const bool has_room =
        (n_coming == 0 || run_ahead > 0) && active.box->has_room(std::max(0, run_ahead - n_coming));
    if (!has_room) {
        target.deadline.reset();
        change(target.state, slot_state::paused);
        return false;
    }
    if (!is_prompt) slots_.make_room(target);
    const auto n_columns = is_prompt ? target.prompt().size() : target.cache.size() + 1;
    if (part.n_rows > 0 &&
        !take_rows(target, prompt_layout(active, part.n_rows), target.prompt_rows)) {
        return false;
    }
    if (part.samples && active.capture &&
        !take_rows(target, active.capture->layout(static_cast<int>(n_columns)), target.rows)) {
        return false;
    }
    change(target.state, is_prompt ? slot_state::prefill : slot_state::decode);
    return true;
}

// False: the pool has no room for these rows. Dropped rows have no block.
bool batch_builder::take_rows(slot& target, const row_layout& layout, captured_rows& rows) {
    // Left over from a try in which the other block found no room.
    if (rows.block && rows.layout.size_bytes == layout.size_bytes) {
        rows.layout = layout;
        return true;
    }
    rows = {};
    bool is_coming = false;
    auto block = pool_.try_take(layout.size_bytes, &is_coming);
    // It is being page-locked meanwhile, and rings the doorbell when it is there.
    if (!block && is_coming) {
        target.deadline.reset();
        return false;
    }
    // A waiting consumer gives no blocks back, but it may have dropped a view after the first try.
    // A token that is still on its way to the consumer has a block that may come back too.
    const bool is_final =
        !block && out_.n_on_the_way(target.active) == 0 && target.active->box->is_starving();
    if (is_final) block = pool_.try_take(layout.size_bytes);
    if (block) {
        target.deadline.reset();
        rows = {std::move(block), target.active->capture, layout, nullptr};
        return true;
    }
    if (is_final && target.active->on_full == full_policy::drop) {
        counters_.n_dropped_rows += static_cast<std::uint64_t>(layout.n_queries);
        return true;
    }
    starve(target, layout.size_bytes, is_final);
    return false;
}

// No room for the next row: the slot skips this step. While the consumer has tokens to take, their
// blocks may come back: first the slot stops running ahead.
void batch_builder::starve(slot& target, std::size_t n_bytes, bool is_final) {
    change(target.state, slot_state::starved);
    if (!is_final) {
        target.deadline.reset();
        return;
    }
    const auto& active = *target.active;
    const auto stats = pool_.stats();
    const auto n_wanted = block_pool::block_bytes(n_bytes);
    // What is larger than the budget finds no room however long it waits.
    if (active.on_full == full_policy::wait && n_wanted <= stats.budget_bytes) {
        const auto now = clock::now();
        if (!target.deadline) {
            const auto limit =
                std::min<std::chrono::duration<double>>(active.wait_limit, longest_wait);
            target.deadline = now + std::chrono::duration_cast<clock::duration>(limit);
        }
        if (now < *target.deadline) return;
    }
    throw error(errc::pool_exhausted, "the next rows of attention need ", n_bytes,
                " bytes in a block of ", n_wanted, ", but ", stats.leased_bytes, " of ",
                stats.budget_bytes, " are held by ", stats.n_leased,
                " views; drop views, capture fewer layers or heads, use on_full=\"drop\" or raise "
                "attention_budget_bytes");
}

}  // namespace kqview
