// Attention over a KV cache: the parameters of its kernels, the plan, and how the keys of a sequence are cut.
//
// Rows of a sequence are packed: row r is of position r / group and of query head r % group of the KV head, so that the
// query heads that share keys read them once. A unit of work is a row tile of one sequence and one KV head. Its key
// tiles are cut into pieces by a rule that knows the sequence alone (piece_tiles), and each piece has a softmax of its
// own. The result is the fold of the pieces from the first to the last, whoever computes them: so the bits of a
// sequence depend neither on the batch nor on the number of multiprocessors.
//
// A bundle of CTAs, one for each KV head, walks a contiguous range of the pieces of all units, in the order of
// sequences. The ranges hold equal numbers of key tiles, to a piece. A unit whose pieces lie in one range is finished
// by its CTA. Of the others the parts go to the workspace: the fold of the pieces from the first on, or each piece by
// itself; and a second kernel folds them.
//
// Where the bits may depend on the batch, a family may cut units where the ranges end, and nowhere else: a CTA has one
// piece of a unit then, and folds nothing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvcache.h"
#include "params.h"
#include "plan.h"

namespace flash_cute {

constexpr int kFewRows = 16;   // a sequence of at most so many rows has one row tile, whose keys four warps share
constexpr int kManyRows = 64;  // else a row tile has so many rows, 16 for each warp

// `many`: of a family whose row tiles have another number of rows then.
constexpr int rows_of_tile(int rows, int many = kManyRows) { return rows <= kFewRows ? kFewRows : many; }

constexpr int kLeastPieceKeys = 256;

// Pieces of a unit, at most: about as many as a large chip has CTAs for a KV head, so that each has one where there is
// one sequence.
constexpr int most_pieces(int heads_kv, int ctas_per_sm) {
  return std::clamp(128 * ctas_per_sm / std::max(1, heads_kv), 8, 256);
}

// The key tiles of each piece but perhaps the last. `most`: of pieces.
constexpr int piece_tiles(int tiles, int tile_keys, Divisor const& most) {
  int const least = kLeastPieceKeys / tile_keys, even = (tiles + most - 1) / most;
  return even > least ? even : least;
}

// The tiles of a range where ranges are rounded: at most a thirtieth more than needed, and a multiple of as large a
// power of two as there is. So ranges tend to end where sequences and pieces do.
constexpr int rounded_range(int total, Divisor const& bundles) {
  int const needed = (total + bundles - 1) / bundles, most = needed + needed / 30;
  int step = 1;
  while (step <= most / 2 && (most & -2 * step) >= needed) step *= 2;
  return most & -step;
}

struct DecodeParams {
  void const* q;  // (batch, heads_q, len_q, head_dim), or packed (heads_q, len_q, head_dim)
  void const* k;  // (pages, heads_kv, page_size, head_dim)
  void const* v;  // (pages, heads_kv, page_size, head_dim_v)
  void* out;      // as q, of head_dim_v
  float* lse;     // (batch, heads_q, len_q) or (heads_q, len_q), contiguous
  float* parts;   // workspace: (bundles, heads_kv, part_rows, head_dim_v + 2), see Part

  Strides q_strides;  // packed: batch 0
  Strides out_strides;
  CacheStrides k_strides;
  CacheStrides v_strides;

  PageTable table;
  int const* cache_seqlens;  // (batch): keys before the append; null: the capacity. Below 0: the sequence has no keys
  int const* cu_q;           // (batch + 1): packed; null: each sequence has len_q rows
  int new_keys;              // that were appended to each sequence; kAsRows: as many as it has rows

  int batch;
  int heads_q;
  Divisor heads_kv;
  Divisor group;  // heads_q / heads_kv
  int len_q;  // rows of a sequence, packed of all of them; > 0
  int head_dim;
  int head_dim_v;

  // Of caches of float8; by KV head.
  bool k_is_e5m2;  // else e4m3fn; each tensor has its own
  bool v_is_e5m2;
  Descale descale_k;
  Descale descale_v;

  int window_left;    // keys that a row sees before its position; kNoLimit: all
  int window_right;   // behind it
  bool bottom_right;  // row i of a sequence has the position i + its keys - its rows, else i
  float scale_log2;
  Sinks sinks;
  ScoreTerms score;

  int long_rows;  // sequences of so many rows of a head and more are those of another kernel, see LongRows; 0: none
  FwdParams const* forward;  // on the host, for the launch of row-invariant forwards, which have no cache; else null
  Divisor bundles;
  Divisor most_pieces;
  int many_rows;  // of a row tile of a sequence of more than kFewRows rows
  int part_rows;  // of a bundle: of a fold from the first piece on, and of the most pieces of a unit
  int slot_rows;  // of a part, at most
  bool cut_at_ranges;  // units have their pieces where the ranges end
};

constexpr int kAsRows = -1;

// Sequences of many rows, as a prefill has them, are computed as a forward computes them: a CTA has a row tile of one
// query head and all its keys. Which sequences are long depends on their rows and the number of heads alone, not on the
// batch nor on the GPU, as the bits of a result do.
struct LongRows {
  static constexpr int kTileRows = 192;  // about as many as the row tiles of the kernels have
  static constexpr int kLeast = 512;     // below, too many rows of the last tile would be of none
  static constexpr int kTiles = 88;      // of a sequence, two thirds of a Hopper chip: below, too many CTAs would idle

  static constexpr int least(int heads_q) {
    return std::max(kLeast, ((kTiles + heads_q - 1) / std::max(1, heads_q) - 1) * kTileRows + 1);
  }
};
static_assert(LongRows::least(32) == 512 && LongRows::least(8) == 1921);

struct DecodePlan {
  char const* family;  // null: the instance's
  char const* kernel;
  DType dtype;        // of q
  bool float8_cache;  // else of q's
  int head_dim;
  int head_dim_v;
  KernelShape shape;  // block_m: kFewRows or many_rows, where all sequences have equally many rows
  int64_t ctas;
  int bundles;
  int most_pieces;
  int many_rows;
  int part_rows;
  int slot_rows;
  bool cut_at_ranges;
  int64_t workspace_bytes;
  int long_rows;      // see DecodeParams; 0: no sequence has so many
  int64_t long_ctas;  // of the kernel of those
  int num_sms;        // that the plan counts with
};

}  // namespace flash_cute
