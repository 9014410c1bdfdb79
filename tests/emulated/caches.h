// Random calls over caches for the drivers of their kernels, see cases.h. What no row may see is NaN: keys behind the
// end of a sequence and left of every row's window, and pages of nobody.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "cases.h"
#include "contract/decode.h"

struct CacheCase {
  int batch, heads_q, heads_kv, page, capacity, sms, left, right;
  bool packed, bottom_right, is_bfloat16, sinks;
  std::vector<int> rows, keys;  // of each sequence; keys before the append below 0: none
  int least = 0;                // sequences of fewer rows are another kernel's
  bool cut_at_ranges = false;

  // `most_rows`: of a sequence. `prompts`: all are long.
  void draw(Random& random, int most_rows, bool prompts = false) {
    constexpr int kPages[] = {0, 4, 16, 32, 48, 64, 64, 80, 256, 1, 5};  // 0: contiguous
    batch = random.range(1, 5);
    packed = random.chance(0.5);
    page = kPages[random.range(0, int(std::size(kPages)) - 1)];
    int const equal = random.range(1, random.chance(0.5) ? 2 : most_rows);
    for (int b = 0; b < batch; ++b) {
      if (prompts) {
        rows.push_back(packed ? random.range(100, most_rows) : most_rows);
        keys.push_back(random.range(500, 900));
        continue;
      }
      rows.push_back(packed ? random.range(0, random.chance(0.6) ? 2 : most_rows) : equal);
      keys.push_back(random.chance(0.3) ? random.range(-1, 0) : random.range(1, random.chance(0.5) ? 60 : 900));
    }
    int const of_page = std::max(1, page);
    capacity = std::max(1, *std::max_element(keys.begin(), keys.end())) + random.range(0, 90);
    capacity = (capacity + of_page - 1) / of_page * of_page;
    sms = random.range(1, 4);
    left = random.chance(0.6) ? flash_cute::kNoLimit : random.range(0, 150);
    right = random.chance(0.6) ? 0 : random.chance(0.5) ? flash_cute::kNoLimit : random.range(0, 150);
    bottom_right = random.chance(0.7);
    is_bfloat16 = random.chance(0.5);
    sinks = random.chance(0.3);
  }

  std::string describe() const {
    char text[300];
    std::snprintf(text, sizeof(text), "batch %d heads %d/%d page %d capacity %d sms %d window %d %d%s%s%s%s %s", batch,
                  heads_q, heads_kv, page, capacity, sms, left, right, packed ? " packed" : "",
                  bottom_right ? " bottom_right" : "", sinks ? " sinks" : "",
                  cut_at_ranges ? " cut_at_ranges" : "", is_bfloat16 ? "bf16" : "fp16");
    std::string result = text;
    for (size_t i = 0; i < rows.size(); ++i) result += " " + std::to_string(rows[i]) + ":" + std::to_string(keys[i]);
    return result;
  }

  // Keys that row i of a sequence sees.
  std::pair<int, int> bounds(int b, int i) const {
    int const limit = std::max(0, keys[size_t(b)]), position = bottom_right ? i + limit - rows[size_t(b)] : i;
    int64_t const first = int64_t{position} - left, last = int64_t{position} + right;
    return {int(std::max<int64_t>(0, first)), int(std::min<int64_t>(limit, last + 1))};
  }
};

// The workspace of a call, and what follows from it: as planning/split_keys.h has it, or larger.
struct CacheParts {
  std::vector<float> memory;

  // Of ranges that `heads` KV heads are dealt, in at most so many pieces.
  CacheParts(flash_cute::DecodeParams& params, int sms, int heads, int most_pieces, int many_rows) {
    int const rows = params.len_q * params.heads_q / heads;
    params.bundles = std::max(1, sms / heads);
    params.most_pieces = most_pieces;
    params.many_rows = many_rows;
    params.slot_rows = (std::min(rows, many_rows) + 1) / 2 * 2;
    params.part_rows = params.slot_rows * (1 + most_pieces);
    constexpr size_t kRecord = 28;  // of a bundle, behind the parts: FirstUnit
    size_t const parts_size = size_t(params.bundles) * heads * params.part_rows * (HEAD_DIM_V + 2);
    memory.assign(parts_size + size_t(params.bundles) * kRecord + 4, NAN);
    params.parts = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
  }
};

// `K`, `V`: the caches' elements; V of void: the values are the first columns of the keys. `launch(params)` launches.
template <class Element, class K, class V, class Launch>
void run_over_cache(CacheCase const& c, Random& random, Launch const& launch) {
  using namespace flash_cute;
  constexpr bool kValuesInKeys = std::is_void_v<V>;
  using Value = std::conditional_t<kValuesInKeys, K, V>;
  constexpr int kNoPage = 1 << 20;
  std::vector<int> cu{0};
  for (int rows : c.rows) cu.push_back(cu.back() + rows);
  int const total = std::max(1, c.packed ? cu.back() : c.rows[0]);
  int const pages_of_sequence = c.page == 0 ? 1 : c.capacity / c.page, pages = c.batch * pages_of_sequence + 2;
  int const page_size = c.page == 0 ? c.capacity : c.page;
  int const batch_of_q = c.packed ? 1 : c.batch;
  Tensor4<Element> const q(random, batch_of_q, c.heads_q, total, HEAD_DIM);
  Tensor4<K> const dense_k(random, c.batch, c.heads_kv, c.capacity, HEAD_DIM);
  Tensor4<Value> const own_v(random, c.batch, c.heads_kv, c.capacity, HEAD_DIM_V);
  Tensor4<K> k(random, pages, c.heads_kv, page_size, HEAD_DIM);
  Tensor4<Value> v(random, pages, c.heads_kv, page_size, HEAD_DIM_V);
  Tensor4<Element> out(random, batch_of_q, c.heads_q, total, HEAD_DIM_V);
  auto const value_of = [&](int b, int h, int j, int d) {
    if constexpr (kValuesInKeys) return float(dense_k(b, h, j, d));
    return float(own_v(b, h, j, d));
  };
  k.poison();
  v.poison();
  out.poison();
  std::vector<float> lse(size_t(batch_of_q) * c.heads_q * total, 7.f);
  std::vector<float> sinks(size_t(c.heads_q));
  for (float& sink : sinks) sink = random.normal();

  std::vector<int> order(static_cast<size_t>(pages)), table(size_t(c.batch) * pages_of_sequence, kNoPage);
  std::iota(order.begin(), order.end(), 0);
  if (c.page > 0) std::shuffle(order.begin(), order.end(), random.engine);
  for (int b = 0; b < c.batch; ++b) {
    for (int n = c.rows[size_t(b)] > 0 ? c.bounds(b, 0).first : 0; n < c.keys[size_t(b)]; ++n) {
      size_t const place = size_t(b * pages_of_sequence + n / page_size);
      int const page = table[place] = c.page == 0 ? b : order[place];
      for (int h = 0; h < c.heads_kv; ++h) {
        for (int d = 0; d < HEAD_DIM; ++d) k.at(page, h, n % page_size, d) = dense_k(b, h, n, d);
        for (int d = 0; d < HEAD_DIM_V; ++d) v.at(page, h, n % page_size, d) = own_v(b, h, n, d);
      }
    }
  }

  DecodeParams params{.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data(), .lse = lse.data()};
  params.q_strides = q.strides;
  params.out_strides = out.strides;
  if (c.packed) params.q_strides.batch = params.out_strides.batch = 0;
  params.k_strides = {.page = k.strides.batch, .head = k.strides.head, .row = k.strides.row};
  params.v_strides = {.page = v.strides.batch, .head = v.strides.head, .row = v.strides.row};
  if constexpr (kValuesInKeys) {
    params.v = params.k;
    params.v_strides = params.k_strides;
  }
  params.table = {.entries = c.page == 0 ? nullptr : table.data(), .stride = pages_of_sequence, .pages = pages,
                  .page_size = page_size, .capacity = c.capacity};
  params.cache_seqlens = c.keys.data();
  params.cu_q = c.packed ? cu.data() : nullptr;
  params.batch = c.batch;
  params.heads_q = c.heads_q;
  params.heads_kv = c.heads_kv;
  params.group = c.heads_q / c.heads_kv;
  params.len_q = total;
  params.head_dim = HEAD_DIM;
  params.head_dim_v = HEAD_DIM_V;
  params.window_left = c.left;
  params.window_right = c.right;
  params.bottom_right = c.bottom_right;
  params.cut_at_ranges = c.cut_at_ranges;
  double const scale = 0.8 / std::sqrt(double(HEAD_DIM));
  params.scale_log2 = float(scale * Scores::kLog2E);
  if (c.sinks) params.sinks = {.data = sinks.data(), .stride = 1, .is_float32 = true};
  if (launch(params) != cudaSuccess) throw std::runtime_error("the launch failed");

  double const epsilon = c.is_bfloat16 ? 0x1p-8 : 0x1p-10;
  for (int b = 0; b < c.batch; ++b) {
    int const at = c.packed ? 0 : b, rows = c.rows[size_t(b)];
    for (int h = 0; h < c.heads_q; ++h) {
      int const h_kv = h / params.group;
      for (int i = 0; i < rows; ++i) {
        int const row = c.packed ? cu[size_t(b)] + i : i;
        size_t const index = (size_t(at) * c.heads_q + h) * total + row;
        if (rows < c.least) {
          if (lse[index] != 7.f || !std::isnan(float(out(at, h, row, 0)))) throw std::runtime_error("not its row");
          continue;
        }
        auto const [first, limit] = c.bounds(b, i);
        std::vector<double> scores;
        double largest = -INFINITY, sum = 0;
        for (int j = first; j < limit; ++j) {
          double score = 0;
          for (int d = 0; d < HEAD_DIM; ++d) {
            score += double(q(at, h, row, d)) * double(float(dense_k(b, h_kv, j, d)));
          }
          scores.push_back(score * scale);
          largest = std::max(largest, scores.back());
        }
        for (double& x : scores) sum += x = std::exp(x - largest);
        bool const blind = scores.empty();
        double const exact_lse = blind ? -INFINITY : largest + std::log(sum);
        expect(lse[index], exact_lse, 2e-4 + 5e-5 * std::abs(exact_lse), "LSE", b, h, i, 0);
        double const divisor = c.sinks && !blind ? sum + std::exp(double(sinks[size_t(h)]) - largest) : sum;
        for (int d = 0; d < HEAD_DIM_V; ++d) {
          double value = 0, size = 0;
          for (int j = first; j < limit; ++j) {
            double const term = scores[size_t(j - first)] / divisor * double(value_of(b, h_kv, j, d));
            value += term;
            size += std::abs(term);
          }
          expect(double(out(at, h, row, d)), value, blind ? 0 : 2 * epsilon * size + 1e-6, "out", b, h, i, d);
        }
      }
    }
  }
}
