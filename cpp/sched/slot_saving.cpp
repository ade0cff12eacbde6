#include "sched/slot_saving.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "state/ses1.h"

namespace kqview {

std::size_t save_slot(idle_slot& slot, std::span<std::byte> out) {
    const auto i_stream = static_cast<std::uint32_t>(slot.id);
    const auto kv_at = ses1_write_offset(slot.tokens.size(), i_stream);
    const auto n_room = kv_at + slot.model.state_bytes(slot.id);
    if (out.size() < n_room) return n_room;
    const auto buffer = out.first(n_room);
    slot.model.write_state(slot.id, buffer.subspan(kv_at));
    const auto n_bytes = seal_ses1(buffer, slot.tokens, i_stream);
    if (slot.tokens.empty()) return n_bytes;
    const auto blob = buffer.first(n_bytes);
    const auto& layout =
        slot.model.layout_from(blob.subspan(ses1_header_bytes(slot.tokens.size())));
    try {
        const auto view = read_ses1(blob, layout, ses1_source::own);
        if (!view.is_in_order) sort_cells(blob, view, layout);
    } catch (const error& failure) {
        throw error(errc::internal,
                    std::string("slot.save: the cache is not what its ids say: ") + failure.what());
    }
    return n_bytes;
}

void restore_slot(idle_slot& slot, std::span<const std::byte> blob, std::size_t n_exact) {
    const auto& layout = slot.model.layout_for(slot.id, slot.tokens.empty());
    auto view = read_ses1(blob, layout, ses1_source::foreign);
    if (view.tokens.empty()) return clear_slot(slot);  // llama.cpp would keep the cells it has
    // As the blob has it where that is this context's form already: nothing is copied then.
    const bool is_native = view.n_stream == layout.shape.n_stream && view.is_in_order;
    const auto native = is_native ? std::vector<std::byte>{} : to_native(view, layout);
    const auto n_tokens = static_cast<int>(view.tokens.size());
    slot.has_changed = true;
    if (!slot.model.read_state(slot.id, is_native ? view.kv_data : std::span(native), n_tokens)) {
        clear_slot(slot);
        throw error(errc::internal,
                    "slot.restore: llama.cpp refused a blob that was found sound; the slot is "
                    "empty now");
    }
    slot.tokens = std::move(view.tokens);
    slot.n_exact = exact_mark(n_exact, slot.tokens.size());
}

void truncate_slot(idle_slot& slot, std::size_t n_keep) {
    if (n_keep > slot.tokens.size()) {
        throw error(errc::request, "slot.truncate: n is " + std::to_string(n_keep) +
                                       ", the slot has " + std::to_string(slot.tokens.size()) +
                                       " tokens");
    }
    if (n_keep == slot.tokens.size()) return;
    if (!slot.model.truncate(slot.id, static_cast<int>(n_keep))) return clear_slot(slot);
    slot.has_changed = true;
    slot.tokens.resize(n_keep);
    slot.n_exact = exact_mark(slot.n_exact, n_keep);
}

void clear_slot(idle_slot& slot) {
    slot.has_changed = true;
    slot.model.truncate(slot.id, 0);  // dropping everything always works
    slot.tokens.clear();
    slot.n_exact = all_exact;
}

}  // namespace kqview
