// Random calls of the Hopper kernels of attention over a cache, see cases.h: of few rows and of many, of 16 bits and of
// float8. What no row may see is NaN: keys behind the end of a sequence and left of every row's window, and pages of
// nobody.
#include "sm90/decode/split_keys/launch.cuh"

#include <algorithm>
#include <numeric>

#include "cases.h"

namespace {

using namespace flash_cute;
namespace split_keys = sm90::decode::split_keys;

constexpr int kNoPage = 1 << 20;

enum class Stored { kAsQ, kE4M3, kE5M2 };

struct Case {
  int batch, heads_q, heads_kv, page, capacity, sms, most_pieces, left, right;
  bool packed, bottom_right, is_bfloat16, sinks;
  Stored k, v;
  std::vector<int> rows, keys;  // of each sequence; keys before the append below 0: none

  std::string describe() const {
    char text[300];
    std::snprintf(text, sizeof(text),
                  "batch %d heads %d/%d page %d capacity %d sms %d pieces %d window %d %d stored %d %d%s%s%s %s", batch,
                  heads_q, heads_kv, page, capacity, sms, most_pieces, left, right, int(k), int(v),
                  packed ? " packed" : "", bottom_right ? " bottom_right" : "", sinks ? " sinks" : "",
                  is_bfloat16 ? "bf16" : "fp16");
    std::string result = text;
    for (size_t i = 0; i < rows.size(); ++i) result += " " + std::to_string(rows[i]) + ":" + std::to_string(keys[i]);
    return result;
  }
};

Case draw_case(Random& random) {
  Case c{};
  c.batch = random.range(1, 5);
  c.heads_kv = random.range(1, 2);
  c.heads_q = c.heads_kv * (random.chance(0.5) ? 1 : random.range(1, 16));
  c.packed = random.chance(0.5);
  if (split_keys::reads_float8(HEAD_DIM, HEAD_DIM) && random.chance(0.5)) {
    c.k = random.chance(0.5) ? Stored::kE4M3 : Stored::kE5M2;
    c.v = random.chance(0.5) ? Stored::kE4M3 : Stored::kE5M2;
  }
  constexpr int kPages[] = {0, 4, 16, 16, 48, 64, 64, 80, 256, 1};  // 0: contiguous
  c.page = kPages[random.range(0, c.k == Stored::kAsQ ? 9 : 8)];    // float8 boxes of one row are another kernel's
  int const equal = random.range(1, random.chance(0.5) ? 3 : 40);
  for (int b = 0; b < c.batch; ++b) {
    c.rows.push_back(c.packed ? random.range(0, random.chance(0.6) ? 2 : 60) : equal);
    c.keys.push_back(random.chance(0.3) ? random.range(-1, 0) : random.range(1, random.chance(0.5) ? 60 : 900));
  }
  int const page = std::max(1, c.page);
  c.capacity = std::max(1, *std::max_element(c.keys.begin(), c.keys.end())) + random.range(0, 90);
  c.capacity = (c.capacity + page - 1) / page * page;
  c.sms = random.range(1, 4);
  c.most_pieces = random.range(1, 6);
  c.left = random.chance(0.6) ? kNoLimit : random.range(0, 150);
  c.right = random.chance(0.6) ? 0 : random.chance(0.5) ? kNoLimit : random.range(0, 150);
  c.bottom_right = random.chance(0.7);
  c.is_bfloat16 = random.chance(0.5);
  c.sinks = random.chance(0.3);
  return c;
}

template <class Element, class K, class V>
void run(Case const& c, Random& random) {
  std::vector<int> cu{0};
  for (int rows : c.rows) cu.push_back(cu.back() + rows);
  int const total = std::max(1, c.packed ? cu.back() : c.rows[0]);
  int const pages_of_sequence = c.page == 0 ? 1 : c.capacity / c.page, pages = c.batch * pages_of_sequence + 2;
  int const page_size = c.page == 0 ? c.capacity : c.page;
  int const batch_of_q = c.packed ? 1 : c.batch;
  Tensor4<Element> const q(random, batch_of_q, c.heads_q, total, HEAD_DIM);
  Tensor4<K> const dense_k(random, c.batch, c.heads_kv, c.capacity, HEAD_DIM);
  Tensor4<V> const dense_v(random, c.batch, c.heads_kv, c.capacity, HEAD_DIM);
  Tensor4<K> k(random, pages, c.heads_kv, page_size, HEAD_DIM);
  Tensor4<V> v(random, pages, c.heads_kv, page_size, HEAD_DIM);
  Tensor4<Element> out(random, batch_of_q, c.heads_q, total, HEAD_DIM);
  k.poison();
  v.poison();
  out.poison();
  std::vector<float> lse(size_t(batch_of_q) * c.heads_q * total, 7.f);
  std::vector<float> sinks(size_t(c.heads_q));
  for (float& sink : sinks) sink = random.normal();

  std::vector<int> order(static_cast<size_t>(pages)), table(size_t(c.batch) * pages_of_sequence, kNoPage);
  std::iota(order.begin(), order.end(), 0);
  if (c.page > 0) std::shuffle(order.begin(), order.end(), random.engine);
  auto const bounds = [&](int b, int i) {  // keys that row i sees
    int const keys = std::max(0, c.keys[size_t(b)]);
    int const position = c.bottom_right ? i + keys - c.rows[size_t(b)] : i;
    int64_t const first = int64_t{position} - c.left, last = int64_t{position} + c.right;
    return std::pair<int, int>(int(std::max<int64_t>(0, first)), int(std::min<int64_t>(keys, last + 1)));
  };
  for (int b = 0; b < c.batch; ++b) {
    for (int n = c.rows[size_t(b)] > 0 ? bounds(b, 0).first : 0; n < c.keys[size_t(b)]; ++n) {
      int const place = n / page_size;
      int& entry = table[size_t(b * pages_of_sequence + place)];
      entry = c.page == 0 ? b : order[size_t(b * pages_of_sequence + place)];
      for (int h = 0; h < c.heads_kv; ++h) {
        for (int d = 0; d < HEAD_DIM; ++d) {
          k.at(entry, h, n % page_size, d) = dense_k(b, h, n, d);
          v.at(entry, h, n % page_size, d) = dense_v(b, h, n, d);
        }
      }
    }
  }

  DecodeParams params{.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data(), .lse = lse.data()};
  params.q_strides = q.strides;
  params.out_strides = out.strides;
  if (c.packed) params.q_strides.batch = params.out_strides.batch = 0;
  params.k_strides = {.page = k.strides.batch, .head = k.strides.head, .row = k.strides.row};
  params.v_strides = {.page = v.strides.batch, .head = v.strides.head, .row = v.strides.row};
  params.table = {.entries = c.page == 0 ? nullptr : table.data(), .stride = pages_of_sequence, .pages = pages,
                  .page_size = page_size, .capacity = c.capacity};
  params.cache_seqlens = c.keys.data();
  params.cu_q = c.packed ? cu.data() : nullptr;
  params.batch = c.batch;
  params.heads_q = c.heads_q;
  params.heads_kv = c.heads_kv;
  params.group = c.heads_q / c.heads_kv;
  params.len_q = total;
  params.head_dim = params.head_dim_v = HEAD_DIM;
  params.k_is_e5m2 = c.k == Stored::kE5M2;
  params.v_is_e5m2 = c.v == Stored::kE5M2;
  params.window_left = c.left;
  params.window_right = c.right;
  params.bottom_right = c.bottom_right;
  double const scale = 0.8 / std::sqrt(double(HEAD_DIM));
  params.scale_log2 = float(scale * Scores::kLog2E);
  if (c.sinks) params.sinks = {.data = sinks.data(), .stride = 1, .is_float32 = true};
  // As planning/split_keys.h has it.
  int const all_rows = total * params.group;
  auto const rows_of_part = [&](int most) { return (std::min(all_rows, most) + 1) / 2 * 2; };
  params.bundles = std::max(1, c.sms / c.heads_kv);
  params.most_pieces = c.most_pieces;
  params.many_rows = kManyRows;
  params.slot_rows = rows_of_part(kManyRows);
  params.part_rows = params.slot_rows * (1 + c.most_pieces);
  std::vector<float> parts(size_t(params.bundles) * c.heads_kv * params.part_rows * (HEAD_DIM + 2) + 4, NAN);
  params.parts = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(parts.data()) + 15) / 16 * 16);
  DecodePlan plan{};
  plan.dtype = c.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  plan.float8_cache = c.k != Stored::kAsQ;
  plan.ctas = int64_t{params.bundles} * c.heads_kv;
  if (split_keys::launch<HEAD_DIM, HEAD_DIM>(plan, params, nullptr) != cudaSuccess) {
    throw std::runtime_error("the launch failed");
  }

  double const epsilon = c.is_bfloat16 ? 0x1p-8 : 0x1p-10;
  for (int b = 0; b < c.batch; ++b) {
    int const at = c.packed ? 0 : b, rows = c.rows[size_t(b)];
    for (int h = 0; h < c.heads_q; ++h) {
      int const h_kv = h / params.group;
      for (int i = 0; i < rows; ++i) {
        int const row = c.packed ? cu[size_t(b)] + i : i;
        size_t const index = (size_t(at) * c.heads_q + h) * total + row;
        auto const [first, limit] = bounds(b, i);
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
        for (int d = 0; d < HEAD_DIM; ++d) {
          double value = 0, size = 0;
          for (int j = first; j < limit; ++j) {
            double const term = scores[size_t(j - first)] / divisor * double(float(dense_v(b, h_kv, j, d)));
            value += term;
            size += std::abs(term);
          }
          expect(double(out(at, h, row, d)), value, blind ? 0 : 2 * epsilon * size + 1e-6, "out", b, h, i, d);
        }
      }
    }
  }
}

template <class Element, class K>
void run_beside(Case const& c, Random& random) {
  if (c.v == Stored::kE4M3) return run<Element, K, cutlass::float_e4m3_t>(c, random);
  run<Element, K, cutlass::float_e5m2_t>(c, random);
}

}  // namespace

int main(int argc, char** argv) {
  return run_cases<true>(argc, argv, draw_case, []<class Element>(Case const& c, Random& random) {
    if (c.k == Stored::kAsQ) return run<Element, Element, Element>(c, random);
    if (c.k == Stored::kE4M3) return run_beside<Element, cutlass::float_e4m3_t>(c, random);
    run_beside<Element, cutlass::float_e5m2_t>(c, random);
  });
}
