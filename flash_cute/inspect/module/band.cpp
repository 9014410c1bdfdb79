// csrc/core/mask.cuh against the definition of a band, tile by tile and bit by bit: row i sees the columns j with
// i + lower <= j <= i + upper. Each check returns sentences that say what is wrong; none is good.
#include "host.h"

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/mask.cuh"

namespace {

using namespace flash_cute;

// The definition, in 64 bits.
struct Definition {
  Band band;
  int64_t len_q;
  int64_t len_k;

  bool sees(int64_t row, int64_t column) const {
    return row >= 0 && row < len_q && column >= 0 && column < len_k && row + band.lower <= column &&
           column <= row + band.upper;
  }

  // Of the tile of rows [row, row_end) and columns [column, column_end), both of whose ends may lie past the lengths. A
  // row's columns are an interval whose ends grow by one per row, so that a tile is seen wholly if its first and last
  // row see its first and last column.
  bool sees_wholly(int64_t row, int64_t row_end, int64_t column, int64_t column_end) const {
    int64_t const last = std::min(row_end, len_q) - 1;
    return sees(row, column) && sees(row, column_end - 1) && sees(last, column) && sees(last, column_end - 1);
  }

  bool sees_any(int64_t row, int64_t row_end, int64_t column, int64_t column_end) const {
    column_end = std::min(column_end, len_k);
    // The rows that see a column of [column, column_end): those from the first that reaches it to the last that has not
    // passed it.
    int64_t const begin = std::max({row, int64_t{0}, column - band.upper});
    int64_t const end = std::min({row_end, len_q, column_end - band.lower});
    return column < column_end && begin < end;
  }
};

class Findings {
 public:
  void expect(bool good, char const* what, Definition const& mask, std::string const& where) {
    if (good || ++counts_[what] > kMost) return;
    sentences.push_back(std::string(what) + ": " + std::to_string(mask.len_q) + " rows, " + std::to_string(mask.len_k) +
                        " keys, band [" + std::to_string(mask.band.lower) + ", " + std::to_string(mask.band.upper) +
                        "], " + where);
  }
  void expect(bool good, std::string const& what) {
    if (!good && ++counts_["of bits"] <= 4 * kMost) sentences.push_back(what);
  }

  std::vector<std::string> sentences;

 private:
  static constexpr int kMost = 5;  // of a kind
  std::map<std::string, int> counts_;
};

std::string text(TileRange const& range) {
  return "[" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ") with [" +
         std::to_string(range.whole_begin) + ", " + std::to_string(range.whole_end) + ") whole";
}

bool is_ordered(TileRange const& range) {
  bool const ordered = 0 <= range.begin && range.begin <= range.whole_begin && range.whole_begin <= range.whole_end &&
                       range.whole_end <= range.end;
  return ordered && (range.whole_begin < range.whole_end || range.whole_begin == range.begin);
}

// One tile of rows and one of keys: visited where it is seen, and unmasked only where it is seen wholly; and no more
// work than that, but in the tiles of which `may_waste` is said.
void expect_pair(Findings& found, Definition const& mask, TileRange const& range, int tile, bool any, bool whole,
                 bool may_waste, std::string const& where) {
  bool const visited = range.begin <= tile && tile < range.end;
  found.expect(visited || !any, "a tile that is seen is not visited", mask, where);
  found.expect(!visited || range.needs_mask(tile) || whole, "a tile that is not seen wholly goes unmasked", mask,
               where);
  found.expect(any || !visited || may_waste, "a tile that no row sees is visited", mask, where);
  found.expect(!visited || !whole || !range.needs_mask(tile), "a tile that is seen wholly is masked", mask, where);
}

template <int kBlockM, int kBlockN>
void check_tiles(Findings& found, Definition const& mask, std::vector<int> const& m_blocks,
                 std::vector<int> const& n_blocks) {
  FwdParams fwd{};
  BwdParams bwd{};
  fwd.band = bwd.band = mask.band;
  fwd.len_q = bwd.len_q = int(mask.len_q);
  fwd.len_k = bwd.len_k = int(mask.len_k);
  auto const row = [](int m) { return int64_t{m} * kBlockM; };
  auto const column = [](int n) { return int64_t{n} * kBlockN; };
  std::string const sizes = std::to_string(kBlockM) + " x " + std::to_string(kBlockN);
  auto const tiles = [&](int m, int n) {
    return "tile (" + std::to_string(m) + ", " + std::to_string(n) + ") of " + sizes;
  };
  int64_t const key_tiles = (mask.len_k + kBlockN - 1) / kBlockN, row_tiles = (mask.len_q + kBlockM - 1) / kBlockM;

  for (int const m : m_blocks) {
    TileRange const keys = key_range<kBlockM, kBlockN>(fwd, m);
    std::string const where = tiles(m, 0) + ", key_range " + text(keys);
    found.expect(is_ordered(keys), "a range's ends are out of order", mask, where);
    found.expect(keys.begin == keys.end || keys.end <= key_tiles, "a range ends past the last tile", mask, where);
    for (int const n : n_blocks) {
      bool const any = mask.sees_any(row(m), row(m + 1), column(n), column(n + 1));
      bool const whole = mask.sees_wholly(row(m), row(m + 1), column(n), column(n + 1));
      // Rows whose band begins behind the last key may visit its tile all the same.
      bool const behind = row(m) + mask.band.lower >= mask.len_k;
      expect_pair(found, mask, keys, n, any, whole, behind, tiles(m, n) + ", key_range " + text(keys));
      // Of all rows and columns of the tile, whatever the lengths.
      int64_t const offset = row(m) - column(n);
      bool const inside = offset + mask.band.upper >= kBlockN - 1 && offset + kBlockM - 1 + mask.band.lower <= 0;
      found.expect(crosses_band<kBlockM, kBlockN>(fwd, int(offset)) != inside, "crosses_band is wrong", mask,
                   tiles(m, n));
    }
  }
  if (mask.len_k == 0) return;  // no backward is launched
  std::vector<KeyTiles> visiting;
  for (int const m : m_blocks) visiting.push_back(visiting_key_tiles<kBlockM, kBlockN>(bwd, m));
  for (int const n : n_blocks) {
    TileRange const rows = row_range<kBlockM, kBlockN>(bwd, n);
    std::string const where = tiles(0, n) + ", row_range " + text(rows);
    found.expect(is_ordered(rows), "a range's ends are out of order", mask, where);
    found.expect(rows.begin == rows.end || rows.end <= row_tiles, "a range ends past the last tile", mask, where);
    for (size_t i = 0; i < m_blocks.size(); ++i) {
      int const m = m_blocks[i];
      bool const any = mask.sees_any(row(m), row(m + 1), column(n), column(n + 1));
      bool const whole = mask.sees_wholly(row(m), row(m + 1), column(n), column(n + 1));
      // And keys that only rows behind the last one would see.
      bool const behind = column(n) - mask.band.upper >= mask.len_q;
      expect_pair(found, mask, rows, m, any, whole, behind, tiles(m, n) + ", row_range " + text(rows));
      bool const visited = rows.begin <= m && m < rows.end;
      bool const listed = visiting[i].begin <= n && n < visiting[i].end;
      // Of those that visit a row tile, the first is the one with its first row's first column.
      int const first = first_column(bwd, m * kBlockM) / kBlockN;
      found.expect(!visited || first == visiting[i].begin, "first_column is not in the first visiting key tile", mask,
                   tiles(m, n) + ", " + std::to_string(first));
      found.expect(visited == listed, "visiting_key_tiles and row_range disagree", mask,
                   where + ", visiting_key_tiles of " + std::to_string(m) + " [" + std::to_string(visiting[i].begin) +
                       ", " + std::to_string(visiting[i].end) + ")");
    }
  }
}

template <int kBlockM, int kBlockN>
void check_every_tile(Findings& found, Definition const& mask) {
  std::vector<int> m_blocks, n_blocks;
  for (int m = 0; m * kBlockM < mask.len_q; ++m) m_blocks.push_back(m);
  for (int n = 0; n * kBlockN < mask.len_k; ++n) n_blocks.push_back(n);
  check_tiles<kBlockM, kBlockN>(found, mask, m_blocks, n_blocks);
}

// Lengths near the limits: of the tiles those about each other's edges.
template <int kBlockM, int kBlockN>
void check_some_tiles(Findings& found, Definition const& mask, std::mt19937& random) {
  int const row_tiles = int((mask.len_q + kBlockM - 1) / kBlockM);
  int const key_tiles = int((mask.len_k + kBlockN - 1) / kBlockN);
  std::vector<int> m_blocks = {0, row_tiles - 1}, n_blocks = {0, key_tiles - 1};
  for (int i = 0; i < 4; ++i) {
    int const m = int(random() % unsigned(row_tiles)), n = int(random() % unsigned(key_tiles));
    m_blocks.push_back(m);
    n_blocks.push_back(n);
    for (int64_t const edge : {int64_t{mask.band.lower}, int64_t{mask.band.upper}}) {
      for (int64_t step = -1; step <= 1; ++step) {
        int64_t const to_n = (int64_t{m} * kBlockM + edge) / kBlockN + step;
        int64_t const to_m = (int64_t{n} * kBlockN - edge) / kBlockM + step;
        if (to_n >= 0 && to_n < key_tiles) n_blocks.push_back(int(to_n));
        if (to_m >= 0 && to_m < row_tiles) m_blocks.push_back(int(to_m));
      }
    }
  }
  check_tiles<kBlockM, kBlockN>(found, mask, m_blocks, n_blocks);
}

Band random_band(std::mt19937& random, int64_t len_q, int64_t len_k) {
  auto const between = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  auto const edge = [&]() -> int {
    switch (random() % 4) {
      case 0: return int(between(-3, 3));
      case 1: return int(len_k - len_q + between(-3, 3));
      default: return int(between(std::max<int64_t>(-kNoLimit, -len_q - 2), std::min<int64_t>(kNoLimit, len_k + 2)));
    }
  };
  int const a = edge(), b = random() % 3 == 0 ? a + int(between(0, std::min<int64_t>(200, kNoLimit - a))) : edge();
  Band band{std::min(a, b), std::max(a, b)};
  switch (random() % 6) {
    case 0: return {-kNoLimit, kNoLimit};
    case 1: return {-kNoLimit, band.upper};
    case 2: return {band.lower, kNoLimit};
    default: return band;
  }
}

template <int kSize, int kPeriod>
void check_bits(Findings& found) {
  using Bits = ElementBits<kSize, kPeriod>;
  constexpr int kExtent = kSize / 2 * kPeriod;
  auto const coordinate = [](int j) { return j / 2 * kPeriod + j % 2; };
  std::string const name = std::to_string(kSize) + " elements of period " + std::to_string(kPeriod);
  std::vector<int> edges;
  for (int edge = -kPeriod - 3; edge <= kExtent + kPeriod + 3; ++edge) edges.push_back(edge);
  for (int const far : {-2 * kNoLimit + 1, -kNoLimit, -kMaxLength, kMaxLength, kNoLimit, 2 * (kNoLimit - 1)}) {
    edges.push_back(far);
  }
  std::vector<int> below;
  for (int const edge : edges) {
    int count = 0;
    for (int j = 0; j < kSize; ++j) count += coordinate(j) < edge;
    below.push_back(Bits::below(edge));
    found.expect(std::clamp(below.back(), 0, kSize) == count, name + ": " + std::to_string(below.back()) +
                                                                  " are said to lie below " + std::to_string(edge));
  }
  float scores[kSize];
  auto row = make_tensor(&scores[0], Layout<Int<kSize>>{});
  // Every edge; of the larger tiles not with every other.
  size_t const step = edges.size() < 200 ? 1 : 17;
  for (size_t i = 0; i < edges.size(); ++i) {
    for (size_t j = i % step; j < edges.size(); j += step) {
      int const begin = edges[i], end = edges[j];
      std::fill_n(scores, kSize, 1.f);
      keep_range<kPeriod>(row, begin, end);
      bool good = true;
      for (int element = 0; element < kSize; ++element) {
        bool const kept = begin <= coordinate(element) && coordinate(element) < end;
        good &= scores[element] == (kept ? 1.f : -INFINITY);
      }
      found.expect(good, name + ": keep_range(" + std::to_string(begin) + ", " + std::to_string(end) + ") is wrong");
    }
  }
}

template <int kPeriod, int... kSizes>
void check_sizes(Findings& found, std::integer_sequence<int, kSizes...>) {
  (check_bits<kSizes, kPeriod>(found), ...);
}

// key_range, row_range and visiting_key_tiles of random bands and lengths, for every tile of several sizes.
std::vector<std::string> tile_range_findings(unsigned seed, int cases) {
  Findings found;
  std::mt19937 random(seed);
  auto const with_every_tile_size = [&](auto check) {
    check(Int<16>{}, Int<16>{});
    check(Int<32>{}, Int<64>{});
    check(Int<64>{}, Int<32>{});
    check(Int<64>{}, Int<128>{});
    check(Int<96>{}, Int<64>{});
    check(Int<128>{}, Int<48>{});
    check(Int<192>{}, Int<80>{});
    check(Int<256>{}, Int<112>{});
  };
  for (int i = 0; i < cases; ++i) {
    int const most = i % 4 == 0 ? 40 : 700;
    Definition mask{{}, 1 + int64_t(random() % unsigned(most)), int64_t(random() % unsigned(most + 1))};
    mask.band = random_band(random, mask.len_q, mask.len_k);
    with_every_tile_size([&](auto m, auto n) { check_every_tile<m, n>(found, mask); });
    mask.len_q = kMaxLength - int64_t(random() % (i % 2 == 0 ? 300 : unsigned(kMaxLength)));
    mask.len_k = kMaxLength - int64_t(random() % (i % 3 == 0 ? 300 : unsigned(kMaxLength)));
    mask.band = random_band(random, mask.len_q, mask.len_k);
    with_every_tile_size([&](auto m, auto n) { check_some_tiles<m, n>(found, mask, random); });
  }
  return found.sentences;
}

// ElementBits and keep_range for all edges on and about a tile.
std::vector<std::string> keep_range_findings() {
  Findings found;
  std::integer_sequence<int, 4, 6, 16, 20, 28, 32, 34, 40, 56, 64, 96, 128> sizes;
  check_sizes<8>(found, sizes);
  check_sizes<16>(found, sizes);
  check_sizes<32>(found, sizes);
  check_sizes<64>(found, sizes);
  return found.sentences;
}

// (first column, column limit) of each row.
std::vector<std::pair<int, int>> columns(int len_q, int len_k, int lower, int upper) {
  FwdParams params{};
  params.len_q = len_q;
  params.len_k = len_k;
  params.band = {lower, upper};
  std::vector<std::pair<int, int>> seen;
  for (int row = 0; row < len_q; ++row) seen.emplace_back(first_column(params, row), column_limit(params, row));
  return seen;
}

}  // namespace

PYBIND11_MODULE(_traits, module) {
  module.attr("NO_LIMIT") = int(kNoLimit);
  module.def("columns", &columns);
  module.def("tile_range_findings", &tile_range_findings);
  module.def("keep_range_findings", &keep_range_findings);
}
