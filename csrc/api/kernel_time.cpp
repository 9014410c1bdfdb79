// The model: a kernel takes its launch, and then the larger of
//
//   the longest tile, and waves * the mean tile
//
// A wave is as many tiles as run at a time. Equal tiles take whole waves; where tiles differ in length, the longest
// come first and the shorter ones even out over more than a few waves, up to a tail. A tile takes a time of its own
// (barriers, the latency of the first loads), one for the rows that it reads and writes once, and its steps:
//
//   tile = fixed + per_row * rows * head_dim / 128^2 + steps * GEMM flops of a step / rate of a multiprocessor
//
// The constants come from a least-squares fit to the logarithm of the times of every tile on random shapes (two runs of
// bench/choices.py on an H200, at c78de79): 364 forwards and 360 backwards.
#include "kernel_time.h"

#include <algorithm>
#include <array>
#include <cmath>

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

// Microseconds.
constexpr double kFwdSm90Launch = 2.6, kFwdSm80Launch = 0.9;
constexpr double kFwdSm90Tile = 1.5, kFwdSm80Tile = 2.5;
constexpr double kFwdSm90Rows = 1.3, kFwdSm80Rows = 2.75;  // loads and stores of 128 rows of head dim 128
constexpr double kBwdSm90Launch = 12.2, kBwdWideLaunch = 2.9, kBwdSm80Launch = 5.8;  // of all its kernels
constexpr double kBwdTile = 1.5;  // but for the persistent sm90 kernel, which hides it
constexpr double kBwdKeys = 4.7;  // loads and stores of 128 keys of head dim 128

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

// The steps of `size` that [first, last) touches.
constexpr double touched(int64_t first, int64_t last, uint32_t size) {
  return last > first ? ceil_div(uint32_t(last), size) - uint32_t(first) / size : 0;
}

// The tiles of a grid.
struct Tiles {
  double number = 0;   // of all heads
  double longest = 0;  // steps
  double mean = 0;     // steps
  double full = 0;     // the share of a tile's rows or keys that exist
};

// `steps(begin, end)`: those of a tile with these rows or keys. Of many tiles a few stand for all.
template <class Steps>
Tiles count_tiles(Work const& work, int length, int block, int64_t heads, Steps const& steps) {
  constexpr int kSamples = 4;
  int64_t const per_sequence = ceil_div(length, block);
  int64_t const number = std::max<int64_t>(per_sequence, work.least_tiles) * work.batch * heads;
  if (number == 0) return {};
  auto const steps_of = [&](int64_t tile) {
    return steps(tile * block, std::min<int64_t>(length, tile * block + block));
  };
  Tiles tiles{.number = double(number), .full = double(length) * work.batch * heads / (double(number) * block)};
  int const samples = int(std::min<int64_t>(per_sequence, kSamples));
  bool const equal = !work.band.has_lower() && !work.band.has_upper();
  if (samples == 0 || equal) {
    tiles.longest = tiles.mean = samples == 0 ? 0 : steps_of(0);
    return tiles;
  }
  tiles.longest = std::max(steps_of(0), steps_of(per_sequence - 1));
  for (int i = 0; i < samples; ++i) {
    double const found = steps_of(samples < kSamples ? i : (2 * i + 1) * per_sequence / (2 * kSamples));
    tiles.longest = std::max(tiles.longest, found);
    tiles.mean += found;
  }
  tiles.mean /= samples;
  return tiles;
}

// Row tiles, and their steps through the keys that they see.
Tiles row_tiles(Work const& work, int rows, int keys_per_step, int64_t heads) {
  return count_tiles(work, work.len_q, rows, heads, [&](int64_t begin, int64_t end) {
    int64_t const first = work.band.has_lower() ? std::max<int64_t>(0, begin + work.band.lower) : 0;
    int64_t const last = work.band.has_upper() ? std::min<int64_t>(work.len_k, end + work.band.upper) : work.len_k;
    return touched(first, last, keys_per_step);
  });
}

// Key tiles, and their steps through the rows that see them, of every query head of their KV head.
Tiles key_tiles(Work const& work, KernelShape const& shape) {
  Tiles tiles = count_tiles(work, work.len_k, shape.block_n, work.heads_kv, [&](int64_t begin, int64_t end) {
    int64_t const first = work.band.has_upper() ? std::max<int64_t>(0, begin - work.band.upper) : 0;
    int64_t const last = work.band.has_lower() ? std::min<int64_t>(work.len_q, end - work.band.lower) : work.len_q;
    return touched(first, last, shape.block_m);
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
  constexpr double kFewWaves = 3, kTail = 0.3;
  double const filled = tiles.number / (num_sms * ctas_per_sm);
  bool const even_out = tiles.longest > 1.01 * tiles.mean && filled > kFewWaves;
  double const waves = even_out ? filled + kTail : std::ceil(filled);
  return std::max(longest, waves * (fixed + ctas_per_sm * step * tiles.mean));
}

double rows_share(int rows, int head_dim, Tiles const& tiles) { return rows * head_dim * tiles.full / (128.0 * 128.0); }

// All heads' keys and values that some row sees, once.
double key_bytes(Work const& work) {
  int64_t const first = work.band.has_lower() ? std::max(0, work.band.lower) : 0;
  int64_t const last = work.band.has_upper() ? std::min<int64_t>(work.len_k, int64_t{work.len_q} + work.band.upper)
                                             : work.len_k;
  double const keys = double(std::max<int64_t>(0, last - first)) * work.batch * work.heads_kv;
  return keys * 2 * (work.head_dim + work.head_dim_v);
}

double fwd_step(Work const& work, KernelShape const& shape, double rate) {
  return 2.0 * shape.block_m * shape.block_n * (work.head_dim + work.head_dim_v) / rate;
}

// What is read and written once per row of all heads, and 8 bytes per float32 sum of dQ: cleared, added to, converted.
double bwd_memory_time(Work const& work, int bytes_per_row, int rows_of_sums) {
  double const heads = double(work.batch) * work.heads_q;
  double const tiles = rows_of_sums > 0 ? std::max<double>(ceil_div(work.len_q, rows_of_sums), work.least_tiles) : 0;
  return heads * work.head_dim * (bytes_per_row * double(work.len_q) + 8 * tiles * rows_of_sums) / kBwdBandwidth;
}

}  // namespace

TileSplit fwd_split(Work const& work, KernelShape const& shape) {
  Band const& band = work.band;
  if (band.has_lower()) return {};  // row tiles begin with different keys
  int64_t const last_row = band.has_upper() ? int64_t{work.len_q} + band.upper : work.len_k;
  int64_t const keys = std::clamp<int64_t>(last_row, 0, work.len_k);  // of the longest row tile
  int64_t const tiles = int64_t{work.batch} * work.heads_q * ceil_div(work.len_q, shape.block_m);
  // Tiles that differ much in length, and those that are drawn, even out.
  if (band.has_upper() && (keys < 2 * int64_t{work.len_q} || tiles > work.num_sms)) return {};
  return split_last_wave(tiles, (keys + shape.block_n - 1) / shape.block_n, work.num_sms, tiles > work.num_sms);
}

double fwd_sm90(Work const& work, KernelShape const& shape, double speed, int heads, TileSplit const& split) {
  double const step = fwd_step(work, shape, speed * rate_per_sm(kFwdSm90Rates, work.head_dim));
  Tiles const tiles = row_tiles(work, shape.block_m / heads, shape.block_n, work.heads_q / heads);
  double const fixed = kFwdSm90Tile + kFwdSm90Rows * rows_share(shape.block_m, work.head_dim, tiles);
  double const memory = key_bytes(work) / kFwdBandwidth;
  if (split.tiles == 0) {
    return kFwdSm90Launch + std::max(compute_time(tiles, fixed, step, 1, work.num_sms), memory);
  }
  double const whole_waves = std::floor(tiles.number / work.num_sms);
  double const last = fixed + step * (split.length + split.ranges / split.tiles + kPartCost);
  return kFwdSm90Launch + std::max(whole_waves * (fixed + step * tiles.longest) + last, memory * kSplitMemory);
}

double fwd_sm80(Work const& work, KernelShape const& shape) {
  double const step = fwd_step(work, shape, rate_per_sm(kFwdSm80Rates, work.head_dim));
  Tiles const tiles = row_tiles(work, shape.block_m, shape.block_n, work.heads_q);
  double const fixed = kFwdSm80Tile + kFwdSm80Rows * rows_share(shape.block_m, work.head_dim, tiles);
  double const compute = compute_time(tiles, fixed, step, shape.ctas_per_sm, work.num_sms);
  return kFwdSm80Launch + std::max(compute, key_bytes(work) / kFwdBandwidth);
}

double bwd_sm90(Work const& work, KernelShape const& shape) {
  double const step = 10.0 * shape.block_m * shape.block_n * work.head_dim / rate_per_sm(kBwdSm90Rates, work.head_dim);
  Tiles const tiles = key_tiles(work, shape);
  double const fixed = kBwdKeys * rows_share(shape.block_n, work.head_dim, tiles);
  return kBwdSm90Launch + compute_time(tiles, fixed, step, 1, work.num_sms) + bwd_memory_time(work, 6, shape.block_m);
}

// dK and dV take four GEMMs; then dQ takes three, with the tiles of `shape` but twice the rows per CTA.
double bwd_sm90_wide(Work const& work, KernelShape const& shape) {
  double const flops_per_gemm = 2.0 * shape.block_m * shape.block_n * work.head_dim;
  double const gemm = flops_per_gemm / rate_per_sm(kBwdSm90Rates, work.head_dim);
  Tiles const keys = key_tiles(work, shape);
  Tiles const rows = row_tiles(work, 2 * shape.block_m, shape.block_n, work.heads_q);
  double const fixed = kBwdTile + kBwdKeys * rows_share(shape.block_n, work.head_dim, keys);
  double const fixed_of_dq = kBwdTile + kBwdKeys * 2 * shape.block_m * work.head_dim / (128.0 * 128.0);
  return kBwdWideLaunch + compute_time(keys, fixed, 4 * gemm, 1, work.num_sms) +
         compute_time(rows, fixed_of_dq, 3 * 2 * gemm, 1, work.num_sms) + bwd_memory_time(work, 4, 0);
}

double bwd_sm80(Work const& work, KernelShape const& shape, bool any_scores) {
  double const rate = rate_per_sm(kBwdSm80Rates, work.head_dim) / (any_scores ? kAnyScoresSlowdown : 1);
  double const step = 10.0 * shape.block_m * shape.block_n * work.head_dim / rate;
  Tiles const tiles = key_tiles(work, shape);
  double const fixed = kBwdTile + kBwdKeys * rows_share(shape.block_n, work.head_dim, tiles);
  double const alone = shape.ctas_per_sm > 1 ? kAloneStep : 1;
  return kBwdSm80Launch + compute_time(tiles, fixed, step, shape.ctas_per_sm, work.num_sms, alone) +
         bwd_memory_time(work, 6, shape.block_m);
}

}  // namespace flash_cute::kernel_time
