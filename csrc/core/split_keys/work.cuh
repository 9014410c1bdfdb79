// Which pieces of which sequences a bundle of CTAs computes, see contract/decode.h. Every warp finds that by itself.
#pragma once

#include <cute/tensor.hpp>

#include "contract/decode.h"

namespace flash_cute::split_keys {

using namespace cute;

// Of numbers that are not negative: as unsigned ones they take fewer instructions, see Divisor.
CUTE_DEVICE int divide(int number, int divisor) { return int(unsigned(number) / unsigned(divisor)); }
CUTE_DEVICE int divide_up(int number, int divisor) { return divide(number + divisor - 1, divisor); }

// The rows of a sequence, and its keys that one of them sees: [first_key, key_limit), perhaps none.
struct CacheSequence {
  int first_row;  // of q
  int len_q;
  int len_k;
  int first_key;
  int key_limit;
};

// Whether its keys are dealt: of long sequences another kernel computes the rows, see DecodeParams.
CUTE_DEVICE bool is_dealt(DecodeParams const& params, int rows) {
  return rows > 0 && (params.long_rows == 0 || rows < params.long_rows);
}

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

// `Params`: DecodeParams, or what has the same members.
template <class Params>
CUTE_DEVICE int keys_of(Params const& params, int batch, int rows) {
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
  static constexpr bool kRoundsRanges = false;  // see rounded_range
  static constexpr bool kMayCutAtRanges = false;
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
    pieces.count = max(1, divide_up(tiles, pieces.tiles));
    return pieces;
  }

  // What a unit of them counts as, in key tiles.
  CUTE_DEVICE int weight() const { return max(1, end - begin); }
};

template <class Cut>
CUTE_DEVICE int row_tiles_of(DecodeParams const& params, CacheSequence const& sequence) {
  int const rows = sequence.len_q * params.group, of_tile = Cut::tile_rows(params, rows);  // a power of two
  return (rows + of_tile - 1) >> (31 - __clz(of_tile));
}

// The work before a place in the order of sequences.
struct Place {
  int batch;
  int floor;   // the first row of q that no sequence before has
  int weight;  // of the units before, in key tiles
};

// 32 sequences, of each lane one: its first row of q, and the weight of its units alone and with those of the lanes
// before.
struct Sequences {
  int begin = -1;
  int first_row;
  int weight;
  int sum;

  // `floor`: the first row of q that no sequence before has. By all lanes of a warp.
  template <class Cut>
  CUTE_DEVICE static Sequences of(DecodeParams const& params, int begin, int floor) {
    constexpr uint32_t kAll = 0xffffffff;
    int const lane = threadIdx.x % 32, batch = begin + lane;
    bool const exists = batch < params.batch;
    Sequences result{.begin = begin, .first_row = 0, .weight = 0};
    int rows = exists ? params.len_q : 0;
    if (params.cu_q != nullptr) {
      int first_row = row_offset(params, min(batch, params.batch), floor);
      CUTE_UNROLL
      for (int i = 1; i < 32; i *= 2) {
        int const other = __shfl_up_sync(kAll, first_row, i);
        if (lane >= i) first_row = max(first_row, other);
      }
      rows = exists ? row_offset(params, batch + 1, first_row) - first_row : 0;
      result.first_row = first_row;
    }
    if (exists && is_dealt(params, rows)) {
      CacheSequence const sequence = make_sequence(params, batch, result.first_row, rows);
      result.weight = row_tiles_of<Cut>(params, sequence) * Pieces::of<Cut>(params, sequence).weight();
    }
    result.sum = result.weight;
    CUTE_UNROLL
    for (int i = 1; i < 32; i *= 2) {
      int const other = __shfl_up_sync(kAll, result.sum, i);
      if (lane >= i) result.sum += other;
    }
    return result;
  }
};

// Whether units are cut where ranges end, see contract/decode.h.
template <class Cut>
CUTE_DEVICE bool cuts_at_ranges(DecodeParams const& params) {
  if constexpr (Cut::kMayCutAtRanges) return params.cut_at_ranges;
  return false;
}

// The weight of all units is dealt to the bundles in ranges that differ by one at most, the larger ones first; or, if
// they are rounded, in equal ranges as far as it lasts.
struct Ranges {
  int total;
  int size;    // of the smaller ones
  int larger;  // how many are larger

  template <class Cut>
  CUTE_DEVICE static Ranges of(DecodeParams const& params, int total) {
    if constexpr (Cut::kRoundsRanges) {
      int const least = cuts_at_ranges<Cut>(params) ? Cut::kLeastRange : 1;
      return {total, max(least, rounded_range(total, params.bundles)), 0};
    } else {
      return {total, total / params.bundles, total % params.bundles};
    }
  }

  CUTE_DEVICE int begin(int bundle) const { return min(total, bundle * size + min(bundle, larger)); }
  CUTE_DEVICE int bundle_of(int tile) const {
    int const of_larger = larger * (size + 1);
    return tile < of_larger ? divide(tile, size + 1) : larger + divide(tile - of_larger, size);
  }
};

// Where the range of a bundle begins: the sequence, or the batch if that is behind all units, and what is before it.
// By all lanes of a warp.
template <class Cut>
CUTE_DEVICE Place find_place(DecodeParams const& params, int bundle, Ranges& ranges) {
  constexpr uint32_t kAll = 0xffffffff;
  Sequences sequences;
  Place place;
  int target = INT_MAX;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {  // of all sequences, then up to the place
    place = {};
#pragma unroll 1
    for (; place.batch < params.batch; place.batch += 32) {
      if (sequences.begin != place.batch) sequences = Sequences::of<Cut>(params, place.batch, place.floor);
      uint32_t const behind = __ballot_sync(kAll, place.weight + sequences.sum > target);
      if (behind != 0) {
        int const found = __ffs(behind) - 1;
        place.batch += found;
        place.floor = __shfl_sync(kAll, sequences.first_row, found);
        place.weight += __shfl_sync(kAll, sequences.sum - sequences.weight, found);
        return place;
      }
      place.floor = __shfl_sync(kAll, sequences.first_row, 31);
      place.weight += __shfl_sync(kAll, sequences.sum, 31);
    }
    if (pass == 0) ranges = Ranges::of<Cut>(params, place.weight);
    target = ranges.begin(bundle);
  }
  place.batch = params.batch;
  return place;
}

// The pieces that begin before a tile, of a unit whose first tile is `first`.
CUTE_DEVICE int pieces_before(int tile, int first, Pieces const& pieces) {
  return min(pieces.count, divide_up(max(0, tile - first), pieces.tiles));
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

  // The key tiles of a piece that are seen: [begin, end), empty where they are all before or behind those.
  CUTE_DEVICE int begin_of(int piece) const {
    return min(tile_end, max(tile_begin, pieces.begin + piece * pieces.tiles));
  }
  CUTE_DEVICE int end_of(int piece) const { return begin_of(piece + 1); }
};

// Cuts a unit where ranges of `range` tiles end. `first`: the place of its first tile in the order of all. Its first
// piece begins where that one's range does: returns that place.
template <class Cut>
CUTE_DEVICE int cut_at_ranges(Unit& unit, int first, int range) {
  Pieces& pieces = unit.pieces;
  int const before = first - divide(first, range) * range, weight = pieces.weight();
  pieces.begin = unit.sequence.first_key / Cut::kTileKeys - before;
  pieces.end = pieces.begin + weight;
  pieces.tiles = range;
  pieces.count = divide_up(before + weight, range);
  return first - before;
}

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
    unit_.row_tile = 0;
    place_ = find_place<Cut>(params, bundle, ranges_);
    begin_ = ranges_.begin(bundle);
    end_ = ranges_.begin(bundle + 1);
  }

  // Goes to the next unit that has pieces in the range.
  CUTE_DEVICE bool next() {
#pragma unroll 1
    while (true) {
      if (unit_.row_tile + 1 < row_tiles_) {
        ++unit_.row_tile;
      } else if (!enter_sequence()) {
        return false;
      }
      first_ = place_.weight + unit_.row_tile * unit_.pieces.weight();
      if (first_ >= end_) return false;
      if (cuts_at_ranges<Cut>(params_)) first_ = cut_at_ranges<Cut>(unit_, first_, ranges_.size);
      unit_.piece_begin = pieces_before(begin_, first_, unit_.pieces);
      unit_.piece_end = pieces_before(end_, first_, unit_.pieces);
      if (unit_.piece_begin >= unit_.piece_end) continue;
      set_rows<Cut>(params_, unit_);
      return true;
    }
  }

  CUTE_DEVICE Unit const& unit() const { return unit_; }
  CUTE_DEVICE int first() const { return first_; }  // the place of its first piece, in key tiles of all units
  CUTE_DEVICE Ranges const& ranges() const { return ranges_; }

 private:
  // Goes to the next sequence that has rows; the first one is that of the place.
  CUTE_DEVICE bool enter_sequence() {
    if (row_tiles_ > 0) {
      place_.weight += row_tiles_ * unit_.pieces.weight();
      place_.floor = unit_.sequence.first_row + unit_.sequence.len_q;
      ++place_.batch;
    }
#pragma unroll 1
    for (; place_.batch < params_.batch; ++place_.batch) {
      int first_row = 0, rows = params_.len_q;
      if (params_.cu_q != nullptr) {
        first_row = row_offset(params_, place_.batch, place_.floor);
        rows = row_offset(params_, place_.batch + 1, first_row) - first_row;
        place_.floor = first_row;
      }
      if (!is_dealt(params_, rows)) continue;
      unit_.batch = place_.batch;
      unit_.sequence = make_sequence(params_, place_.batch, first_row, rows);
      unit_.pieces = Pieces::of<Cut>(params_, unit_.sequence);
      unit_.row_tile = divide(max(0, begin_ - place_.weight), unit_.pieces.weight());
      row_tiles_ = row_tiles_of<Cut>(params_, unit_.sequence);
      return true;
    }
    return false;
  }

  DecodeParams const& params_;
  Ranges ranges_;
  int begin_;
  int end_;
  int first_;
  Place place_;
  Unit unit_;
  int row_tiles_ = 0;
};

}  // namespace flash_cute::split_keys
