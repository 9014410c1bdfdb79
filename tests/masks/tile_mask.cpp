// csrc/masks on the host: its kernels, whose threads run one after the other, against the definition of a mask.
// tile_mask SEED COUNT: so many random masks. Prints what is wrong, and a last line.
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "host_cta.h"

#include "masks/kernel.cuh"
#include "masks/matrix_bits.cuh"
#include "masks/matrix_lists.cuh"
#include "masks/sort.cuh"
#include "planning/tile_mask.h"

using namespace flash_cute;

namespace {

std::mt19937 random_bits;
int draw(int low, int high) { return low + int(random_bits() % unsigned(high - low + 1)); }
bool one_in(int n) { return draw(1, n) == 1; }
template <class T>
T pick(std::initializer_list<T> values) {
  return values.begin()[draw(0, int(values.size()) - 1)];
}

int64_t checks = 0, wrong = 0;
void expect(bool right, char const* what) {
  ++checks;
  if (!right && ++wrong <= 20) std::printf("wrong: %s\n", what);
}

// A random tensor of booleans, as a caller may give it.
struct Bools {
  MatrixTensor tensor{};
  host::GuardedBytes bytes;

  // `may_broadcast`: rows and columns too.
  void draw_values(int batches, int heads, int rows, int columns, bool may_broadcast) {
    int64_t const sizes[] = {one_in(2) ? 1 : batches, one_in(2) ? 1 : heads, may_broadcast && one_in(6) ? 1 : rows,
                             may_broadcast && one_in(6) ? 1 : columns};
    int const kind = pick({0, 1, 1, 1, 2, 3});  // contiguous, of whole vectors, transposed, every other column
    int64_t const step = kind == 3 ? 2 : 1;
    int64_t strides[4];
    strides[3] = kind == 2 ? sizes[2] : step;
    strides[2] = kind == 2 ? 1 : kind == 1 ? (sizes[3] + 15) / 16 * 16 : sizes[3] * step;
    strides[1] = kind == 2 ? sizes[2] * sizes[3] : sizes[2] * strides[2];
    strides[0] = sizes[1] * strides[1];
    int64_t last = 0;
    for (int dim = 0; dim < 4; ++dim) last += (sizes[dim] - 1) * strides[dim];
    uint8_t* const data = bytes.allocate(last + 1, kind == 1 && one_in(4) ? 0 : int(15 - last % 16));
    int const density = pick({0, 500, 990, 1000}), edge = pick({1, 32, 64, 100});
    int64_t const wide = sizes[3] / edge + 1, high = sizes[2] / edge + 1;
    std::vector<uint8_t> of_squares(sizes[0] * sizes[1] * high * wide);
    for (uint8_t& value : of_squares) value = draw(1, 1000) <= density ? pick({1, 1, 128, 255}) : 0;
    for (int64_t pair = 0; pair < sizes[0] * sizes[1]; ++pair) {
      uint8_t* const matrix = data + pair / sizes[1] * strides[0] + pair % sizes[1] * strides[1];
      for (int64_t row = 0; row < sizes[2]; ++row) {
        for (int64_t column = 0; column < sizes[3]; ++column) {
          matrix[row * strides[2] + column * strides[3]] =
              of_squares[(pair * high + row / edge) * wide + column / edge];
        }
      }
    }
    auto const stride = [&](int dim) { return sizes[dim] == 1 ? 0 : strides[dim]; };
    tensor = {reinterpret_cast<bool const*>(data), stride(0), stride(1), stride(2), stride(3)};
  }

  bool at(int batch, int head, int64_t row, int64_t column) const {
    return reinterpret_cast<uint8_t const*>(tensor.data)[batch * tensor.batch_stride + head * tensor.head_stride +
                                                         row * tensor.row_stride + column * tensor.column_stride] != 0;
  }
};

// A random call, with the memory that the kernels write.
struct Call {
  masks::Params params{};
  int heads, batches, intervals;
  std::vector<int> columns[4];  // of first_row and row_limit, twice
  std::vector<int> cu_q, cu_k;
  Bools matrix, blocks;
  bool has_bits;
  std::vector<RowInterval> rows;
  std::vector<RowBits> bits;
  std::vector<TileRows> tile_rows;
  std::vector<uint32_t> rows_visited, rows_whole, keys_visited, keys_whole;
  std::vector<int> order, counters;

  Call() {
    bool const large = one_in(12);
    params.len_q = draw(1, large ? 6000 : 300);
    params.len_k = one_in(20) ? 0 : draw(1, large ? 9000 : 400);
    intervals = draw(1, 2);
    batches = draw(1, 2);
    heads = draw(1, 2);
    TileMaskPlan& plan = params.plan;
    plan.unit_rows = pick({16, 32, 64, 64, 80, 96, 128, 192});
    plan.block_n = pick({16, 32, 48, 64, 80, 96, 112, 128});
    plan.batches = batches;
    plan.heads = heads;
    plan.row_units = (params.len_q + plan.unit_rows - 1) / plan.unit_rows;
    plan.key_tiles = (params.len_k + plan.block_n - 1) / plan.block_n;
    plan.tile_units = draw(1, 4);
    draw_columns(draw(0, 5));
    draw_band(batches == 1 && one_in(2));
    draw_bools(draw(0, 5));
    allocate();
  }

  // 0 and 1: none.
  void draw_bools(int kind) {
    has_bits = kind > 1;
    int const rows = params.len_q, keys = std::max(1, params.len_k);
    if (!has_bits) return;
    if (kind != 4) matrix.draw_values(batches, heads, rows, keys, true);
    if (kind >= 4) blocks.draw_values(batches, heads, (rows + 63) / 64, (keys + 63) / 64, false);
    params.given.matrix = matrix.tensor;
    params.given.blocks = blocks.tensor;
  }

  void draw_columns(int kind) {
    for (int t = 0; t < 2 * intervals; ++t) {
      // The first tensor has all batches and heads, the others may have one for all.
      bool const all = t == 0 || one_in(2);
      int const own_batches = all ? batches : 1, own_heads = all ? heads : 1, step = draw(1, 2);
      columns[t].resize(std::max(1, own_batches * own_heads * params.len_k * step));
      for (size_t i = 0; i < columns[t].size(); ++i) {
        columns[t][i] = value(kind, t / 2, t % 2, int(i / step % std::max(1, params.len_k)));
      }
      int64_t const of_head = int64_t{params.len_k} * step;
      ColumnTensor& tensor = (t % 2 ? params.given.row_limit : params.given.first_row)[t / 2];
      tensor = {columns[t].data(), own_batches > 1 ? own_heads * of_head : 0, own_heads > 1 ? of_head : 0, step};
    }
  }

  int value(int kind, int interval, int is_limit, int column) const {
    int const rows = params.len_q;
    switch (kind) {
      case 0: return draw(-20, rows + 20);
      case 1: return is_limit ? rows : column;                          // causal
      case 2: return 64 * draw(0, 3);                                   // at edges of units
      case 3: return (interval + is_limit) * (rows / 2);                // two that touch
      case 4: return one_in(20) ? pick({INT_MIN, INT_MAX}) : is_limit ? INT_MAX : 0;
      default: return column / 50 * 50 + is_limit * 50;                 // documents
    }
  }

  void draw_band(bool packed) {
    int const left = one_in(3) ? draw(0, 100) : kNoLimit, right = one_in(2) ? draw(0, 60) : kNoLimit;
    bool const bottom_right = one_in(2);
    int const shift = bottom_right ? params.len_k - params.len_q : 0;
    params.sequence_count = packed ? draw(0, 5) : batches;
    params.band = {.lower = left < kNoLimit ? shift - left : -kNoLimit,
                   .upper = right < kNoLimit ? shift + right : kNoLimit};
    if (!packed) return;
    params.band = {.lower = 7, .upper = 7};  // which a packed call does not read
    for (auto [offsets, total] : {std::pair{&cu_q, params.len_q}, std::pair{&cu_k, params.len_k}}) {
      offsets->resize(params.sequence_count + 1);
      for (int& offset : *offsets) offset = draw(0, total);
      std::sort(offsets->begin(), offsets->end());
    }
    params.sequences.cu_q = cu_q.data();
    params.sequences.cu_k = cu_k.data();
    params.sequences.window_left = left;
    params.sequences.window_right = right;
    params.sequences.bottom_right = bottom_right;
  }

  void allocate() {
    constexpr uint32_t kUnwritten = 0xdeadbeef;
    TileMaskPlan const& plan = params.plan;
    int64_t const pairs = int64_t{batches} * heads;
    int64_t const row_blocks = pairs * ((params.len_q + 63) / 64);
    rows.assign(has_bits ? 0 : pairs * plan.columns() * intervals, {-7, -7});
    bits.assign(has_bits ? row_blocks * plan.columns() + 2 : 0, ~RowBits{0} / 3);
    tile_rows.assign(has_bits ? row_blocks * plan.key_tiles : 0, {.some = 1, .all = 5});
    rows_visited.assign(pairs * plan.row_units * plan.key_words(), kUnwritten);
    rows_whole = rows_visited;
    keys_visited.assign(pairs * plan.key_tiles * plan.row_words(), kUnwritten);
    keys_whole = keys_visited;
    order.assign(pairs * plan.row_tiles(), -1);
    counters.assign(3000, -1);
    if (has_bits) {
      params.bits = bits.data();
      params.tile_rows = tile_rows.data();
    } else {
      params.intervals = rows.data();
    }
    params.rows_visited = rows_visited.data();
    params.rows_whole = rows_whole.data();
    if (one_in(2)) {
      params.keys_visited = keys_visited.data();
      params.keys_whole = keys_whole.data();
    }
    params.row_order = order.data();
    params.zeroed = counters.data();
    params.zeroed_words = draw(0, 2999);
  }

  // The workspace has a place for all that the kernels write.
  void check_layout() const {
    Problem problem{};
    problem.len_q = params.len_q;
    problem.len_k = params.len_k;
    problem.mask_intervals = intervals;
    problem.mask_matrix = has_bits;
    problem.mask_batches = batches;
    problem.mask_heads = heads;
    TileMaskPlan plan{.unit_rows = params.plan.unit_rows, .block_n = params.plan.block_n, .lists_keys = true};
    plan.tile_units = params.plan.tile_units;
    int64_t const end = lay_out_mask(plan, problem, 100);
    auto const bytes = [](auto const& values) { return int64_t(values.size() * sizeof(values[0])); };
    std::vector<std::pair<int64_t, int64_t>> parts{{plan.rows_visited, bytes(rows_visited)},
                                                   {plan.rows_whole, bytes(rows_whole)},
                                                   {plan.keys_visited, bytes(keys_visited)},
                                                   {plan.keys_whole, bytes(keys_whole)},
                                                   {plan.row_order, bytes(order)},
                                                   {end, 0}};
    if (has_bits) {
      parts.insert(parts.end(), {{plan.bits, bytes(bits) - 16}, {plan.tile_rows, bytes(tile_rows)}});
    } else {
      parts.push_back({plan.intervals, bytes(rows)});
    }
    expect((has_bits ? plan.intervals : plan.bits) == -1, "either intervals or bits have a place");
    std::sort(parts.begin(), parts.end());
    expect(parts[0].first >= 100, "the place of the family's own parts");
    for (size_t i = 1; i < parts.size(); ++i) {
      expect(parts[i - 1].first + parts[i - 1].second <= parts[i].first, "a part's place");
      expect(parts[i - 1].first % 128 == 0, "a part's alignment");
    }
  }

  void run() {
    if (has_bits) {
      for (int64_t i = 0; i < masks::matrix_ctas(params); ++i) {
        host::run_cta(int(i), masks::kMatrixThreads, [&] { masks::matrix_bits_kernel<80>(params); });
      }
      for (int64_t i = 0; i < masks::list_ctas(params.plan); ++i) {
        host::run_cta(int(i), masks::kListThreads, [&] { masks::matrix_lists_kernel<80>(params); });
      }
    } else {
      int const words = one_in(2) ? draw(1, 4) : masks::words_per_cta(params.plan, draw(1, 3));
      for (int64_t i = 0; i < masks::ctas(params.plan, words); ++i) {
        host::run_cta(int(i), masks::kThreads, [&] { masks::tile_mask_kernel<80>(params, words); });
      }
    }
    for (int i = 0; i < batches * heads; ++i) {
      host::run_cta(i, masks::kSortThreads, [&] { masks::sort_row_tiles_kernel<80>(params); });
    }
  }

  bool band_shows(int row, int column) const {
    Sequences const& all = params.sequences;
    if (all.cu_q == nullptr) {
      return column >= int64_t{row} + params.band.lower && column <= int64_t{row} + params.band.upper;
    }
    for (int s = 0; s < params.sequence_count; ++s) {
      if (row < cu_q[s] || row >= cu_q[s + 1] || column < cu_k[s] || column >= cu_k[s + 1]) continue;
      int64_t const shift = all.bottom_right ? (cu_k[s + 1] - cu_k[s]) - (cu_q[s + 1] - cu_q[s]) : 0;
      int64_t const ahead = (column - cu_k[s]) - (row - cu_q[s] + shift);
      return (all.window_left == kNoLimit || ahead >= -all.window_left) &&
             (all.window_right == kNoLimit || ahead <= all.window_right);
    }
    return false;
  }

  bool shows(int batch, int head, int row, int column) const {
    if (column >= params.len_k || !band_shows(row, column)) return false;
    if (matrix.tensor.data != nullptr && !matrix.at(batch, head, row, column)) return false;
    if (blocks.tensor.data != nullptr && !blocks.at(batch, head, row / 64, column / 64)) return false;
    auto const read = [&](ColumnTensor const& tensor) {
      return tensor.data[batch * tensor.batch_stride + head * tensor.head_stride + column * tensor.column_stride];
    };
    for (int n = 0; n < intervals; ++n) {
      if (read(params.given.first_row[n]) <= row && row < read(params.given.row_limit[n])) return true;
    }
    return false;
  }

  void check() const {
    for (size_t i = bits.size() - 2; has_bits && i < bits.size(); ++i) {
      expect(bits[i] == ~RowBits{0} / 3, "nothing is written behind the bits");
    }
    for (int i = 0; i < int(counters.size()); ++i) expect(counters[i] == (i < params.zeroed_words ? 0 : -1), "counter");
    for (int batch = 0; batch < batches; ++batch) {
      for (int head = 0; head < heads; ++head) check_head(batch, head);
    }
  }

  void check_head(int batch, int head) const {
    TileMaskPlan const& plan = params.plan;
    int64_t const pair = int64_t{batch} * heads + head;
    std::vector<int> seen(int64_t{plan.row_units} * 32 * plan.key_words());  // cells of a unit and key tile
    for (int column = 0; column < plan.key_tiles * plan.block_n; ++column) {
      auto const count = [&](auto const& holds) {
        for (int row = 0; row < params.len_q; ++row) {
          bool const sees = shows(batch, head, row, column);
          expect(sees == holds(row), "a cell");
          seen[row / plan.unit_rows * 32 * plan.key_words() + column / plan.block_n] += sees;
        }
      };
      if (has_bits) {
        int64_t const row_blocks = (params.len_q + 63) / 64;
        auto const bit = [&](int row) {
          return bits[(pair * row_blocks + row / 64) * plan.columns() + column] >> row % 64 & 1;
        };
        count(bit);
        for (int row = params.len_q; row < 64 * row_blocks; ++row) expect(!bit(row), "a row that does not exist");
        continue;
      }
      RowInterval const a = rows[pair * plan.columns() + column];
      RowInterval const b =
          intervals > 1 ? rows[(int64_t{batches} * heads + pair) * plan.columns() + column] : RowInterval{0, 0};
      expect(is_normal(a) && is_normal(b), "an interval is empty as {0, 0}, or in the rows that there are");
      expect(b.limit == 0 || (a.limit > 0 && a.limit < b.first), "two intervals are in order and apart");
      count([&](int row) { return (row >= a.first && row < a.limit) || (row >= b.first && row < b.limit); });
    }
    for (int unit = 0; unit < plan.row_units; ++unit) {
      int const all = std::min(plan.unit_rows, params.len_q - unit * plan.unit_rows) * plan.block_n;
      for (int tile = 0; tile < 32 * plan.key_words(); ++tile) {
        int const cells = seen[unit * 32 * plan.key_words() + tile];
        int64_t const word = (pair * plan.row_units + unit) * plan.key_words() + tile / 32;
        expect(is_set(rows_visited, word, tile) == (cells > 0), "visited, of rows");
        expect(is_set(rows_whole, word, tile) == (cells == all), "whole, of rows");
      }
    }
    for (int tile = 0; params.keys_visited != nullptr && tile < plan.key_tiles; ++tile) {
      for (int unit = 0; unit < 32 * plan.row_words(); ++unit) {
        int64_t const of_unit = (pair * plan.row_units + unit) * plan.key_words() + tile / 32;
        int64_t const of_tile = (pair * plan.key_tiles + tile) * plan.row_words() + unit / 32;
        bool const exists = unit < plan.row_units;
        expect(is_set(keys_visited, of_tile, unit) == (exists && is_set(rows_visited, of_unit, tile)),
               "visited, of keys");
        expect(is_set(keys_whole, of_tile, unit) == (exists && is_set(rows_whole, of_unit, tile)), "whole, of keys");
      }
    }
    check_order(pair);
  }

  void check_order(int64_t pair) const {
    TileMaskPlan const& plan = params.plan;
    auto const visited = [&](int tile) {
      int number = 0;
      for (int word = 0; word < plan.key_words(); ++word) {
        uint32_t bits = 0;
        for (int unit = tile * plan.tile_units; unit < std::min(plan.row_units, (tile + 1) * plan.tile_units); ++unit) {
          bits |= rows_visited[(pair * plan.row_units + unit) * plan.key_words() + word];
        }
        number += std::popcount(bits);
      }
      return number;
    };
    int const* const own = order.data() + pair * plan.row_tiles();
    std::vector<int> sorted(own, own + plan.row_tiles());
    for (int i = 1; i < plan.row_tiles(); ++i) expect(visited(own[i - 1]) >= visited(own[i]), "the order");
    std::sort(sorted.begin(), sorted.end());
    for (int i = 0; i < plan.row_tiles(); ++i) expect(sorted[i] == i, "each row tile is in the order");
  }

  bool is_normal(RowInterval const& x) const {
    return (x.first == 0 && x.limit == 0) || (0 <= x.first && x.first < x.limit && x.limit <= params.len_q);
  }
  static bool is_set(std::vector<uint32_t> const& words, int64_t word, int bit) { return words[word] >> bit % 32 & 1; }
};

}  // namespace

int main(int, char** argv) {
  random_bits.seed(unsigned(std::atoi(argv[1])));
  int const number = std::atoi(argv[2]);
  for (int i = 0; i < number; ++i) {
    Call call;
    call.check_layout();
    call.run();
    call.check();
  }
  std::printf("%d masks, %lld checks, %lld wrong\n", number, static_cast<long long>(checks),
              static_cast<long long>(wrong));
  return wrong != 0;
}
