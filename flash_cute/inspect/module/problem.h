// One call as the kernels are given it, and what runs on it here: the order of tiles and the mask.
#pragma once

#include "host.h"

#include "core/layout.cuh"
#include "core/mask.cuh"
#include "contract/params.h"
#include "registry.h"

namespace inspect {

template <class Params>
Params params_of(Problem const& problem) {
  Params params{};
  params.batch = problem.batch;
  params.heads_q = problem.heads_q;
  params.heads_kv = problem.heads_kv;
  params.len_q = problem.len_q;
  params.len_k = problem.len_k;
  params.head_dim = problem.head_dim;
  params.band = {problem.lower, problem.upper};
  return params;
}

inline bool is_masked(flash_cute::Band const& band) { return band.has_lower() || band.has_upper(); }

// A tile's columns in a schedule: where it is, and its range of key tiles.
inline void append(Array& array, flash_cute::RowTileCoord const& tile, flash_cute::TileRange const& range) {
  array.data.insert(array.data.end(), {tile.m_block, tile.head, tile.batch, range.begin, range.whole_begin,
                                       range.whole_end, range.end});
}

// The mask of one tile, applied by every thread of `Mma` to its own scores, as the kernels do: in kCalls pieces of
// kRows rows (of the warpgroups, or of a step's parts, or of a cluster's CTAs) times kColumnCalls pieces of kColumns
// keys; with kTransposed the product's first mode is the keys.
template <class Params, bool kTransposed, class Mma, int kThreads, int kCalls, int kRows, int kColumns,
          int kColumnCalls = 1>
Array masked(Problem const& problem, int m_block, int n_block) {
  using namespace cute;
  auto const params = params_of<Params>(problem);
  constexpr auto kShape = [] {
    if constexpr (kTransposed) {
      return Shape<Int<kColumns>, Int<kRows>>{};
    } else {
      return Shape<Int<kRows>, Int<kColumns>>{};
    }
  }();
  constexpr int kTileRows = kCalls * kRows, kTileColumns = kColumnCalls * kColumns;
  Mma mma;
  auto const cS = make_identity_tensor(kShape);
  auto const tScS_0 = flash_cute::rowcol_view(mma.get_slice(_0{}).partition_C(cS));
  Array array{{kTileRows, kTileColumns}, std::vector<int>(kTileRows * kTileColumns)};
  for (int piece = 0; piece < kCalls * kColumnCalls; ++piece) {
    int const first_row = piece % kCalls * kRows, first_column = piece / kCalls * kColumns;  // in the tile
    int const row = m_block * kTileRows + first_row, column = n_block * kTileColumns + first_column;
    for (int thread = 0; thread < kThreads; ++thread) {
      auto tSrS = partition_fragment_C(mma, kShape);
      clear(tSrS);
      auto scores = flash_cute::rowcol_view(tSrS);
      auto const tScS = flash_cute::rowcol_view(mma.get_slice(thread).partition_C(cS));
      if constexpr (kTransposed) {
        flash_cute::apply_mask_transposed(scores, tScS, tScS_0, params, row, column);
      } else {
        flash_cute::apply_mask(scores, tScS, tScS_0, params, row - column, params.len_k - column);
      }
      for (int i = 0; i < size(scores); ++i) {
        int const in_row = first_row + get<kTransposed ? 1 : 0>(tScS(i));
        int const in_column = first_column + get<kTransposed ? 0 : 1>(tScS(i));
        array.data[in_row + kTileRows * in_column] += 1000 + (scores(i) < 0.f);
      }
    }
  }
  return array;
}

}  // namespace inspect
