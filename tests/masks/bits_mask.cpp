// The masks of a tile's scores by bits and by intervals on the host, at each thread's coordinates, against the matrix
// that they say. bits_mask SEED: prints what is wrong, and a last line.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

// The lanes of a warp are threads.
namespace host {

inline thread_local int lane;
inline unsigned values[32];
inline std::barrier<> all_lanes(32);

}  // namespace host

inline unsigned __shfl_sync(unsigned, unsigned value, int source) {
  host::values[host::lane] = value;
  host::all_lanes.arrive_and_wait();
  unsigned const result = host::values[source % 32];
  host::all_lanes.arrive_and_wait();
  return result;
}
template <class T>
T __ldg(T const* address) {
  return *address;
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  uint64_t const both = uint64_t{high} << 32 | low;
  return static_cast<unsigned>(both << std::min(shift, 32u) >> 32);
}
using std::max;
using std::min;

#include "core/bits_mask.cuh"
#include "core/interval_mask.cuh"
#include "core/layout.cuh"
#include "core/mma_atom.cuh"
#include "sm90/backward/common/tile_columns.cuh"
#include "sm90/common/wgmma_atoms.cuh"

namespace {

using namespace flash_cute;
using Element = cutlass::half_t;

std::mt19937 random_bits;
long long checks = 0, wrong = 0;

bool sees(std::vector<RowBits> const& bits, int columns, int row, int column) {
  return bits[row / kBitRows * columns + column] >> row % kBitRows & 1;
}

// (blocks of 64 rows, columns): random, or with few rows that do not see a column, or that do.
std::vector<RowBits> random_mask(int blocks, int columns) {
  std::vector<RowBits> bits(blocks * columns);
  auto const word = [] { return RowBits{random_bits()} << 32 | random_bits(); };
  unsigned const kind = random_bits() % 3;
  for (RowBits& x : bits) x = kind == 0 ? word() : kind == 1 ? word() | word() | word() : word() & word() & word();
  return bits;
}

// Calls `mask(scores, coordinates, those of thread 0, thread)` for each thread, and compares what it hides.
template <bool kTransposed, class Mma, int kRows, int kColumns, class Mask, class Sees>
void check(char const* name, Mask const& mask, Sees const& expected) {
  using First = cute::Int<kTransposed ? kColumns : kRows>;
  using Second = cute::Int<kTransposed ? kRows : kColumns>;
  int const threads = cute::size(Mma{});
  std::vector<char> hidden(kRows * kColumns, 2);
  for (int first = 0; first < threads; first += 32) {
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; ++lane) {
      lanes.emplace_back([&, lane] {
        host::lane = lane;
        Mma mma;
        auto cS = cute::make_identity_tensor(cute::Shape<First, Second>{});
        auto tScS = rowcol_view(mma.get_slice(first + lane).partition_C(cS));
        auto tScS_0 = rowcol_view(mma.get_slice(cute::_0{}).partition_C(cS));
        auto tSrS = cute::partition_fragment_C(mma, cute::Shape<First, Second>{});
        for (int i = 0; i < cute::size(tSrS); ++i) tSrS(i) = 1.f;
        auto scores = rowcol_view(tSrS);
        mask(scores, tScS, tScS_0, first + lane);
        for (int i = 0; i < cute::size<0>(scores); ++i) {
          for (int j = 0; j < cute::size<1>(scores); ++j) {
            int const a = cute::get<0>(tScS(i, j)), b = cute::get<1>(tScS(i, j));
            int const row = kTransposed ? b : a, column = kTransposed ? a : b;
            hidden[row * kColumns + column] = std::isinf(scores(i, j)) ? 1 : scores(i, j) == 1.f ? 0 : 2;
          }
        }
      });
    }
    for (std::thread& lane : lanes) lane.join();
  }
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      ++checks;
      if (hidden[row * kColumns + column] == (expected(row, column) ? 0 : 1)) continue;
      if (++wrong < 20) std::printf("%s: row %d, column %d\n", name, row, column);
    }
  }
}

// By shuffles. A thread has two rows of each 16 * kWarps.
template <class Mma, int kRows, int kColumns>
void check_warp_bits(char const* name) {
  constexpr int kWarps = decltype(cute::size(Mma{}))::value / 32;
  std::vector<RowBits> const bits = random_mask((kRows + 63) / 64, kColumns);
  auto const mask = [&](auto& scores, auto const&, auto const& tScS_0, int thread) {
    for (int i = 0; i < cute::size<0>(scores); i += 2) {
      int const row = thread / 32 * 16 + i / 2 * (16 * kWarps);
      WarpBits<kColumns> own;
      own.read(bits.data() + row / kBitRows * kColumns, row % kBitRows, thread % 32);
      own.hide(scores, tScS_0, i, thread % 32);
    }
  };
  check<false, Mma, kRows, kColumns>(name, mask,
                                     [&](int row, int column) { return sees(bits, kColumns, row, column); });
}

// The transposed tile of the portable backward, of which there may be two in 64 rows.
template <class Mma, int kRows, int kColumns>
void check_transposed(char const* name) {
  std::vector<RowBits> const bits = random_mask(1, kColumns);
  for (int tile_row = 0; tile_row < kBitRows; tile_row += kRows) {
    auto const mask = [&](auto& scores, auto const& tScS, auto const& tScS_0, int) {
      apply_bits_transposed(scores, tScS, tScS_0, 192 + tile_row, bits.data());
    };
    check<true, Mma, kRows, kColumns>(
        name, mask, [&](int row, int column) { return sees(bits, kColumns, tile_row + row, column); });
  }
}

// That of the Hopper backward, of bits and of intervals.
template <class Mma, int kRows, int kColumns>
void check_columns(char const* name) {
  using sm90::backward::TileColumns;
  constexpr int kTileRow = 3 * kRows;
  std::vector<RowBits> const bits = random_mask(2, kColumns);
  auto const by_bits = [&](auto& scores, auto const& tScS, auto const& tScS_0, int) {
    apply_columns_transposed(scores, tScS, tScS_0, TileColumns{bits.data(), bits.data() + kColumns, true}, kTileRow);
  };
  check<true, Mma, kRows, kColumns>(name, by_bits,
                                    [&](int row, int column) { return sees(bits, kColumns, row, column); });
  std::vector<RowInterval> intervals(2 * kColumns);
  for (RowInterval& rows : intervals) {
    rows.first = kTileRow - 20 + int(random_bits() % (kRows + 40));
    rows.limit = rows.first + int(random_bits() % 50);
  }
  auto const* const words = reinterpret_cast<RowBits const*>(intervals.data());
  auto const by_intervals = [&](auto& scores, auto const& tScS, auto const& tScS_0, int) {
    apply_columns_transposed(scores, tScS, tScS_0, TileColumns{words, words + kColumns, false}, kTileRow);
  };
  check<true, Mma, kRows, kColumns>(name, by_intervals, [&](int row, int column) {
    int const of_tensor = kTileRow + row;
    auto const has = [&](RowInterval const& rows) { return rows.first <= of_tensor && of_tensor < rows.limit; };
    return has(intervals[column]) || has(intervals[kColumns + column]);
  });
}

template <int kWarps>
using RowsMma = cute::TiledMMA<cute::MMA_Atom<MmaAtom<Element>>,
                               cute::Layout<cute::Shape<cute::Int<kWarps>, cute::_1, cute::_1>>,
                               cute::Tile<cute::Int<16 * kWarps>, cute::_16, cute::_16>>;
template <int kFirst, int kSecond>
using KeysMma = cute::TiledMMA<cute::MMA_Atom<MmaAtom<Element>>,
                               cute::Layout<cute::Shape<cute::Int<kFirst>, cute::Int<kSecond>, cute::_1>>,
                               cute::Tile<cute::Int<16 * kFirst>, cute::Int<16 * kSecond>, cute::_16>>;
template <int N, int kWarpgroups = 1>
using Wgmma = decltype(cute::make_tiled_mma(sm90::wgmma_ss_atom<Element, N>(),
                                            cute::Layout<cute::Shape<cute::Int<kWarpgroups>, cute::_1, cute::_1>>{}));

}  // namespace

int main(int, char** argv) {
  random_bits.seed(unsigned(std::atoi(argv[1])));
  for (int round = 0; round < 3; ++round) {
    check_warp_bits<Wgmma<48>, 64, 48>("sm90, 48 keys");
    check_warp_bits<Wgmma<64>, 64, 64>("sm90, 64 keys");
    check_warp_bits<Wgmma<80>, 64, 80>("sm90, 80 keys");
    check_warp_bits<Wgmma<112>, 64, 112>("sm90, 112 keys");
    check_warp_bits<Wgmma<128>, 64, 128>("sm90, 128 keys");
    check_warp_bits<RowsMma<4>, 64, 32>("sm80, 64 rows, 32 keys");
    check_warp_bits<RowsMma<4>, 64, 48>("sm80, 64 rows, 48 keys");
    check_warp_bits<RowsMma<4>, 128, 64>("sm80, 128 rows, 64 keys");
    check_warp_bits<RowsMma<8>, 128, 64>("sm80, 128 rows, eight warps");
    check_transposed<KeysMma<4, 1>, 32, 128>("sm80 backward, P in registers");
    check_transposed<KeysMma<2, 2>, 64, 64>("sm80 backward, four warps");
    check_transposed<KeysMma<4, 2>, 64, 64>("sm80 backward, eight warps");
    check_transposed<KeysMma<4, 2>, 32, 64>("sm80 backward, 32 rows");
    check_transposed<KeysMma<2, 2>, 32, 32>("sm80 backward, 32 rows, four warps");
    check_columns<Wgmma<64, 2>, 64, 128>("sm90 backward, 64 rows");
    check_columns<Wgmma<128, 2>, 128, 128>("sm90 backward, 128 rows");
    check_columns<Wgmma<64>, 64, 64>("sm90 backward, one warpgroup");
  }
  std::printf("%lld checks, %lld wrong\n", checks, wrong);
  return wrong != 0;
}
