// What a kernel takes on a Hopper GPU, predicted from its tiles: where kernels compete for a call, the plan takes the
// one with the least time. docs/tuning.md has how near the predictions are to measured times, and the choices to the
// best ones.
//
// The model: a kernel takes its launch, and then the larger of
//
//   the longest tile, and waves * the mean tile
//
// A wave is as many tiles as run at a time. Equal tiles take whole waves; tiles that differ in length even out, up to a
// tail. A tile takes a time of its own (barriers, the latency of the first loads), one for the rows that it reads and
// writes once, and its steps:
//
//   tile = fixed + per_row * rows * head_dim / 128^2 + steps * GEMM flops of a step / rate of a multiprocessor
//
// The constants, here and in the families' time.h, come from least-squares fits to the logarithm of the times of every
// tile on random shapes (runs of bench/choices.py on an H200): those of dense calls from 364 forwards and 360
// backwards, those that packed calls add from 200 forwards and 120 backwards of up to 128 short sequences.
// docs/trials/tuning.md has how they were found. Times are in microseconds.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "contract/kernel_shape.h"
#include "contract/params.h"

namespace flash_cute::time_model {

// Above the last one: itself.
constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256};
constexpr int nominal_head_dim(int head_dim) {
  for (int known : kHeadDims) {
    if (head_dim <= known) return known;
  }
  return head_dim;
}

// Sequences of one length.
struct EqualSequences {
  int number;
  int len_q;
  int len_k;
};

// A call as the predictions see it.
struct Work {
  std::array<EqualSequences, 2> sequences;  // of a dense batch the first alone; of a packed one see sequences_of
  bool packed;
  bool ends_aligned;  // packed: the last row has the position of the last key
  int heads_q;
  int heads_kv;
  int head_dim;    // the next one that the model has rates for, see nominal_head_dim
  int head_dim_v;
  Band band;  // packed: relative to a row's position, see make_band
  int num_sms;

  constexpr Band band_of(EqualSequences const& some) const {
    int const offset = packed && ends_aligned ? some.len_k - some.len_q : 0;
    return {.lower = band.has_lower() ? band.lower + offset : band.lower,
            .upper = band.has_upper() ? band.upper + offset : band.upper};
  }
};

// TFLOP/s of all multiprocessors of an H200 within the steps, for each of kHeadDims.
using Rates = std::array<double, std::size(kHeadDims)>;
constexpr double kSmsOfRates = 132;

constexpr double kBwdTile = 1.5;  // but for the persistent sm90 kernel, which hides it
constexpr double kBwdKeys = 4.7;  // loads and stores of 128 keys of head dim 128

// Bytes per microsecond: keys and values of a forward; of a backward what the kernels before and after the main one
// move as well.
constexpr double kFwdBandwidth = 3.8e6, kBwdBandwidth = 3.3e6;

inline double rate_per_sm(Rates const& rates, int head_dim) {
  size_t index = 0;
  while (index + 1 < rates.size() && head_dim > kHeadDims[index]) ++index;
  return rates[index] * 1e6 / kSmsOfRates;  // flops per microsecond
}

// Of lengths, which are at most 10^9. (The host divides 32 bits several times as fast as 64.)
constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// The tiles of a grid.
struct Tiles {
  double number = 0;   // of all heads
  double longest = 0;  // steps
  double mean = 0;     // steps
  double full = 0;     // the share of a tile's rows or keys that exist
  bool varied = false;  // of sequences of several lengths
};

// `steps(sequences, begin, end)`: those of a tile with these rows or keys. A few of a sequence's tiles stand for all.
template <class Steps>
Tiles count_tiles(Work const& work, int EqualSequences::* side, int block, int64_t heads, Steps const& steps) {
  constexpr int kSamples = 4;
  bool const equal = !work.band.has_lower() && !work.band.has_upper();
  Tiles tiles{.varied = work.sequences[1].number > 0};
  double total = 0, length = 0;
  for (EqualSequences const& sequences : work.sequences) {
    int const end = sequences.*side;
    int64_t const per_sequence = ceil_div(end, block);
    if (sequences.number == 0 || per_sequence == 0) continue;
    auto const steps_of = [&](int64_t tile) {
      return steps(sequences, tile * block, std::min<int64_t>(end, tile * block + block));
    };
    int const samples = equal ? 1 : int(std::min<int64_t>(per_sequence, kSamples));
    double sum = 0;
    for (int i = 0; i < samples; ++i) {
      double const found = steps_of(samples < kSamples ? i : (2 * i + 1) * per_sequence / (2 * kSamples));
      tiles.longest = std::max(tiles.longest, found);
      sum += found;
    }
    if (samples == kSamples) tiles.longest = std::max({tiles.longest, steps_of(0), steps_of(per_sequence - 1)});
    double const number = double(per_sequence) * sequences.number * heads;
    tiles.number += number;
    total += number * sum / samples;
    length += double(end) * sequences.number * heads;
  }
  if (tiles.number == 0) return tiles;
  tiles.mean = total / tiles.number;
  tiles.full = length / (tiles.number * block);
  return tiles;
}

// The keys [first, last) that rows [begin, end) see, and the other way round.
struct Seen {
  int64_t first;
  int64_t last;

  static Seen by_rows(Work const& work, EqualSequences const& sequences, int64_t begin, int64_t end) {
    Band const band = work.band_of(sequences);
    return {band.has_lower() ? std::max<int64_t>(0, begin + band.lower) : 0,
            band.has_upper() ? std::min<int64_t>(sequences.len_k, end + band.upper) : sequences.len_k};
  }
  static Seen by_keys(Work const& work, EqualSequences const& sequences, int64_t begin, int64_t end) {
    Band const band = work.band_of(sequences);
    return {band.has_upper() ? std::max<int64_t>(0, begin - band.upper) : 0,
            band.has_lower() ? std::min<int64_t>(sequences.len_q, end - band.lower) : sequences.len_q};
  }
  // The steps of `size` that they touch.
  double steps(uint32_t size) const {
    return last > first ? ceil_div(uint32_t(last), size) - uint32_t(first) / size : 0;
  }
};

// Row tiles, and their steps through the keys that they see.
inline Tiles row_tiles(Work const& work, int rows, int keys_per_step, int64_t heads) {
  return count_tiles(work, &EqualSequences::len_q, rows, heads,
                     [&](EqualSequences const& sequences, int64_t begin, int64_t end) {
                       return Seen::by_rows(work, sequences, begin, end).steps(keys_per_step);
                     });
}

// Key tiles, and their steps through the rows that see them, of every query head of their KV head.
inline Tiles key_tiles(Work const& work, KernelShape const& shape) {
  Tiles tiles = count_tiles(work, &EqualSequences::len_k, shape.block_n, work.heads_kv,
                            [&](EqualSequences const& sequences, int64_t begin, int64_t end) {
                              return Seen::by_keys(work, sequences, begin, end).steps(shape.block_m);
                            });
  double const group = work.heads_kv > 0 ? double(work.heads_q) / work.heads_kv : 0;
  tiles.longest *= group;
  tiles.mean *= group;
  return tiles;
}

// `fixed`: of a tile; `step`: the GEMM flops over the rate, `alone` times as long for a CTA that has its multiprocessor
// to itself.
inline double compute_time(Tiles const& tiles, double fixed, double step, int ctas_per_sm, int num_sms,
                           double alone = 1) {
  double const longest = fixed + alone * step * tiles.longest;
  if (tiles.number <= num_sms) return longest;
  double const filled = tiles.number / (num_sms * ctas_per_sm);
  // The mean of several sequences is a guess, and their tiles are hardly ever equal.
  double const differs = tiles.varied ? 1.01 : 1.2, tail = tiles.varied ? 0.5 : 0.3;
  bool const even_out = filled > 1 && tiles.longest > differs * tiles.mean;
  double const waves = even_out ? filled + tail : std::ceil(filled);
  return std::max(longest, waves * (fixed + ctas_per_sm * step * tiles.mean));
}

inline double rows_share(int rows, int head_dim, Tiles const& tiles) {
  return rows * head_dim * tiles.full / (128.0 * 128.0);
}

// All heads' keys and values that some row sees, once.
inline double key_bytes(Work const& work) {
  double keys = 0;
  for (EqualSequences const& sequences : work.sequences) {
    Seen const seen = Seen::by_rows(work, sequences, 0, sequences.len_q);
    keys += double(std::max<int64_t>(0, seen.last - seen.first)) * sequences.number;
  }
  return keys * work.heads_kv * 2 * (work.head_dim + work.head_dim_v);
}

inline double fwd_step(Work const& work, KernelShape const& shape, double rate) {
  return 2.0 * shape.block_m * shape.block_n * (work.head_dim + work.head_dim_v) / rate;
}

// What is read and written once per row of all heads, and 8 bytes per float32 sum of dQ: cleared, added to, converted.
inline double bwd_memory_time(Work const& work, int bytes_per_row, int rows_of_sums) {
  double rows = 0, sums = 0;
  for (EqualSequences const& sequences : work.sequences) {
    double const tiles = rows_of_sums > 0 ? ceil_div(sequences.len_q, rows_of_sums) : 0;
    rows += double(sequences.len_q) * sequences.number;
    sums += tiles * rows_of_sums * sequences.number;
  }
  return work.heads_q * work.head_dim * (bytes_per_row * rows + 8 * sums) / kBwdBandwidth;
}

}  // namespace flash_cute::time_model
