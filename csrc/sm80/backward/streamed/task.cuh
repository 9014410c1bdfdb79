// The work of a CTA: a tile of 64 keys, or of 64 query rows, of a sequence, and the part of a gradient's columns that
// it computes for them. One thread finds it in the lists of tiles (SequenceTiles) and leaves it in shared memory.
#pragma once

#include "core/head_mask.cuh"
#include "core/mask.cuh"
#include "core/sequence_tiles.cuh"
#include "sm80/streaming/pipeline.cuh"
#include "tile.h"

namespace flash_cute::sm80::backward::streamed {

// What a CTA owns, and loops over the other side.
enum class Side { kKeys, kQueries };

// Rows of a tensor, of some heads: (rows, columns, head).
template <class Element>
struct Operand {
  Element const* first;  // row 0, of the first head
  int64_t row_stride;    // in elements
  int64_t head_stride;
  int rows;
  int columns;

  CUTE_DEVICE streaming::Rows<Element> from(int head, int row, int column) const {
    return streaming::Rows<Element>{first + head * head_stride, row_stride, rows, columns}.from(row, column);
  }
};

// The scores are left[0] right[0]^T, and dP, where it is needed, left[1] right[1]^T.
template <class Element>
struct Task {
  Operand<Element> left[2];   // this side: the tile's rows
  Operand<Element> right[2];  // the other side: all rows of the sequence
  Operand<Element> x;         // the gradient is the sum of W x; from the part's first column on
  Element* gradient;          // of the tile's row 0, from the part's first column on
  int64_t gradient_stride;
  int gradient_rows;  // from the tile's first one on, that are written
  int tile;           // in the sequence; -1: the CTA has none
  Sequence sequence;
  TileRange others;     // the tiles of the other side; empty: the gradient is 0
  int index;            // of the sequence
  int head;             // the first query head
  int heads;            // query heads that the CTA loops over
  int first_statistic;  // among those of a head, of the sequence's row 0
  int chunks;           // of the scores
  int score_steps;      // chunks of the scores and of dP, if that is needed

  CUTE_DEVICE bool needs_dp() const { return score_steps > chunks; }

  // `heads` by a constant, where it is one.
  template <Side kSide>
  CUTE_DEVICE int loop_heads() const {
    return kSide == Side::kKeys ? heads : 1;
  }
};

// The tensors of a sequence.
template <class Element>
struct SequenceOperands {
  BwdParams const& params;
  int index;
  Sequence sequence;
  int head;  // the first query head
  int head_kv;

  CUTE_DEVICE Operand<Element> rows(void const* base, Strides const& strides, int columns) const {
    return make(base, strides, sequence.first_row, head, sequence.len_q, columns);
  }
  CUTE_DEVICE Operand<Element> keys(void const* base, Strides const& strides, int columns) const {
    return make(base, strides, sequence.first_key, head_kv, sequence.len_k, columns);
  }
  CUTE_DEVICE Operand<Element> q() const { return rows(params.q, params.q_strides, params.head_dim); }
  CUTE_DEVICE Operand<Element> dout() const { return rows(params.dout, params.dout_strides, params.head_dim_v); }
  CUTE_DEVICE Operand<Element> k() const { return keys(params.k, params.k_strides, params.head_dim); }
  CUTE_DEVICE Operand<Element> v() const { return keys(params.v, params.v_strides, params.head_dim_v); }

 private:
  CUTE_DEVICE Operand<Element> make(void const* base, Strides const& strides, int first, int first_head, int rows,
                                    int columns) const {
    return {.first = static_cast<Element const*>(base) + sequence_offset(params, strides, index, first, first_head),
            .row_stride = strides.row,
            .head_stride = strides.head,
            .rows = rows,
            .columns = columns};
  }
};

template <class Element>
CUTE_DEVICE Operand<Element> from_row(Operand<Element> operand, int row) {
  operand.first += row * operand.row_stride;
  operand.rows -= row;
  return operand;
}
template <class Element>
CUTE_DEVICE Operand<Element> from_column(Operand<Element> operand, int column, int columns) {
  operand.first += column;
  operand.columns = min(columns, operand.columns - column);
  return operand;
}

// Of dK, and then of dV: `part` counts the parts of both.
template <class Element>
CUTE_DEVICE void find_keys_task(BwdParams const& params, int rank, int part, Task<Element>& task) {
  task.tile = -1;
  int const index = sequence_of_rank(params, rank);
  if (index < 0) return;
  SequenceRecord const& record = params.tiles.records[index];
  Sequence const sequence = record.sequence;
  auto const one_head_after_the_other = [](int /*n_blocks*/) { return 1; };
  ListedKeyTile const listed = listed_key_tile<kTileRows, kTileRows>(params, record, rank, one_head_after_the_other);
  int const first_key = listed.n_block * kTileRows, head = listed.head_kv * params.heads_per_kv;
  SequenceOperands<Element> const tensors{params, index, sequence, head, listed.head_kv};
  TileRange others = row_range<kOtherRows, kTileRows>(sequence, listed.n_block);
  if (first_key >= sequence.len_k) others.end = others.begin;
  if (has_mask(params.mask) && others.begin < others.end) {
    HeadMask const mask(params.mask, index, listed.head_kv, sequence.len_q, sequence.len_k);
    others = listed_range(mask.row_units_of(listed.n_block), params.mask.of_keys.words, kOtherRows / kTileRows);
  }

  int const parts_of_dk = streaming::column_parts(params.head_dim);
  bool const is_dk = part < parts_of_dk;
  int const columns = streaming::part_columns(is_dk ? params.head_dim : params.head_dim_v);
  int const column = (is_dk ? part : part - parts_of_dk) * columns;
  Strides const& strides = is_dk ? params.dk_strides : params.dv_strides;
  Element* const gradient = static_cast<Element*>(is_dk ? params.dk : params.dv) +
                            sequence_offset(params, strides, index, sequence.first_key, listed.head_kv);
  int const chunks = streaming::num_chunks(params.head_dim);
  task = {.left = {from_row(tensors.k(), first_key), from_row(tensors.v(), first_key)},
          .right = {tensors.q(), tensors.dout()},
          .x = from_column(is_dk ? tensors.q() : tensors.dout(), column, columns),
          .gradient = gradient + first_key * strides.row + column,
          .gradient_stride = strides.row,
          .gradient_rows = record.keys - first_key,
          .tile = listed.n_block,
          .sequence = sequence,
          .others = others,
          .index = index,
          .head = head,
          .heads = params.heads_per_kv,
          .first_statistic = record.first_row_tile * kTileRows,
          .chunks = chunks,
          .score_steps = is_dk ? gradient_chunks(params.head_dim, params.head_dim_v) : chunks};
}

// Of dQ. The last row tile of a head comes first: with a causal mask the longest.
template <class Element>
CUTE_DEVICE void find_queries_task(BwdParams const& params, int number, int part, Task<Element>& task) {
  task.tile = -1;
  int const head = number / params.m_blocks, from_last = number - head * params.m_blocks;
  ListedRowTile const listed = listed_row_tile(params, head * params.m_blocks + params.m_blocks - 1 - from_last);
  if (!listed.exists) return;
  SequenceRecord const& record = params.tiles.records[listed.index];
  Sequence const sequence = record.sequence;
  int const first_row = listed.m_block * kTileRows;
  SequenceOperands<Element> const tensors{params, listed.index, sequence, head, head / params.heads_per_kv};
  TileRange others = key_range<kTileRows, kOtherRows>(sequence, listed.m_block);
  if (first_row >= sequence.len_q) others.end = others.begin;
  if (has_mask(params.mask) && others.begin < others.end) {
    HeadMask const mask(params.mask, listed.index, tensors.head_kv, sequence.len_q, sequence.len_k);
    others = listed_range(mask.key_tiles_of(listed.m_block), params.mask.of_rows.words, kOtherRows / kTileRows);
  }

  int const columns = streaming::part_columns(params.head_dim), column = part * columns;
  Strides const& strides = params.dq_strides;
  Element* const gradient = static_cast<Element*>(params.dq) +
                            sequence_offset(params, strides, listed.index, sequence.first_row, head);
  task = {.left = {from_row(tensors.q(), first_row), from_row(tensors.dout(), first_row)},
          .right = {tensors.k(), tensors.v()},
          .x = from_column(tensors.k(), column, columns),
          .gradient = gradient + first_row * strides.row + column,
          .gradient_stride = strides.row,
          .gradient_rows = sequence.rows - first_row,
          .tile = listed.m_block,
          .sequence = sequence,
          .others = others,
          .index = listed.index,
          .head = head,
          .heads = 1,
          .first_statistic = record.first_row_tile * kTileRows,
          .chunks = streaming::num_chunks(params.head_dim),
          .score_steps = gradient_chunks(params.head_dim, params.head_dim_v)};
}

}  // namespace flash_cute::sm80::backward::streamed
