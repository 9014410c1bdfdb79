// csrc/masks on the host: its kernels, whose threads run one after the other, against the definition of a mask.
// tile_mask SEED COUNT: so many random masks. Prints what is wrong, and a last line.
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include <cute/config.hpp>

#undef __global__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

// A CTA's threads: a fiber each, which goes on with the next one where it waits for others.
namespace host {

struct Index {
  unsigned x = 0;
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(32 << 10);
  bool done = false;
};

// What the lanes of a warp have brought to the collective that they are in.
struct Warp {
  unsigned values[32];
  int arrived = 0;
  int left = 32;
};

std::vector<Thread> threads;
std::vector<Warp> warps;
ucontext_t scheduler;
int current, at_barrier, barriers;
std::function<void()> kernel;

void wait_for(std::function<bool()> const& ready) {
  while (!ready()) {
    int const self = current;
    swapcontext(&threads[self].context, &scheduler);
  }
}

void run_thread() {
  kernel();
  threads[current].done = true;
  swapcontext(&threads[current].context, &scheduler);
}

}  // namespace host

inline host::Index threadIdx, blockIdx;

namespace host {

void run_cta(int index, int number, std::function<void()> const& body) {
  kernel = body;
  blockIdx.x = index;
  threads.resize(number);
  warps.assign(number / 32, {});
  at_barrier = barriers = 0;
  for (Thread& thread : threads) {
    thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (int i = 0; i < number; ++i) {
      if (threads[i].done) continue;
      left = true;
      threadIdx.x = current = i;
      swapcontext(&scheduler, &threads[i].context);
    }
  }
}

// The values of all lanes, reduced.
template <class Op>
unsigned collect(unsigned value, Op const& op) {
  Warp& warp = warps[threadIdx.x / 32];
  wait_for([&] { return warp.left == 32; });  // all have left the collective before
  warp.values[threadIdx.x % 32] = value;
  if (++warp.arrived == 32) warp.left = 0;
  wait_for([&] { return warp.arrived == 32; });
  unsigned const result = op(warp.values);
  if (++warp.left == 32) warp.arrived = 0;
  return result;
}

template <class T, class Op>
T reduce(T value, Op const& op) {
  return static_cast<T>(collect(static_cast<unsigned>(value), [&](unsigned const* values) {
    T result = static_cast<T>(values[0]);
    for (int i = 1; i < 32; ++i) result = op(result, static_cast<T>(values[i]));
    return static_cast<unsigned>(result);
  }));
}

}  // namespace host

inline int __reduce_min_sync(unsigned, int x) { return host::reduce(x, [](int a, int b) { return std::min(a, b); }); }
inline int __reduce_max_sync(unsigned, int x) { return host::reduce(x, [](int a, int b) { return std::max(a, b); }); }
inline int __reduce_add_sync(unsigned, int x) { return host::reduce(x, [](int a, int b) { return a + b; }); }
inline unsigned __reduce_or_sync(unsigned, unsigned x) { return host::reduce(x, std::bit_or<unsigned>()); }
inline unsigned __reduce_and_sync(unsigned, unsigned x) { return host::reduce(x, std::bit_and<unsigned>()); }
inline unsigned __ballot_sync(unsigned, int x) {
  return host::collect(x != 0, [](unsigned const* values) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= values[i] << i;
    return bits;
  });
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline void __syncthreads() {
  int const own = host::barriers;
  if (++host::at_barrier == int(host::threads.size())) {
    host::at_barrier = 0;
    ++host::barriers;
  }
  host::wait_for([&] { return host::barriers != own; });
}

#include "masks/kernel.cuh"
#include "masks/sort.cuh"

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

// A random call, with the memory that the kernels write.
struct Call {
  masks::Params params{};
  int heads, batches, intervals;
  std::vector<int> columns[4];  // of first_row and row_limit, twice
  std::vector<int> cu_q, cu_k;
  std::vector<RowInterval> rows;
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
    plan.unit_rows = pick({16, 64, 64, 80, 128, 192});
    plan.block_n = pick({16, 32, 48, 64, 80, 112, 128});
    plan.batches = batches;
    plan.heads = heads;
    plan.row_units = (params.len_q + plan.unit_rows - 1) / plan.unit_rows;
    plan.key_tiles = (params.len_k + plan.block_n - 1) / plan.block_n;
    plan.tile_units = draw(1, 4);
    draw_columns(draw(0, 5));
    draw_band(batches == 1 && one_in(2));
    allocate();
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
    rows.assign(pairs * plan.columns() * intervals, {-7, -7});
    rows_visited.assign(pairs * plan.row_units * plan.key_words(), kUnwritten);
    rows_whole = rows_visited;
    keys_visited.assign(pairs * plan.key_tiles * plan.row_words(), kUnwritten);
    keys_whole = keys_visited;
    order.assign(pairs * plan.row_tiles(), -1);
    counters.assign(3000, -1);
    params.intervals = rows.data();
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

  void run() {
    int const words = one_in(2) ? draw(1, 4) : masks::words_per_cta(params.plan, draw(1, 3));
    for (int64_t i = 0; i < masks::ctas(params.plan, words); ++i) {
      host::run_cta(int(i), masks::kThreads, [&] { masks::tile_mask_kernel<80>(params, words); });
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
    auto const read = [&](ColumnTensor const& tensor) {
      return tensor.data[batch * tensor.batch_stride + head * tensor.head_stride + column * tensor.column_stride];
    };
    for (int n = 0; n < intervals; ++n) {
      if (read(params.given.first_row[n]) <= row && row < read(params.given.row_limit[n])) return true;
    }
    return false;
  }

  void check() const {
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
      RowInterval const a = rows[pair * plan.columns() + column];
      RowInterval const b =
          intervals > 1 ? rows[(int64_t{batches} * heads + pair) * plan.columns() + column] : RowInterval{0, 0};
      expect(is_normal(a) && is_normal(b), "an interval is empty as {0, 0}, or in the rows that there are");
      expect(b.limit == 0 || (a.limit > 0 && a.limit < b.first), "two intervals are in order and apart");
      for (int row = 0; row < params.len_q; ++row) {
        bool const sees = shows(batch, head, row, column);
        expect(sees == ((row >= a.first && row < a.limit) || (row >= b.first && row < b.limit)), "a cell");
        seen[row / plan.unit_rows * 32 * plan.key_words() + column / plan.block_n] += sees;
      }
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
        expect(is_set(keys_visited, of_tile, unit) == (exists && is_set(rows_visited, of_unit, tile)), "visited, of keys");
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
    call.run();
    call.check();
  }
  std::printf("%d masks, %lld checks, %lld wrong\n", number, static_cast<long long>(checks), static_cast<long long>(wrong));
  return wrong != 0;
}
