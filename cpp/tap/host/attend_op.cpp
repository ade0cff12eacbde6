#include "tap/host/attend_op.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "base/per_thread.h"
#include "tap/host/attend_kernel.h"
#include "tap/host/row_kernel.h"
#include "tap/plan.h"

namespace kqview {

namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
// Items for each thread: the more, the less the others wait for the slowest.
constexpr int items_per_thread = 4;
// More than the second-level cache of a core.
constexpr std::size_t least_large_bytes = std::size_t{1} << 20;
// Query heads that share a KV head in one item, where queries are cut into runs: with fewer, the
// keys of a tile cost more than its products.
constexpr int least_heads_of_part = 16;
// Queries of a run that one thread takes: as many as make so many heads that share a KV head, so
// that laying out a tile of keys for them costs little; fewer where their rows are large.
constexpr int heads_of_run = 128;
constexpr std::size_t row_floats_of_run = std::size_t{1} << 21;

std::size_t zu(int i) { return static_cast<std::size_t>(i); }

// How the work of a node is cut. An item is a run of cells of one stream, for all KV heads because
// they lie side by side in memory, or for one of them where there are too few runs. Several queries
// are cut by KV heads and into runs of queries first: keys are read from the processor's caches
// then, and what has to be put together at the end stays small. Of many queries, an item is a run
// of them with all heads and cells, whose results stay with its thread.
struct division {
    division(const attend_op& op, const ggml_tensor* node, int n_threads)
        : n_streams(op.site.n_stream),
          n_tokens(static_cast<int>(node->src[0]->ne[1])),
          n_heads(op.site.n_head),
          n_heads_kv(op.site.n_head_kv),
          n_cells(static_cast<int>(node->src[1]->ne[1])),
          n_values(static_cast<int>(node->src[2]->ne[0])),
          n_tiles(ceil_div(n_cells, attend_tile)),
          is_whole(n_tokens > most_shared_queries) {
        const int n_wanted = n_threads == 1 ? 1 : ceil_div(items_per_thread * n_threads, n_streams);
        const int n_group = n_heads / n_heads_kv;
        const int n_parts_max = std::max(1, n_tokens / ceil_div(least_heads_of_part, n_group));
        if (is_whole) {
            const int n_of_run = std::clamp(heads_of_run / n_group, 1, op.memory.n_of_run);
            n_token_parts = std::max(ceil_div(n_tokens, n_of_run), std::min(n_wanted, n_parts_max));
            tiles_per_chunk = n_tiles;
            n_of_thread = ceil_div(n_tokens, n_token_parts);
            has_row_places = n_threads * n_of_thread <= op.memory.n_row_places;
            return;
        }
        has_row_places = n_streams * n_tokens <= op.memory.n_row_places;
        if (n_tokens == 1) {
            cut_cells(n_wanted);
            if (n_chunks < n_wanted) n_head_parts = n_heads_kv;
            return;
        }
        n_head_parts = n_heads_kv;
        n_token_parts = std::clamp(ceil_div(n_wanted, n_head_parts), 1, n_parts_max);
        cut_cells(ceil_div(n_wanted, n_head_parts * n_token_parts));
    }

    int n_streams, n_tokens, n_heads, n_heads_kv, n_cells, n_values, n_tiles;
    bool is_whole;
    int n_of_thread = 0;  // places, if whole
    bool has_row_places = false;
    int tiles_per_chunk = 1, n_chunks = 1;
    int n_head_parts = 1, n_token_parts = 1;

    // Items of one stream and one run of queries: the last of them to end finishes these queries.
    int items_per_group() const { return n_chunks * n_head_parts; }
    int n_groups() const { return n_streams * n_token_parts; }
    int n_items() const { return n_groups() * items_per_group(); }
    std::size_t partial_size() const { return zu(n_values) + 2; }
    float* partial(attend_memory& memory, std::size_t place, int head, int chunk) const {
        const auto query_head = place * zu(n_heads) + zu(head);
        return memory.partials.data() + (query_head * zu(n_chunks) + zu(chunk)) * partial_size();
    }
    float* row_max(attend_memory& memory, std::size_t place, int head) const {
        return memory.row_max.data() + (place * zu(n_heads) + zu(head)) * zu(n_tiles);
    }

private:
    static int ceil_div(int a, int b) { return (a + b - 1) / b; }
    void cut_cells(int n_wanted) {
        tiles_per_chunk = ceil_div(n_tiles, std::min(n_wanted, n_tiles));
        n_chunks = ceil_div(n_tiles, tiles_per_chunk);
    }
};

// Rows that no cache keeps until somebody reads them.
bool is_large(const row_target& target) { return target.layout.size_bytes >= least_large_bytes; }

// Whether rows go to the target at once. Probabilities are scaled at the end: large ones wait in
// memory that all layers use, which stays in the cache.
bool is_finished_in_place(const row_target& target) {
    const auto& plan = *target.plan;
    return plan.is_plain() && (plan.kind() != row_kind::probs || !is_large(target));
}

// A target whose rows this node writes.
struct wanted_rows {
    std::size_t i_target;
    const row_target* target;
    const capture_plan::layer_rows* layer;
    std::span<const cut_ranges::piece> pieces;  // what is kept of a row, if the plan is_sums()
    std::span<const cut_ranges::piece> of_tile = {};  // those of the tile that rows aim at

    int n_heads() const { return static_cast<int>(layer->heads.size()); }
    bool has(int token) const {
        return token >= target->i_query && token < target->i_query + target->layout.n_queries;
    }
    // Columns that the query of a token sees.
    int n_visible(int token) const {
        return std::min(target->n_visible + token - target->i_query, target->layout.n_columns);
    }
    // The row of the i-th wanted head in the target, if rows are handed out as they are computed.
    float* row(int token, int i_head) const {
        const auto& layout = target->layout;
        const auto i_row =
            zu(layer->first_row + i_head) * zu(layout.n_queries) + zu(token - target->i_query);
        return reinterpret_cast<float*>(target->data) + i_row * zu(layout.n_values);
    }
    // Where it goes before it is finished; `place`: the token's.
    float* unfinished(attend_memory& memory, std::size_t place, int token, int i_head) const {
        if (is_finished_in_place(*target)) return row(token, i_head);
        const auto n_kept = is_sums() ? pieces.size() : zu(target->layout.n_columns);
        return memory.rows.data() + place * memory.row_floats + zu(i_head) * n_kept;
    }
    bool is_sums() const { return target->plan->is_sums(); }
    // The pieces in the tiles that a query sees, all of which were walked.
    std::span<const cut_ranges::piece> seen_pieces(int token) const {
        const int n_tiles = (n_visible(token) + attend_tile - 1) / attend_tile;
        const auto end = std::ranges::lower_bound(pieces, n_tiles, {}, &cut_ranges::piece::tile);
        return {pieces.begin(), end};
    }
    // Sets of_tile.
    void aim(int tile) {
        const auto found = std::ranges::equal_range(pieces, tile, {}, &cut_ranges::piece::tile);
        of_tile = {found.begin(), found.end()};
    }
};

// The targets of a stream: those of one request, whose plan they share. A token may belong to two:
// the last row of a prompt is that of the first generated token as well.
using stream_rows = std::vector<wanted_rows>;

void find_rows(const attend_op& op, const division& work, int stream, stream_rows& found) {
    found.clear();
    const auto& targets = op.table.targets;
    for (std::size_t i = 0; i < targets.size(); ++i) {
        const auto& target = targets[i];
        if (target.i_stream != stream) continue;
        const auto* const layer = target.plan->find(op.site.il);
        const int n_queries = target.layout.n_queries;
        const int n_seen = std::min(target.n_visible + n_queries - 1, target.layout.n_columns);
        const bool fits = n_seen <= work.n_cells && target.i_query + n_queries <= work.n_tokens &&
                          (is_finished_in_place(target) || work.has_row_places);
        // end_step reports the missing rows
        const bool shares_plan = found.empty() || found[0].target->plan == target.plan;
        if (layer && fits && shares_plan) found.push_back({i, &target, layer, op.memory.pieces[i]});
    }
}

// The target whose place holds the rows of a token until they are finished; null if none wants
// them.
const wanted_rows* holder_of(const stream_rows& rows, int token) {
    for (const auto& one : rows)
        if (one.has(token)) return &one;
    return nullptr;
}

// ---- one item: a run of cells

// A wanted row of one head.
struct head_row {
    attended_head* head;
    const wanted_rows* wanted;
    int n_visible;  // columns that its query sees
    float* data;    // until it is finished
};

// The heads of one stream on their way, (KV head, token, head of its group), so that those that
// share keys are adjacent. One for each compute thread.
struct walk {
    std::vector<attended_head> heads;
    std::vector<tile_mask> masks;  // by token, and by head where each has its own
    std::vector<head_row> rows;    // of those of `heads` whose rows are wanted
    stream_rows wanted;
};

// A run of cells of one stream, for some KV heads and some queries.
struct work_item {
    work_item(const division& work, int i, int ith)
        : group(i / work.items_per_group()),
          stream(group / work.n_token_parts),
          chunk(i % work.items_per_group() / work.n_head_parts),
          first_cell(chunk * work.tiles_per_chunk * attend_tile),
          end_cell(std::min(first_cell + work.tiles_per_chunk * attend_tile, work.n_cells)) {
        const int part = i % work.n_head_parts, token_part = group % work.n_token_parts;
        head_begin = work.n_heads_kv * part / work.n_head_parts;
        head_end = work.n_heads_kv * (part + 1) / work.n_head_parts;
        token_begin = work.n_tokens * token_part / work.n_token_parts;
        token_end = work.n_tokens * (token_part + 1) / work.n_token_parts;
        first_place = work.is_whole ? ith * work.n_of_thread : stream * work.n_tokens + token_begin;
    }

    int n_tokens() const { return token_end - token_begin; }
    std::size_t place(int token) const { return zu(first_place + token - token_begin); }

    int group, stream, chunk;
    int first_cell, end_cell;
    int head_begin, head_end;  // KV heads
    int token_begin, token_end;
    int first_place;
};

// Masks of one query for these query heads.
int n_masks_of(const attention_site& site, int begin, int end) {
    return site.heads_per_mask > 0 ? end - begin : 1;
}

void begin_heads(const attend_op& op, const ggml_tensor* node, const division& work,
                 const work_item& item, walk& on) {
    const auto& site = op.site;
    const int n_group = site.n_head / site.n_head_kv;
    const int begin = item.head_begin * n_group, end = item.head_end * n_group;
    on.heads.assign(zu((end - begin) * item.n_tokens()), {});
    const int n_masks = n_masks_of(site, begin, end);
    on.masks.assign(zu(item.n_tokens() * n_masks), {});
    on.rows.clear();
    const auto place_of = [&](int token, int head) -> std::size_t {
        const int i = head - begin, i_token = token - item.token_begin;
        return zu((i / n_group * item.n_tokens() + i_token) * n_group + i % n_group);
    };
    for (int token = item.token_begin; token < item.token_end; ++token) {
        for (int h = begin; h < end; ++h) {
            auto& head = on.heads[place_of(token, h)];
            head.q = reinterpret_cast<const float*>(
                part_of(node->src[0], site.q_strides, token, h, item.stream));
            const int i_mask = n_masks > 1 ? h - begin : 0;
            head.mask = &on.masks[zu((token - item.token_begin) * n_masks + i_mask)];
            head.slope = alibi_slope(site.max_bias, site.n_head, h);
            head.values = work.partial(op.memory, item.place(token), h, item.chunk) + 2;
            std::fill_n(head.values, work.n_values, 0.0f);
        }
        const auto* const wanted = holder_of(on.wanted, token);
        for (int i = 0; wanted && i < wanted->n_heads(); ++i) {
            const int h = wanted->layer->heads[zu(i)];
            if (h < begin || h >= end) continue;
            auto& head = on.heads[place_of(token, h)];
            head.kind = wanted->target->plan->kind();
            head.row_max =
                work.row_max(op.memory, item.place(token), h) + item.chunk * work.tiles_per_chunk;
            head.streams_row = is_large(*wanted->target) && is_finished_in_place(*wanted->target);
            on.rows.push_back({&head, wanted, wanted->n_visible(token),
                               wanted->unfinished(op.memory, item.place(token), token, i)});
        }
    }
}

// Points the rows of all heads at one tile.
void aim_rows(int first, int n_cells, walk& on) {
    for (auto& one : on.wanted) one.aim(first / attend_tile);
    for (const auto& row : on.rows) {
        auto& head = *row.head;
        const auto& wanted = *row.wanted;
        auto begin = first;
        if (wanted.is_sums()) {
            head.pieces = wanted.of_tile.data();
            head.n_row = static_cast<int>(wanted.of_tile.size());
            begin = static_cast<int>(head.pieces - wanted.pieces.data());
        } else {
            head.n_row = std::clamp(row.n_visible - first, 0, n_cells);
        }
        head.row = head.n_row > 0 ? row.data + begin : nullptr;
    }
}

void read_masks(const attend_op& op, const ggml_tensor* node, const work_item& item, int first,
                int n_cells, walk& on) {
    const ggml_tensor* const mask = node->src[3];
    if (!mask) return;
    const int n_group = op.site.n_head / op.site.n_head_kv;
    const int begin = item.head_begin * n_group;
    const int n_masks = n_masks_of(op.site, begin, item.head_end * n_group);
    for (int token = item.token_begin; token < item.token_end; ++token) {
        for (int i = 0; i < n_masks; ++i) {
            const auto* const row = part_of(mask, op.site.mask_strides, token,
                                            op.site.mask_of_head(begin + i), item.stream);
            on.masks[zu((token - item.token_begin) * n_masks + i)] =
                read_tile_mask(row + zu(first) * ggml_type_size(mask->type), mask->type, n_cells);
        }
    }
}

key_rows cells_of(const ggml_tensor* tensor, const operand_strides& strides, int first, int n_cells,
                  int head_kv, int stream) {
    return {part_of(tensor, strides, first, head_kv, stream), strides.token, tensor->type,
            static_cast<int>(tensor->ne[0]), n_cells - first};
}

// What to fetch while head_kv's part of a tile is worked on. Where the KV heads of a cell lie side
// by side, each one's turn fetches an equal part of what all of them have: memory is read as it
// lies.
next_cells next_of(const key_rows& cells, const operand_strides& strides, int head_kv,
                   const division& work) {
    const auto* const next = cells.data + attend_tile * strides.token;
    const auto row_bytes = ggml_row_size(cells.type, cells.n_embd);
    const bool is_dense = work.n_head_parts == 1 && strides.head == row_bytes &&
                          strides.token == zu(work.n_heads_kv) * row_bytes;
    if (!is_dense) return {next, strides.token, row_bytes};
    return {next + zu(head_kv) * (attend_tile - 1) * row_bytes, row_bytes, row_bytes};
}

void attend_item(const attend_op& op, const ggml_tensor* node, const division& work,
                 const work_item& item, row_scratch& scratch) {
    auto& on = per_thread<walk>();
    const auto& site = op.site;
    const int n_group = site.n_head / site.n_head_kv;
    const int n_shared = item.n_tokens() * n_group;  // query heads that share a KV head
    find_rows(op, work, item.stream, on.wanted);
    begin_heads(op, node, work, item, on);

    for (int first = item.first_cell; first < item.end_cell; first += attend_tile) {
        const int n = std::min(attend_tile, item.end_cell - first);
        const bool has_next = first + 2 * attend_tile <= item.end_cell;
        read_masks(op, node, item, first, n, on);
        aim_rows(first, n, on);
        for (int h = item.head_begin; h < item.head_end; ++h) {
            const auto keys =
                cells_of(node->src[1], site.k_strides, first, work.n_cells, h, item.stream);
            const auto values =
                cells_of(node->src[2], op.v_strides, first, work.n_cells, h, item.stream);
            const auto heads =
                std::span(on.heads).subspan(zu((h - item.head_begin) * n_shared), zu(n_shared));
            cell_tile tile{keys, values, n};
            if (has_next) {
                tile.next_keys = next_of(keys, site.k_strides, h, work);
                tile.next_values = next_of(values, op.v_strides, h, work);
            }
            attend(tile, site.scale, site.softcap, heads.data(), n_shared, scratch);
            for (auto& head : heads)
                if (head.row_max) ++head.row_max;
        }
    }
    for (const auto& head : on.heads) {
        head.values[-2] = head.max;
        head.values[-1] = head.sum;
    }
    if (!on.wanted.empty()) end_rows();
}

// ---- the end of a run of queries

// Puts the chunks of one query head together in their order, whichever thread computed them.
softmax_sum join_chunks(const attend_op& op, const ggml_tensor* node, const division& work,
                        std::size_t place, int head, float* to) {
    const ggml_tensor* const sinks = node->src[4];
    const float sink = sinks ? static_cast<const float*>(sinks->data)[head] : minus_infinity;
    return join_partials(work.partial(op.memory, place, head, 0), work.n_chunks, work.n_values,
                         sink, to);
}

void finish_rows(const attend_op& op, const division& work, const work_item& item,
                 const stream_rows& rows, const wanted_rows& wanted,
                 std::span<const softmax_sum> sums, int ith) {
    const auto kind = wanted.target->plan->kind();
    const auto& layout = wanted.target->layout;
    row_sink sink(op.table, wanted.i_target, *wanted.layer, ith);
    auto& segments = op.table.scratch[zu(ith)].segments;
    const int first = std::max(item.token_begin - wanted.target->i_query, 0);
    const int end = std::min(item.token_end - wanted.target->i_query, layout.n_queries);
    for (int i = first; i < end; ++i) {
        const int token = wanted.target->i_query + i;
        const auto& holder = *holder_of(rows, token);
        const int n_visible = wanted.n_visible(token);
        const auto seen = holder.seen_pieces(token);
        sink.begin_query(i);
        for (int j = 0; j < wanted.n_heads(); ++j) {
            const int head = wanted.layer->heads[zu(j)];
            const bool is_plain = wanted.target->plan->is_plain();
            const auto* const row_max = work.row_max(op.memory, item.place(token), head);
            const auto& sum = sums[zu((token - item.token_begin) * work.n_heads + head)];
            float* const found = holder.unfinished(op.memory, item.place(token), token, j);
            if (wanted.is_sums()) {
                segments.resize(wanted.target->plan->spans().n_segments());
                finish_pieces(found, seen, row_max, sum, segments);
                sink.finish_sums(j, segments);
                continue;
            }
            float* const to = is_plain ? wanted.row(token, j) : found;
            const bool is_finished =  // with another target of this token
                &holder != &wanted && (!is_plain || is_finished_in_place(*holder.target));
            if (kind == row_kind::probs && !is_finished) {
                finish_probs(found, n_visible, row_max, sum, to);
            } else if (to != found) {
                std::copy_n(found, n_visible, to);
            }
            std::fill(to + n_visible, to + layout.n_columns, unseen_value(kind));
            sink.finish(j, to);
        }
        sink.end_query(1);
    }
}

void finish_group(const attend_op& op, ggml_tensor* node, const division& work,
                  const work_item& item, int ith) {
    auto& sums = per_thread<std::vector<softmax_sum>>();
    sums.clear();
    for (int token = item.token_begin; token < item.token_end; ++token) {
        for (int head = 0; head < work.n_heads; ++head) {
            auto* const to = static_cast<std::byte*>(node->data) + zu(item.stream) * node->nb[3] +
                             zu(token) * node->nb[2] + zu(head) * node->nb[1];
            sums.push_back(
                join_chunks(op, node, work, item.place(token), head, reinterpret_cast<float*>(to)));
        }
    }
    if (op.edits) edit_heads(*op.edits, node, item.stream, item.token_begin, item.token_end);
    auto& rows = per_thread<stream_rows>();
    find_rows(op, work, item.stream, rows);
    for (const auto& wanted : rows) finish_rows(op, work, item, rows, wanted, sums, ith);
}

void run_attend_op(ggml_tensor* node, int ith, int nth, void* data) {
    auto& op = *static_cast<attend_op*>(data);
    const division work(op, node, nth);
    auto& scratch = op.table.scratch[zu(ith)];
    for (int i; (i = op.next_item.fetch_add(1, std::memory_order_relaxed)) < work.n_items();) {
        // The last queries see most: nobody begins them when the others have ended.
        work_item item(work, work.is_whole ? work.n_items() - 1 - i : i, ith);
        if (work.is_whole) {
            for (int h = 0; h < work.n_heads_kv; ++h) {
                item.head_begin = h, item.head_end = h + 1;
                attend_item(op, node, work, item, scratch);
            }
            finish_group(op, node, work, item, ith);
            continue;
        }
        attend_item(op, node, work, item, scratch);
        const int n = op.n_done[zu(item.group)].fetch_add(1, std::memory_order_acq_rel) + 1;
        if (n == work.items_per_group()) finish_group(op, node, work, item, ith);
    }
}

bool is_readable(const ggml_tensor* cells) {
    return cells->nb[0] == ggml_type_size(cells->type) &&
           (cells->type == GGML_TYPE_F32 || ggml_get_type_traits(cells->type)->to_float);
}

}  // namespace

void attend_memory::prepare(const row_table& table, int n_streams, int n_tokens) {
    row_floats = 0;
    pieces.clear();
    for (const auto& target : table.targets) {
        const auto& plan = *target.plan;
        const int n_columns = target.layout.n_columns;
        pieces.push_back(plan.is_sums() ? plan.spans().pieces(n_columns, attend_tile)
                                        : std::vector<cut_ranges::piece>{});
        if (is_finished_in_place(target)) continue;
        std::size_t n_heads = 0;
        for (const auto& layer : plan.layers()) n_heads = std::max(n_heads, layer.heads.size());
        const auto n_values = plan.is_sums() ? pieces.back().size() : zu(n_columns);
        row_floats = std::max(row_floats, n_heads * n_values);
    }
    n_of_run = most_of_run;
    if (row_floats > 0) {
        n_of_run = static_cast<int>(
            std::clamp(row_floats_of_run / row_floats, std::size_t{1}, zu(most_of_run)));
    }
    n_row_places = n_tokens > most_shared_queries
                       ? static_cast<int>(table.scratch.size()) * n_of_run
                       : n_streams * n_tokens;
    const auto n = zu(n_row_places) * row_floats;
    if (rows.size() < n) rows.resize(n);
}

attend_op::attend_op(const attention_site& of, row_table& rows, attend_memory& shared)
    : site(of),
      table(rows),
      memory(shared),
      n_done(zu(of.n_stream) * zu(static_cast<int>(of.flash->src[0]->ne[1]))) {}

void attend_op::begin() noexcept {
    next_item.store(0, std::memory_order_relaxed);
    for (auto& n : n_done) n.store(0, std::memory_order_relaxed);
}

bool can_attend(const attention_site& site) {
    const auto* const flash = site.flash;
    if (!flash || flash->op != GGML_OP_FLASH_ATTN_EXT || site.gathered || site.n_extra_cells > 0)
        return false;
    const auto* const q = flash->src[0];
    const auto* const k = cast_source(flash->src[1]);
    const auto* const v = cast_source(flash->src[2]);
    const auto* const mask = flash->src[3];
    const bool has_common_layout = q->ne[2] == site.n_head && k->ne[2] == site.n_head_kv &&
                                   v->ne[2] == site.n_head_kv && q->ne[3] == site.n_stream &&
                                   k->ne[3] == site.n_stream && v->ne[3] == site.n_stream;
    return has_common_layout && q->ne[1] <= most_attended_queries() && q->type == GGML_TYPE_F32 &&
           q->nb[0] == sizeof(float) && is_readable(k) && is_readable(v) &&
           (!mask || ((mask->ne[2] == 1 || site.heads_per_mask == 1) &&
                      (mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32)));
}

void replace_flash(attend_op& op, int n_threads) {
    ggml_tensor* const node = op.site.flash;
    for (const int i : {1, 2}) {
        ggml_tensor* const cast = node->src[i];
        node->src[i] = cast_source(cast);
        if (node->src[i] != cast) cast->op = GGML_OP_NONE;
    }
    op.site.k_strides = strides_of(node->src[1]);
    op.v_strides = strides_of(node->src[2]);
    auto& memory = op.memory;
    for (int n = 1; n <= n_threads; ++n) {
        const division work(op, node, n);
        const int n_places = work.is_whole ? n * most_of_run : work.n_streams * work.n_tokens;
        const auto n_heads = zu(n_places) * zu(work.n_heads);
        memory.partials.resize(
            std::max(memory.partials.size(), n_heads * zu(work.n_chunks) * work.partial_size()));
        memory.row_max.resize(std::max(memory.row_max.size(), n_heads * zu(work.n_tiles)));
    }
    // As ggml_custom_4d sets a node's parameters.
    const struct {
        ggml_custom_op_t run;
        int n_tasks;
        void* data;
    } parameters{run_attend_op, GGML_N_TASKS_MAX, &op};
    static_assert(sizeof parameters <= sizeof node->op_params);
    node->op = GGML_OP_CUSTOM;
    std::memcpy(node->op_params, &parameters, sizeof parameters);
}

}  // namespace kqview
