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
// The constants come from least-squares fits to the logarithm of the times of every tile on random shapes (runs of
// bench/choices.py on an H200): those of dense calls from 364 forwards and 360 backwards, those that packed calls add
// from 200 forwards and 120 backwards of up to 128 short sequences. docs/trials/tuning.md has how they were found.
#include "kernel_time.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "sm90/fwd/tile.h"

namespace flash_cute::kernel_time {
namespace {

// TFLOP/s of all multiprocessors of an H200 within the steps, for each of kHeadDims. (The sm90 backward of head dim 96
// is not fitted, but scaled: when it ran in the kernel of 128 its rate was 545.)
using Rates = std::array<double, std::size(kHeadDims)>;
constexpr Rates kFwdSm90Rates = {390, 640, 770, 850, 910, 915};
constexpr Rates kFwdSm80Rates = {235, 315, 370, 330, 320, 405};
constexpr Rates kBwdSm90Rates = {400, 630, 670, 715, 660, 745};
constexpr Rates kBwdSm80Rates = {265, 375, 300, 345, 230, 205};
constexpr double kSmsOfRates = 132;
constexpr double kAnyScoresSlowdown = 1.3;  // of the sm80 backward of modified scores
constexpr double kPackedSlowdown = 1.4;     // of the sm80 backward of packed batches

// Microseconds.
constexpr double kFwdSm90Launch = 2.6, kFwdSm80Launch = 0.9;
constexpr double kFwdSm90Tile = 1.5, kFwdSm80Tile = 2.5;
constexpr double kFwdSm90Rows = 1.3, kFwdSm80Rows = 2.75;  // loads and stores of 128 rows of head dim 128
constexpr double kBwdSm90Launch = 12.7, kBwdWideLaunch = 2.9, kBwdSm80Launch = 5.8;  // of all its kernels
constexpr double kBwdTile = 1.5;  // but for the persistent sm90 kernel, which hides it
constexpr double kBwdKeys = 4.7;  // loads and stores of 128 keys of head dim 128

// What packed sequences add: to read the lengths and to find the tiles, in kernels of their own in the backward.
constexpr double kPackedFwdSm90Launch = 2.0, kPackedFwdSm90Sequence = 0.045;
constexpr int kMostSequencesMeasured = 128;  // of more the time hides behind their tiles
constexpr double kPackedFwdSm90Draws = 0.7;  // to zero the ticket counter, which the launch of dense calls includes
constexpr double kPackedFwdSm90Tile = -0.75, kPackedFwdSm80Tile = 0.95;
constexpr double kPackedBwdSm90Launch = 9.5, kPackedBwdWideLaunch = 8.5, kPackedBwdSm80Launch = 6.5;
constexpr double kPackedBwdWideTile = 5;

// Bytes per microsecond: keys and values of a forward; of a backward what the kernels before and after the main one
// move as well.
constexpr double kFwdBandwidth = 3.8e6, kBwdBandwidth = 3.3e6;
constexpr double kSplitMemory = 1.05;  // the parts of split tiles read keys in less regular order

// A CTA of the sm80 backward that has its multiprocessor to itself steps 2 / 1.28 times as fast as beside another one.
constexpr double kAloneStep = 1.28;

double rate_per_sm(Rates const& rates, int head_dim) {
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
Tiles row_tiles(Work const& work, int rows, int keys_per_step, int64_t heads) {
  return count_tiles(work, &EqualSequences::len_q, rows, heads,
                     [&](EqualSequences const& sequences, int64_t begin, int64_t end) {
                       return Seen::by_rows(work, sequences, begin, end).steps(keys_per_step);
                     });
}

// Key tiles, and their steps through the rows that see them, of every query head of their KV head.
Tiles key_tiles(Work const& work, KernelShape const& shape) {
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
double compute_time(Tiles const& tiles, double fixed, double step, int ctas_per_sm, int num_sms, double alone = 1) {
  double const longest = fixed + alone * step * tiles.longest;
  if (tiles.number <= num_sms) return longest;
  double const filled = tiles.number / (num_sms * ctas_per_sm);
  // The mean of several sequences is a guess, and their tiles are hardly ever equal.
  double const differs = tiles.varied ? 1.01 : 1.2, tail = tiles.varied ? 0.5 : 0.3;
  bool const even_out = filled > 1 && tiles.longest > differs * tiles.mean;
  double const waves = even_out ? filled + tail : std::ceil(filled);
  return std::max(longest, waves * (fixed + ctas_per_sm * step * tiles.mean));
}

double rows_share(int rows, int head_dim, Tiles const& tiles) { return rows * head_dim * tiles.full / (128.0 * 128.0); }

// All heads' keys and values that some row sees, once.
double key_bytes(Work const& work) {
  double keys = 0;
  for (EqualSequences const& sequences : work.sequences) {
    Seen const seen = Seen::by_rows(work, sequences, 0, sequences.len_q);
    keys += double(std::max<int64_t>(0, seen.last - seen.first)) * sequences.number;
  }
  return keys * work.heads_kv * 2 * (work.head_dim + work.head_dim_v);
}

double fwd_step(Work const& work, KernelShape const& shape, double rate) {
  return 2.0 * shape.block_m * shape.block_n * (work.head_dim + work.head_dim_v) / rate;
}

// What is read and written once per row of all heads, and 8 bytes per float32 sum of dQ: cleared, added to, converted.
double bwd_memory_time(Work const& work, int bytes_per_row, int rows_of_sums) {
  double rows = 0, sums = 0;
  for (EqualSequences const& sequences : work.sequences) {
    double const tiles = rows_of_sums > 0 ? ceil_div(sequences.len_q, rows_of_sums) : 0;
    rows += double(sequences.len_q) * sequences.number;
    sums += tiles * rows_of_sums * sequences.number;
  }
  return work.heads_q * work.head_dim * (bytes_per_row * rows + 8 * sums) / kBwdBandwidth;
}

}  // namespace

TileSplit fwd_split(Work const& work, KernelShape const& shape) {
  auto const [batch, len_q, len_k] = work.sequences[0];
  Band const& band = work.band;
  if (band.has_lower()) return {};  // row tiles begin with different keys
  int64_t const last_row = band.has_upper() ? int64_t{len_q} + band.upper : len_k;
  int64_t const keys = std::clamp<int64_t>(last_row, 0, len_k);  // of the longest row tile
  int64_t const tiles = int64_t{batch} * work.heads_q * ceil_div(len_q, shape.block_m);
  // Tiles that differ much in length, and those that are drawn, even out.
  if (band.has_upper() && (keys < 2 * int64_t{len_q} || tiles > work.num_sms)) return {};
  return split_last_wave(tiles, (keys + shape.block_n - 1) / shape.block_n, work.num_sms, tiles > work.num_sms);
}

bool fwd_draws(Work const& work, KernelShape const& shape) {
  auto const& [longest, others] = work.sequences;
  int64_t tiles = 0;
  for (EqualSequences const& some : work.sequences) tiles += int64_t{some.number} * ceil_div(some.len_q, shape.block_m);
  bool const alike = others.number == 0 || longest.len_q <= shape.block_m;
  return tiles * work.heads_q > int64_t{work.num_sms} * sm90::fwd::most_dealt_waves(alike);
}

double fwd_sm90(Work const& work, KernelShape const& shape, double speed, int heads, TileSplit const& split) {
  double const step = fwd_step(work, shape, speed * rate_per_sm(kFwdSm90Rates, work.head_dim));
  Tiles const tiles = row_tiles(work, shape.block_m / heads, shape.block_n, work.heads_q / heads);
  double launch = kFwdSm90Launch;
  double fixed = kFwdSm90Tile + kFwdSm90Rows * rows_share(shape.block_m, work.head_dim, tiles);
  if (work.packed) {
    int const sequences = work.sequences[0].number + work.sequences[1].number;
    launch += kPackedFwdSm90Launch + kPackedFwdSm90Sequence * std::min(sequences, kMostSequencesMeasured) +
              (fwd_draws(work, shape) ? kPackedFwdSm90Draws : 0);
    fixed += kPackedFwdSm90Tile;
  }
  double const memory = key_bytes(work) / kFwdBandwidth;
  if (split.tiles == 0) return launch + std::max(compute_time(tiles, fixed, step, 1, work.num_sms), memory);
  double const whole_waves = std::floor(tiles.number / work.num_sms);
  double const last = fixed + step * (split.length + split.ranges / split.tiles + kPartCost);
  return launch + std::max(whole_waves * (fixed + step * tiles.longest) + last, memory * kSplitMemory);
}

double fwd_sm80(Work const& work, KernelShape const& shape) {
  double const step = fwd_step(work, shape, rate_per_sm(kFwdSm80Rates, work.head_dim));
  Tiles const tiles = row_tiles(work, shape.block_m, shape.block_n, work.heads_q);
  double const fixed = kFwdSm80Tile + kFwdSm80Rows * rows_share(shape.block_m, work.head_dim, tiles) +
                       (work.packed ? kPackedFwdSm80Tile : 0);
  double const alone = work.packed ? shape.ctas_per_sm : 1;
  double const compute = compute_time(tiles, fixed, step, shape.ctas_per_sm, work.num_sms, alone);
  return kFwdSm80Launch + std::max(compute, key_bytes(work) / kFwdBandwidth);
}

double bwd_sm90(Work const& work, KernelShape const& shape) {
  double const step = 10.0 * shape.block_m * shape.block_n * work.head_dim / rate_per_sm(kBwdSm90Rates, work.head_dim);
  Tiles const tiles = key_tiles(work, shape);
  double const fixed = kBwdKeys * rows_share(shape.block_n, work.head_dim, tiles);
  return kBwdSm90Launch + (work.packed ? kPackedBwdSm90Launch : 0) +
         compute_time(tiles, fixed, step, 1, work.num_sms) + bwd_memory_time(work, 6, shape.block_m);
}

// dK and dV take four GEMMs; then dQ takes three, with the tiles of `shape` but twice the rows per CTA.
double bwd_sm90_wide(Work const& work, KernelShape const& shape) {
  double const flops_per_gemm = 2.0 * shape.block_m * shape.block_n * work.head_dim;
  double const gemm = flops_per_gemm / rate_per_sm(kBwdSm90Rates, work.head_dim);
  Tiles const keys = key_tiles(work, shape);
  Tiles const rows = row_tiles(work, 2 * shape.block_m, shape.block_n, work.heads_q);
  double const per_tile = kBwdTile + (work.packed ? kPackedBwdWideTile : 0);
  double const fixed = per_tile + kBwdKeys * rows_share(shape.block_n, work.head_dim, keys);
  double const share = work.packed ? rows.full : 1;  // the constants of dense calls were fitted without it
  double const fixed_of_dq = per_tile + kBwdKeys * 2 * shape.block_m * work.head_dim * share / (128.0 * 128.0);
  return kBwdWideLaunch + (work.packed ? kPackedBwdWideLaunch : 0) +
         compute_time(keys, fixed, 4 * gemm, 1, work.num_sms) +
         compute_time(rows, fixed_of_dq, 3 * 2 * gemm, 1, work.num_sms) + bwd_memory_time(work, 4, 0);
}

double bwd_sm80(Work const& work, KernelShape const& shape, bool any_scores) {
  double const slowdown = (any_scores ? kAnyScoresSlowdown : 1) * (work.packed ? kPackedSlowdown : 1);
  double const rate = rate_per_sm(kBwdSm80Rates, work.head_dim) / slowdown;
  double const step = 10.0 * shape.block_m * shape.block_n * work.head_dim / rate;
  Tiles const tiles = key_tiles(work, shape);
  double const fixed = kBwdTile + kBwdKeys * rows_share(shape.block_n, work.head_dim, tiles);
  double const alone = shape.ctas_per_sm > 1 ? kAloneStep : 1;
  return kBwdSm80Launch + (work.packed ? kPackedBwdSm80Launch : 0) +
         compute_time(tiles, fixed, step, shape.ctas_per_sm, work.num_sms, alone) +
         bwd_memory_time(work, 6, shape.block_m);
}

}  // namespace flash_cute::kernel_time
