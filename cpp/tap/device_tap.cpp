#include "tap/device_tap.h"

#include <algorithm>
#include <exception>
#include <limits>

#include "base/error.h"
#include "tap/device_copies.h"

namespace kqview {

namespace {

constexpr std::size_t prompt_budget_bytes = std::size_t{256} << 20;  // of a step's prompt rows
constexpr std::size_t slack_bytes = 4096;                            // a result's alignment
constexpr row_kind kinds[] = {row_kind::logits, row_kind::scores, row_kind::probs};
constexpr row_form forms[] = {row_form::device_f32, row_form::device_f16, row_form::device_mean};

std::size_t element_bytes(row_form form) { return form == row_form::device_f16 ? 2 : 4; }

const ggml_tensor* keys_of(const attention_site& site) {
    return site.flash ? site.k : site.kq->src[0];
}

int n_queries_of(const attention_site& site) {
    return static_cast<int>(site.flash ? site.q->ne[1] : site.kq->ne[1]);
}

// A driver's failure as ours: nothing else throws in here.
[[noreturn]] void fail_copy(const std::exception& failure) {
    throw error(errc::decode, std::string("capture: rows could not be copied from their device: ") +
                                  failure.what());
}

}  // namespace

transfer& device_tap::way_to(ggml_backend_dev_t device) {
    for (const auto& way : ways_) {
        if (way->device() == device) return *way;
    }
    return *ways_.emplace_back(std::make_unique<transfer>(device, *counters_));
}

void device_tap::learn(const attention_site& site) {
    const auto device = device_of(keys_of(site));
    if (!device) return;
    const auto* const keys = keys_of(site);
    const bool is_cached = (keys->view_src ? keys->view_src : keys)->buffer != nullptr;
    layers_[site.il] = {&way_to(device), static_cast<std::size_t>(site.n_head),
                        static_cast<std::size_t>(site.n_cells), is_cached ? 1 : n_queries_of(site)};
}

void device_tap::learn(const hidden_site& site) {
    if (const auto device = device_of(site.output)) {
        hidden_[site.il] = {&way_to(device), 1, static_cast<std::size_t>(site.output->ne[0]), 1};
    }
}

std::size_t device_tap::bytes_of_row(const graph_plan& plan, int il) const {
    const auto& one = layers_.at(il);
    std::size_t n_bytes = 0;
    for (const auto kind : kinds) {
        for (const auto form : forms) {
            if (!plan.wants(il, kind, form)) continue;
            const auto n_head = form == row_form::device_mean ? 1 : one.n_head;
            n_bytes += n_head * one.n_cells * element_bytes(form);
        }
    }
    return n_bytes;
}

void device_tap::reserve(const graph_plan& plan) {
    std::size_t n_row_bytes = 0;
    int n_least = 1;
    for (const auto& [il, one] : layers_) {
        n_row_bytes += bytes_of_row(plan, il);
        n_least = std::max(n_least, one.n_queries_least);
    }
    n_prompt_rows_ = std::numeric_limits<int>::max();
    std::size_t n_rows = static_cast<std::size_t>(n_slots_);
    if (plan.wants_prompt() && n_row_bytes > 0) {
        const auto n_room = std::min<std::size_t>(prompt_budget_bytes / n_row_bytes,
                                                  static_cast<std::size_t>(n_chunk_));
        n_prompt_rows_ = std::max(n_least, static_cast<int>(n_room));
        n_rows = std::max(n_rows, static_cast<std::size_t>(n_prompt_rows_));
    }
    for (const auto& way : ways_) {
        std::size_t n_bytes = 0;
        for (const auto& [il, one] : layers_) {
            if (one.way != way.get()) continue;
            const auto row_bytes = bytes_of_row(plan, il);
            if (row_bytes > 0) {
                n_bytes += row_bytes * n_rows + std::size(kinds) * std::size(forms) * slack_bytes;
            }
        }
        for (const auto& [il, one] : hidden_) {
            if (one.way != way.get() || !plan.wants_hidden(il)) continue;
            n_bytes +=
                static_cast<std::size_t>(n_slots_) * one.n_cells * sizeof(float) + slack_bytes;
        }
        if (n_bytes > 0) way->reserve(n_bytes);
    }
}

// The last query of each stream or, where a prompt's rows are wanted, as many as there is room for.
int device_tap::n_rows_of(const graph_plan& plan, int n_queries, int n_stream) const {
    if (!plan.wants_prompt()) return 1;
    const int n_room = std::max(n_slots_, n_prompt_rows_) / n_stream;
    return std::max(1, std::min(n_queries, n_room));
}

std::size_t device_tap::n_tensors_max(std::size_t n_attention, std::size_t n_hidden) {
    return n_attention * std::size(kinds) * std::size(forms) * device_node_builder::n_tensors_max +
           n_hidden * 2;
}

device_part::share& device_tap::share_of(device_part& part, transfer& way) {
    for (auto& share : part.shares) {
        if (share.way == &way) return share;
    }
    way.begin_graph();
    part.shares.push_back({&way, {}, {}, 0, nullptr});
    return part.shares.back();
}

bool device_tap::place(device_part& part, transfer& way, ggml_tensor* result, std::string& why) {
    auto& share = share_of(part, way);
    if (!way.place(result)) {
        why = std::string("rows of this step do not fit into the memory reserved on ") +
              ggml_backend_dev_name(way.device());
        return false;
    }
    share.n_used = way.n_placed();
    return true;
}

std::string device_tap::add(const attention_sites& attention,
                            const std::vector<hidden_site>& states, const graph_plan& plan,
                            ggml_context* tensors, std::vector<placed_node>& placed,
                            device_part& part) {
    std::unordered_map<const transfer*, device_node_builder> builders;
    const auto builder_of = [&](transfer& way) -> device_node_builder& {
        return builders.try_emplace(&way, tensors, way.device()).first->second;
    };
    const auto put = [&](device_node_builder& builder, ggml_tensor* anchor) {
        for (auto* const node : builder.take_nodes()) placed.push_back({anchor, node});
    };
    std::string why;
    for (const auto& site : attention.sites) {
        const auto found = layers_.find(site.il);
        if (found == layers_.end()) continue;
        auto& way = *found->second.way;
        for (const auto kind : kinds) {
            for (const auto form : forms) {
                if (!plan.wants(site.il, kind, form)) continue;
                auto& builder = builder_of(way);
                const int n_rows = n_rows_of(plan, n_queries_of(site), site.n_stream);
                const auto rows = builder.rows_of(site, kind, form, n_rows);
                if (!rows.tensor) return builder.failure();
                if (!place(part, way, rows.tensor, why)) return why;
                share_of(part, way).rows.push_back(rows);
                // Before llama.cpp's softmax writes over what it reads.
                auto* const anchor = site.flash                 ? site.flash
                                     : kind == row_kind::logits ? site.kq
                                     : kind == row_kind::scores ? site.softmax->src[0]
                                                                : site.softmax;
                put(builder, anchor);
            }
        }
    }
    for (const auto& site : states) {
        const auto found = hidden_.find(site.il);
        if (found == hidden_.end() || !plan.wants_hidden(site.il)) continue;
        auto& way = *found->second.way;
        auto& builder = builder_of(way);
        const auto n_tokens = static_cast<int>(site.output->ne[1]);
        auto* const tensor = builder.hidden_of(site, std::min(n_tokens, n_slots_));
        if (!builder.failure().empty()) return builder.failure();
        if (!place(part, way, tensor, why)) return why;
        share_of(part, way).states.push_back({site.il, tensor, n_tokens});
        put(builder, site.output);
    }
    return {};
}

void device_tap::find_backends(ggml_backend_sched_t sched, device_part& part) {
    for (auto& share : part.shares) {
        auto* const first =
            share.rows.empty() ? share.states.front().tensor : share.rows.front().tensor;
        share.backend = ggml_backend_sched_get_tensor_backend(sched, first);
    }
}

transfer_id device_tap::start(row_table& table, const device_part& part) {
    const auto id = ++n_transfers_;
    bool is_on_its_way = false;
    try {
        device_copies copies(table);
        for (const auto& share : part.shares) {
            const auto wanted = copies.of(share);
            if (wanted.empty()) continue;
            is_on_its_way |= share.way->start(share.backend, id, share.n_used, wanted);
        }
        if (copies.has_work_left()) {
            if (is_on_its_way) await(id);
            copies.finish();
            return 0;
        }
    } catch (const error&) {
        throw;
    } catch (const std::exception& failure) {
        fail_copy(failure);
    }
    return is_on_its_way ? id : 0;
}

void device_tap::note_computed() {
    for (const auto& way : ways_) way->note_computed();
}

void device_tap::await(transfer_id id) {
    if (id == 0) return;
    try {
        for (const auto& way : ways_) way->await(id);
    } catch (const error&) {
        throw;
    } catch (const std::exception& failure) {
        fail_copy(failure);
    }
}

}  // namespace kqview
