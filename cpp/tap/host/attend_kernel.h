// Arithmetic of decode attention on the CPU: scores, softmax and the weighted sum of values for all
// query heads that share a KV head, in one walk over its cells. Rows of attention are what the
// scores leave behind. The softmax is the online one of FlashAttention (Dao et al., 2022), with
// float32 sums. Stateless; called by ggml's compute threads.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <limits>
#include <span>

#include "tap/host/row_kernel.h"
#include "tap/plan.h"

namespace kqview {

constexpr int attend_tile = 64;  // cells of one call; a multiple of every vector width

// Queries of a stream with which this is at least as fast as llama.cpp's flash attention, which
// works on blocks of queries from 64 on: with vectors of 8 or 16 lanes, any number.
int most_attended_queries();

// The mask of one query over a tile.
struct tile_mask {
    mask_row row;
    int n_seen =
        attend_tile;  // cells up to the last one that the query sees; 0: nothing to do there
};
tile_mask read_tile_mask(const void* data, ggml_type type, int n_cells);

// One query head on its way over the cells: what it asks, and what it has found so far.
struct attended_head {
    const float* q = nullptr;          // n_embd of the keys
    const tile_mask* mask = nullptr;   // of the tile
    float slope = 1.0f;                // of the mask's bias
    float* row = nullptr;              // its row's values of the tile; null: no row is wanted
    float* row_max = nullptr;          // of probs: what the tile's values are relative to
    int n_row = 0;                     // cells of the tile that are columns of the row, or pieces
    bool streams_row = false;          // past the caches: end_rows() before anybody reads it
    row_kind kind = row_kind::logits;  // of the row; probs are exp(score - row_max)
    const cut_ranges::piece* pieces = nullptr;  // not null: the row has their sums, n_row of them
    float max = -std::numeric_limits<float>::infinity();  // largest score
    float sum = 0.0f;                                     // of exp(score - max)
    float tile_sum = 0.0f;                                // the same of the last tile alone
    float* values = nullptr;  // sum of exp(score - max) * value, n_embd of the values
};

// A tile of one KV head. `data` of keys and values is that of the tile's first cell.
struct cell_tile {
    key_rows keys;
    key_rows values;
    int n_cells;
    next_cells next_keys = {};  // read after the tile, a row for each of its cells
    next_cells next_values = {};
};

// Adds a tile to what the heads have found.
void attend(const cell_tile& tile, float scale, float softcap, attended_head* heads, int n_heads,
            row_scratch& scratch);

// The same, cell by cell and with plain loops, for tests.
void attend_scalar(const cell_tile& tile, float scale, float softcap, attended_head* heads,
                   int n_heads);

// What a query head found in one run of cells: the largest score, the sum, and the values.
struct softmax_sum {
    float max;
    float sum;
};
// Joins what a query head found in `n_runs` runs of cells, each {max, sum, n_values values}, into
// its output. `sink`: a logit that counts in the sum alone; -inf for none.
softmax_sum join_partials(const float* partials, int n_runs, int n_values, float sink, float* to);

// Adds up what `attend` leaves of pieces of probs, scaled as by finish_probs: segments[i] becomes
// the sum of those of segment i.
void finish_pieces(const float* sums, std::span<const cut_ranges::piece> pieces,
                   const float* row_max, const softmax_sum& all, std::span<double> segments);

// After the last tile of rows that are streamed, on the thread that wrote them.
void end_rows();

// Turns a row of probs as `attend` leaves it into probabilities in `to`, which may be the row:
// column c of tile t is scaled by exp(row_max[t] - max) / sum. Streams them if they are elsewhere.
void finish_probs(const float* row, int n_columns, const float* row_max, const softmax_sum& all,
                  float* to);

}  // namespace kqview
