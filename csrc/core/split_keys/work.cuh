// Which pieces of which sequences a bundle of CTAs computes, see contract/decode.h. Every warp finds that by itself.
#pragma once

#include <cute/tensor.hpp>

#include "contract/decode.h"

namespace flash_cute::split_keys {

using namespace cute;

// The rows of a sequence, and its keys that one of them sees: [first_key, key_limit), perhaps none.
struct CacheSequence {
  int first_row;  // of q
  int len_q;
  int len_k;
  int first_key;
  int key_limit;
};

// Row i of a sequence sees the keys [first_seen, seen_limit), where the latter is above the former.
CUTE_DEVICE int position_of(DecodeParams const& params, CacheSequence const& sequence, int i) {
  return params.bottom_right ? i + sequence.len_k - sequence.len_q : i;
}
CUTE_DEVICE int first_seen(DecodeParams const& params, CacheSequence const& sequence, int i) {
  return max(0, position_of(params, sequence, i) - params.window_left);
}
CUTE_DEVICE int seen_limit(DecodeParams const& params, CacheSequence const& sequence, int i) {
  return min(sequence.len_k, position_of(params, sequence, i) + params.window_right + 1);
}

CUTE_DEVICE int keys_of(DecodeParams const& params, int batch, int rows) {
  int const before = params.cache_seqlens == nullptr ? params.table.capacity : params.cache_seqlens[batch];
  if (before < 0) return 0;
  int const added = params.new_keys == kAsRows ? rows : params.new_keys;
  return min(params.table.capacity, min(params.table.capacity, before) + min(params.table.capacity, added));
}

CUTE_DEVICE CacheSequence make_sequence(DecodeParams const& params, int batch, int first_row, int rows) {
  CacheSequence sequence{.first_row = first_row, .len_q = rows, .len_k = keys_of(params, batch, rows)};
  sequence.first_key = first_seen(params, sequence, 0);
  sequence.key_limit = seen_limit(params, sequence, max(0, rows - 1));
  return sequence;
}

// Offsets count as ascending, and are clamped to the rows that there are: `floor` is the largest one before.
CUTE_DEVICE int row_offset(DecodeParams const& params, int batch, int floor) {
  return max(floor, min(max(params.cu_q[batch], 0), params.len_q));
}

// How a family cuts the rows and keys of sequences; a unit's CTAs and the merge must do it alike. `rows`: of the
// sequence, packed.
template <int kTileKeys_>
struct PlainCut {
  static constexpr int kTileKeys = kTileKeys_;
  CUTE_DEVICE static int tile_rows(DecodeParams const&, int rows) { return rows_of_tile(rows); }
  CUTE_DEVICE static int piece_tiles(DecodeParams const& params, int /*rows*/, int tiles) {
    return flash_cute::piece_tiles(tiles, kTileKeys, params.most_pieces);
  }
};

// The key tiles [begin, end) of a sequence, in pieces.
struct Pieces {
  int begin;
  int end;
  int tiles;  // of a piece
  int count;  // at least one, which is empty where there is no key

  template <class Cut>
  CUTE_DEVICE static Pieces of(DecodeParams const& params, CacheSequence const& sequence) {
    constexpr int kTileKeys = Cut::kTileKeys;
    Pieces pieces{.begin = sequence.first_key / kTileKeys, .end = ceil_div(max(0, sequence.key_limit), kTileKeys)};
    if (sequence.first_key >= sequence.key_limit) pieces.end = pieces.begin;
    int const tiles = pieces.end - pieces.begin;
    pieces.tiles = Cut::piece_tiles(params, sequence.len_q * params.group, tiles);
    pieces.count = max(1, ceil_div(tiles, pieces.tiles));
    return pieces;
  }

  // What a unit of them counts as, in key tiles.
  CUTE_DEVICE int weight() const { return max(1, end - begin); }
};

template <class Cut>
CUTE_DEVICE int row_tiles_of(DecodeParams const& params, CacheSequence const& sequence) {
  int const rows = sequence.len_q * params.group;
  return ceil_div(rows, Cut::tile_rows(params, rows));
}

// The work before a place in the order of sequences.
struct Place {
  int batch;
  int floor;      // the first row of q that no sequence before has
  int64_t weight;  // of the units before
};

// The first sequence whose units end behind `target`, or sequence `stop` if that comes first, and what is before it; or
// the batch and the weight of all. By all lanes of a warp.
template <class Cut>
CUTE_DEVICE Place find_place(DecodeParams const& params, int64_t target, int stop = -1) {
  constexpr uint32_t kAll = 0xffffffff;
  int const lane = threadIdx.x % 32;
  Place place{};
#pragma unroll 1
  for (; place.batch < params.batch; place.batch += 32) {
    int const batch = place.batch + lane;
    bool const exists = batch < params.batch;
    int first_row = 0, rows = exists ? params.len_q : 0;
    if (params.cu_q != nullptr) {
      first_row = row_offset(params, min(batch, params.batch), place.floor);
      CUTE_UNROLL
      for (int i = 1; i < 32; i *= 2) {
        int const other = __shfl_up_sync(kAll, first_row, i);
        if (lane >= i) first_row = max(first_row, other);
      }
      rows = exists ? row_offset(params, batch + 1, first_row) - first_row : 0;
    }
    int64_t weight = 0;
    if (exists && rows > 0) {
      CacheSequence const sequence = make_sequence(params, batch, first_row, rows);
      weight = int64_t{row_tiles_of<Cut>(params, sequence)} * Pieces::of<Cut>(params, sequence).weight();
    }
    int64_t sum = weight;  // with those of the lanes before
    CUTE_UNROLL
    for (int i = 1; i < 32; i *= 2) {
      int64_t const other = __shfl_up_sync(kAll, sum, i);
      if (lane >= i) sum += other;
    }
    uint32_t const behind = __ballot_sync(kAll, exists && (place.weight + sum > target || batch == stop));
    if (behind != 0) {
      int const found = __ffs(behind) - 1;
      place.batch += found;
      place.floor = __shfl_sync(kAll, first_row, found);
      place.weight += __shfl_sync(kAll, sum - weight, found);
      return place;
    }
    place.floor = __shfl_sync(kAll, first_row, 31);
    place.weight += __shfl_sync(kAll, sum, 31);
  }
  place.batch = params.batch;
  return place;
}

// Where the range of a bundle begins, in key tiles; and the bundle in whose range a tile is.
CUTE_DEVICE int64_t range_begin(DecodeParams const& params, int64_t total, int bundle) {
  return total * bundle / params.bundles;
}
CUTE_DEVICE int bundle_of(DecodeParams const& params, int64_t total, int64_t tile) {
  return int(((tile + 1) * params.bundles - 1) / total);
}

// A unit, and the pieces of it that a bundle computes.
struct Unit {
  int bundle;
  int head_kv;
  int batch;
  CacheSequence sequence;
  int row_tile;
  int first_row;  // of the packed rows of the sequence
  int rows;       // 0: there is no unit
  int tile_rows;  // of the sequence's row tiles but perhaps the last
  Pieces pieces;
  int piece_begin;
  int piece_end;
  // The keys that some row sees, and those that every row does: [begin, end), where the latter is above the former.
  int seen_begin;
  int seen_end;
  int whole_begin;
  int whole_end;
  // The key tiles of those that some row sees.
  int tile_begin;
  int tile_end;

  CUTE_DEVICE bool has_first() const { return piece_begin == 0; }
  CUTE_DEVICE bool has_last() const { return piece_end == pieces.count; }

  // The key tiles of a piece that are seen: [begin, end).
  CUTE_DEVICE int begin_of(int piece) const { return max(tile_begin, pieces.begin + piece * pieces.tiles); }
  CUTE_DEVICE int end_of(int piece) const {
    return min(tile_end, min(pieces.end, pieces.begin + (piece + 1) * pieces.tiles));
  }
};

// The rows of a row tile, and the key tiles that they see.
template <class Cut>
CUTE_DEVICE void set_rows(DecodeParams const& params, Unit& unit) {
  constexpr int kTileKeys = Cut::kTileKeys;
  CacheSequence const& sequence = unit.sequence;
  int const rows = sequence.len_q * params.group;
  unit.tile_rows = Cut::tile_rows(params, rows);
  unit.first_row = unit.row_tile * unit.tile_rows;
  unit.rows = min(unit.tile_rows, rows - unit.first_row);
  int const first = unit.first_row / params.group, last = (unit.first_row + unit.rows - 1) / params.group;
  unit.seen_begin = first_seen(params, sequence, first);
  unit.seen_end = seen_limit(params, sequence, last);
  unit.whole_begin = first_seen(params, sequence, last);
  unit.whole_end = seen_limit(params, sequence, first);
  unit.tile_begin = unit.seen_begin / kTileKeys;
  unit.tile_end = unit.seen_begin < unit.seen_end ? ceil_div(unit.seen_end, kTileKeys) : unit.tile_begin;
}

// The units of a bundle's range, one after the other.
template <class Cut>
class Walk {
 public:
  CUTE_DEVICE Walk(DecodeParams const& params, int bundle, int head_kv) : params_(params) {
    unit_.bundle = bundle;
    unit_.head_kv = head_kv;
    int64_t const total = find_place<Cut>(params, INT64_MAX).weight;
    begin_ = range_begin(params, total, bundle);
    end_ = range_begin(params, total, bundle + 1);
    place_ = begin_ < end_ ? find_place<Cut>(params, begin_) : Place{.batch = params.batch};
    if (place_.batch < params.batch) enter_sequence();
    if (place_.batch < params.batch) unit_.row_tile = int((begin_ - place_.weight) / unit_.pieces.weight()) - 1;
  }

  // Goes to the next unit that has pieces in the range.
  CUTE_DEVICE bool next() {
    while (place_.batch < params_.batch) {
      ++unit_.row_tile;
      if (unit_.row_tile >= row_tiles_) {
        place_.weight += int64_t{row_tiles_} * unit_.pieces.weight();
        place_.floor = unit_.sequence.first_row + unit_.sequence.len_q;
        ++place_.batch;
        enter_sequence();
        unit_.row_tile = -1;
        continue;
      }
      int64_t const first = place_.weight + int64_t{unit_.row_tile} * unit_.pieces.weight();
      if (first >= end_) return false;
      auto const pieces_before = [&](int64_t tile) {
        int64_t const tiles = max(int64_t{0}, tile - first);
        return int(min(int64_t{unit_.pieces.count}, (tiles + unit_.pieces.tiles - 1) / unit_.pieces.tiles));
      };
      unit_.piece_begin = pieces_before(begin_);
      unit_.piece_end = pieces_before(end_);
      if (unit_.piece_begin >= unit_.piece_end) continue;
      unit_.batch = place_.batch;
      set_rows<Cut>(params_, unit_);
      return true;
    }
    return false;
  }

  CUTE_DEVICE Unit const& unit() const { return unit_; }

 private:
  // The first sequence from place_ on that has rows.
  CUTE_DEVICE void enter_sequence() {
    for (; place_.batch < params_.batch; ++place_.batch) {
      int first_row = 0, rows = params_.len_q;
      if (params_.cu_q != nullptr) {
        first_row = row_offset(params_, place_.batch, place_.floor);
        rows = row_offset(params_, place_.batch + 1, first_row) - first_row;
        place_.floor = first_row;
      }
      if (rows == 0) continue;
      unit_.sequence = make_sequence(params_, place_.batch, first_row, rows);
      unit_.pieces = Pieces::of<Cut>(params_, unit_.sequence);
      row_tiles_ = row_tiles_of<Cut>(params_, unit_.sequence);
      return;
    }
  }

  DecodeParams const& params_;
  int64_t begin_;
  int64_t end_;
  Place place_;
  Unit unit_;
  int row_tiles_ = 0;
};

}  // namespace flash_cute::split_keys
