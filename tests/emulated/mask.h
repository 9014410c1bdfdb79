// A random mask: which rows see which columns, and what kernels read of it, made of that by the contract's words
// (contract/tile_mask.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "contract/tile_mask.h"
#include "tensors.h"

enum class MaskKind { kInterval, kTwoIntervals, kBits };
inline char const* name(MaskKind kind) {
  return kind == MaskKind::kInterval ? "interval" : kind == MaskKind::kTwoIntervals ? "two intervals" : "bits";
}

class Mask {
 public:
  Mask(Random& random, MaskKind kind, int batch, int heads, int len_q, int len_k, int unit_rows, int block_n,
       int tile_units)
      : kind_(kind),
        batches_(random.chance(0.5) ? batch : 1),
        heads_(random.chance(0.5) ? heads : 1),
        len_q_(len_q),
        len_k_(len_k),
        unit_rows_(unit_rows),
        block_n_(block_n),
        tile_units_(tile_units),
        units_((len_q + unit_rows - 1) / unit_rows),
        key_tiles_((len_k + block_n - 1) / block_n),
        columns_((int64_t{key_tiles_} * block_n + 15) / 16 * 16),
        seen_(size_t(batches_) * size_t(heads_) * size_t(len_q) * size_t(len_k)),
        intervals_(2 * size_t(batches_ * heads_) * size_t(columns_) + 16) {
    for (int pair = 0; pair < batches_ * heads_; ++pair) {
      if (kind == MaskKind::kBits) {
        draw_bits(random, pair);
      } else {
        draw_intervals(random, pair);
      }
    }
    make_bits();
    make_lists();
  }

  bool sees(int batch, int head, int row, int column) const {
    return seen_[index(std::min(batch, batches_ - 1) * heads_ + std::min(head, heads_ - 1), row, column)];
  }

  flash_cute::TileMask tile_mask(bool sorted) const {
    flash_cute::TileMask mask{};
    int64_t const batch = batches_ > 1 ? heads_ : 0, head = heads_ > 1;  // strides in pairs
    if (kind_ == MaskKind::kBits) {
      mask.bits = aligned(bits_);
      mask.bits_block_stride = columns_;
      mask.bits_batch_stride = batch * blocks() * columns_;
      mask.bits_head_stride = head * blocks() * columns_;
    } else {
      mask.intervals = aligned(intervals_);
      mask.intervals_per_column = kind_ == MaskKind::kInterval ? 1 : 2;
      mask.interval_stride = batches_ * heads_ * columns_;
      mask.batch_stride = batch * columns_;
      mask.head_stride = head * columns_;
    }
    mask.of_rows = {rows_visited_.data(), rows_whole_.data(), words(key_tiles_), units_};
    mask.row_list_batch_stride = batch * units_ * words(key_tiles_);
    mask.row_list_head_stride = head * units_ * words(key_tiles_);
    mask.of_keys = {keys_visited_.data(), keys_whole_.data(), words(units_), key_tiles_};
    mask.key_list_batch_stride = batch * key_tiles_ * words(units_);
    mask.key_list_head_stride = head * key_tiles_ * words(units_);
    if (sorted) {
      mask.row_order = order_.data();
      mask.row_order_batch_stride = batch * row_tiles();
      mask.row_order_head_stride = head * row_tiles();
    }
    return mask;
  }

 private:
  using RowInterval = flash_cute::RowInterval;

  static int words(int bits) { return (bits + 31) / 32; }
  int blocks() const { return (len_q_ + 63) / 64; }
  int row_tiles() const { return (units_ + tile_units_ - 1) / tile_units_; }
  size_t index(int pair, int row, int column) const {
    return (size_t(pair) * size_t(len_q_) + size_t(row)) * size_t(len_k_) + size_t(column);
  }
  template <class T>
  static T* aligned(std::vector<T> const& values) {
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(values.data()) + 127) / 128 * 128);
  }

  // Columns in groups, which have the same rows, or none, or all, or rows by a diagonal.
  void draw_intervals(Random& random, int pair) {
    auto const draw_rows = [&]() -> RowInterval {
      if (random.chance(0.15)) return {0, 0};
      if (random.chance(0.25)) return {0, len_q_};
      int const a = random.range(0, len_q_), b = random.range(0, len_q_);
      return a == b ? RowInterval{0, 0} : RowInterval{std::min(a, b), std::max(a, b)};
    };
    int const widest = std::max(1, random.chance(0.5) ? 4 * block_n_ : block_n_ / 2);
    int const slope = random.range(0, 2);
    for (int begin = 0; begin < len_k_;) {
      int const end = std::min(len_k_, begin + random.range(1, widest));
      RowInterval const first = draw_rows(), second = draw_rows();
      bool const diagonal = random.chance(0.3);
      for (int column = begin; column < end; ++column) {
        RowInterval rows[2] = {first, kind_ == MaskKind::kTwoIntervals ? second : RowInterval{0, 0}};
        if (diagonal) {
          int const shift = (column - begin) * slope;
          rows[0] = {std::min(len_q_, first.first + shift), std::min(len_q_, first.limit + 2 * shift)};
        }
        set_intervals(pair, column, rows);
      }
      begin = end;
    }
  }

  // Ordered, apart and with the only one first, as kernels expect them.
  void set_intervals(int pair, int column, RowInterval (&rows)[2]) {
    for (RowInterval& interval : rows) {
      if (interval.first >= interval.limit) interval = {0, 0};
      for (int row = interval.first; row < interval.limit; ++row) seen_[index(pair, row, column)] = 1;
    }
    int n = 0;
    RowInterval found[2] = {};
    for (int row = 0; row < len_q_; ++row) {
      bool const sees = seen_[index(pair, row, column)], saw = row > 0 && seen_[index(pair, row - 1, column)];
      if (sees && !saw) found[n++] = {row, row};
      if (sees) found[n - 1].limit = row + 1;
    }
    for (int i = 0; i < 2; ++i) {
      int64_t const row_of_columns = i * batches_ * heads_ + pair;
      aligned(intervals_)[row_of_columns * columns_ + column] = found[i];
    }
  }

  // Blocks of random edges that are seen, not seen, or seen at random.
  void draw_bits(Random& random, int pair) {
    int const edges[] = {16, 64, 80, 128};
    int const rows = edges[random.range(0, 3)], columns = edges[random.range(0, 3)];
    double const none = random.range(0, 8) / 10.0, all = random.range(0, 5) / 10.0;
    for (int r = 0; r < len_q_; r += rows) {
      for (int c = 0; c < len_k_; c += columns) {
        bool const is_none = random.chance(none), is_all = random.chance(all);
        double const density = random.chance(0.3) ? 0.01 : 0.5;
        for (int row = r; row < std::min(len_q_, r + rows); ++row) {
          for (int column = c; column < std::min(len_k_, c + columns); ++column) {
            seen_[index(pair, row, column)] = !is_none && (is_all || random.chance(density));
          }
        }
      }
    }
  }

  void make_bits() {
    bits_.resize(size_t(batches_ * heads_) * size_t(blocks()) * size_t(columns_) + 16);
    for (int pair = 0; pair < batches_ * heads_; ++pair) {
      for (int row = 0; row < len_q_; ++row) {
        for (int column = 0; column < len_k_; ++column) {
          if (!seen_[index(pair, row, column)]) continue;
          aligned(bits_)[(size_t(pair) * size_t(blocks()) + size_t(row / 64)) * size_t(columns_) + size_t(column)] |=
              uint64_t{1} << row % 64;
        }
      }
    }
  }

  void make_lists() {
    int const pairs = batches_ * heads_, key_words = words(key_tiles_), row_words = words(units_);
    rows_visited_.resize(size_t(pairs * units_ * key_words));
    rows_whole_ = rows_visited_;
    keys_visited_.resize(size_t(pairs * key_tiles_ * row_words));
    keys_whole_ = keys_visited_;
    for (int pair = 0; pair < pairs; ++pair) {
      std::vector<int> visits(std::size_t(row_tiles()), 0);
      for (int tile = 0; tile < key_tiles_; ++tile) {
        std::vector<char> counted(std::size_t(row_tiles()), 0);
        for (int unit = 0; unit < units_; ++unit) {
          bool some = false, all = (tile + 1) * block_n_ <= len_k_;
          for (int row = unit * unit_rows_; row < std::min(len_q_, (unit + 1) * unit_rows_); ++row) {
            for (int column = tile * block_n_; column < std::min(len_k_, (tile + 1) * block_n_); ++column) {
              bool const sees = seen_[index(pair, row, column)];
              some |= sees;
              all &= sees;
            }
          }
          auto const set = [&](std::vector<uint32_t>& of_rows, std::vector<uint32_t>& of_keys) {
            of_rows[size_t((pair * units_ + unit) * key_words + tile / 32)] |= 1u << tile % 32;
            of_keys[size_t((pair * key_tiles_ + tile) * row_words + unit / 32)] |= 1u << unit % 32;
          };
          if (some) set(rows_visited_, keys_visited_);
          if (some && all) set(rows_whole_, keys_whole_);
          if (some && !std::exchange(counted[size_t(unit / tile_units_)], 1)) ++visits[size_t(unit / tile_units_)];
        }
      }
      std::vector<int> sorted(std::size_t(row_tiles()), 0);
      std::iota(sorted.begin(), sorted.end(), 0);
      std::stable_sort(sorted.begin(), sorted.end(),
                       [&](int a, int b) { return visits[size_t(a)] > visits[size_t(b)]; });
      order_.insert(order_.end(), sorted.begin(), sorted.end());
    }
  }

  MaskKind kind_;
  int batches_, heads_, len_q_, len_k_, unit_rows_, block_n_, tile_units_, units_, key_tiles_;
  int64_t columns_;
  std::vector<char> seen_;
  std::vector<RowInterval> intervals_;
  std::vector<uint64_t> bits_;
  std::vector<uint32_t> rows_visited_, rows_whole_, keys_visited_, keys_whole_;
  std::vector<int> order_;
};
