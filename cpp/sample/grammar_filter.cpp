#include "sample/grammar_filter.h"

#include <algorithm>

#include "base/error.h"

namespace kqview {
namespace {

// Above this share of the vocabulary, a mask over all tokens, in text order, is faster.
constexpr std::size_t n_mask_share = 16;

bool bit_of(const std::vector<std::uint64_t>& mask, token_id id) {
    const auto i = static_cast<std::size_t>(id);
    return (mask[i / 64] >> (i % 64) & 1U) != 0;
}

void set_bit(std::vector<std::uint64_t>& mask, token_id id) {
    const auto i = static_cast<std::size_t>(id);
    mask[i / 64] |= std::uint64_t{1} << (i % 64);
}

std::size_t n_common(std::string_view a, std::string_view b) {
    const auto [end, unused] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    return static_cast<std::size_t>(end - a.begin());
}

}  // namespace

token_texts::token_texts(const std::vector<std::string>& texts, std::vector<bool> is_end)
    : is_end_(std::move(is_end)) {
    starts_.reserve(texts.size() + 1);
    for (const std::string& text : texts) {
        starts_.push_back(bytes_.size());
        bytes_.append(text, 0, std::min(text.size(), text.find('\0')));
    }
    starts_.push_back(bytes_.size());
    for (token_id id = 0; id < static_cast<token_id>(texts.size()); ++id) {
        if (!is_end_[static_cast<std::size_t>(id)] && !of(id).empty()) sorted_.push_back({id, 0});
    }
    std::sort(sorted_.begin(), sorted_.end(),
              [this](const entry& a, const entry& b) { return of(a.id) < of(b.id); });
    for (std::size_t i = 1; i < sorted_.size(); ++i) {
        sorted_[i].n_shared =
            static_cast<std::uint32_t>(n_common(of(sorted_[i - 1].id), of(sorted_[i].id)));
    }
}

std::string_view token_texts::of(token_id id) const {
    const auto i = static_cast<std::size_t>(id);
    return std::string_view(bytes_).substr(starts_[i], starts_[i + 1] - starts_[i]);
}

// ---- bytes

// Adds a byte to `part`. True: a character is complete. As in llama.cpp, only a character that an
// earlier token began must continue with continuation bytes. After n_missing is -1 no text can
// follow.
bool grammar_filter::decode(cursor& at, char byte) {
    const auto bits = static_cast<std::uint32_t>(static_cast<unsigned char>(byte));
    auto& [value, n_missing] = at.part;
    if (n_missing > 0) {
        if (at.was_partial && bits >> 6 != 2) {
            n_missing = -1;
            return false;
        }
        value = value << 6 | (bits & 0x3FU);
        --n_missing;
    } else {
        n_missing = bits < 0x80 ? 0 : bits < 0xC0 ? -1 : bits < 0xE0 ? 1 : bits < 0xF0 ? 2 : 3;
        if (n_missing < 0) return false;
        value = bits & ((1U << (7 - n_missing)) - 1);
    }
    if (n_missing > 0) return false;
    at.was_partial = false;
    if (at.first == 0) at.first = value;
    return true;
}

// False: the grammar allows no token with these leading bytes.
bool grammar_filter::advance(cursor& at, char byte, work_limit& limit) {
    if (decode(at, byte)) at.state = automaton_.after(at.state, at.part.value, limit);
    return at.state != grammar_automaton::dead && at.part.n_missing >= 0;
}

bool grammar_filter::fits(const cursor& at, work_limit& limit) const {
    return at.part.n_missing == 0 || automaton_.matches_partial(at.state, at.part, limit);
}

// True if the text is UTF-8 except for its end, and more than part of a character. No other text
// matches a <token>.
bool grammar_filter::is_whole(std::string_view text) const {
    cursor at = start();
    for (const char byte : text) {
        decode(at, byte);
        if (at.part.n_missing < 0) return false;
    }
    return at.first != 0 || at.part.n_missing == 0;
}

bool grammar_filter::allows_as_token(token_id id, std::string_view text) const {
    return automaton_.has_token_items(automaton_.current()) &&
           automaton_.matches_token(automaton_.current(), static_cast<std::uint32_t>(id)) &&
           is_whole(text);
}

// ---- tokens

void grammar_filter::prepare(std::size_t n_calls, work_limit& limit) {
    if (current_mask_) return;
    const bool is_partial = partial_.n_missing > 0;
    if (const auto made = masks_.find(automaton_.current()); !is_partial && made != masks_.end()) {
        current_mask_ = &made->second;
        return;
    }
    if (n_calls < texts_->n_vocab() / n_mask_share) return;
    mask made = make_mask(limit);
    if (is_partial) {
        partial_mask_ = std::move(made);
        current_mask_ = &partial_mask_;
        return;
    }
    if ((masks_.size() + 1) * made.size() * sizeof(made[0]) > n_mask_bytes_max) masks_.clear();
    current_mask_ = &masks_.insert_or_assign(automaton_.current(), std::move(made)).first->second;
}

bool grammar_filter::allows(token_id id, work_limit& limit) {
    if (current_mask_) return bit_of(*current_mask_, id);
    if (texts_->is_end(id)) return automaton_.is_complete(automaton_.current());
    const std::string_view text = texts_->of(id);
    if (text.empty()) return false;
    cursor at = start();
    const bool is_alive =
        std::all_of(text.begin(), text.end(), [&](char byte) { return advance(at, byte, limit); });
    return (is_alive && fits(at, limit)) || allows_as_token(id, text);
}

grammar_filter::mask grammar_filter::make_mask(work_limit& limit) {
    mask made((texts_->n_vocab() + 63) / 64);
    std::vector<cursor> path{start()};  // after each byte of the text
    std::size_t n_alive = SIZE_MAX;     // leading bytes after which it was still allowed
    for (const auto& [id, n_shared] : texts_->sorted()) {
        limit.spend();
        if (n_shared > n_alive) continue;
        const std::string_view text = texts_->of(id);
        n_alive = SIZE_MAX;
        path.resize(std::min<std::size_t>(n_shared + 1, path.size()));
        for (std::size_t i = path.size() - 1; i < text.size(); ++i) {
            cursor at = path.back();
            if (!advance(at, text[i], limit)) {
                n_alive = i;
                break;
            }
            path.push_back(at);
        }
        if (n_alive == SIZE_MAX && fits(path.back(), limit)) set_bit(made, id);
    }
    const auto n_vocab = static_cast<token_id>(texts_->n_vocab());
    const bool is_complete = automaton_.is_complete(automaton_.current());
    const bool has_token_items = automaton_.has_token_items(automaton_.current());
    for (token_id id = 0; id < n_vocab && (is_complete || has_token_items); ++id) {
        limit.spend();
        const bool is_end = texts_->is_end(id);
        if (is_end ? is_complete : !texts_->of(id).empty() && allows_as_token(id, texts_->of(id))) {
            set_bit(made, id);
        }
    }
    return made;
}

void grammar_filter::accept(token_id id, work_limit& limit) {
    if (texts_->is_end(id)) return;
    const std::string_view text = texts_->of(id);
    const auto before = automaton_.current();
    cursor at = start();
    for (const char byte : text) {
        if (decode(at, byte)) at.state = automaton_.after(at.state, at.part.value, limit);
    }
    const auto by_text =
        at.state == before && at.first == 0 ? automaton_.without_tokens(before, limit) : at.state;
    const auto by_token =
        automaton_.has_token_items(before)
            ? automaton_.after_token(before, static_cast<std::uint32_t>(id), limit)
            : grammar_automaton::dead;
    const auto next = automaton_.either(by_text, by_token, limit);
    if (next == grammar_automaton::dead) {
        throw error(errc::internal, "the grammar does not allow the chosen token ", id,
                    ", only those come; report this");
    }
    go_to(next, at.part);
}

void grammar_filter::restart() { go_to(automaton_.first(), {}); }

void grammar_filter::go_to(grammar_automaton::state next, partial_character part) {
    current_mask_ = nullptr;
    partial_ = part;
    automaton_.set_current(next);
    if (n_forgotten_ != automaton_.n_forgotten()) {
        n_forgotten_ = automaton_.n_forgotten();
        masks_.clear();
    }
}

}  // namespace kqview
