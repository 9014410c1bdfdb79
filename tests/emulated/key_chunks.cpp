// Random calls of the row-invariant kernels, see cases.h: against double precision, and the bits of one call against
// those of others whose rows are in other tiles, kernels and batches. Chunks are short, so that there are several.
#define FLASH_CUTE_TEST_CHUNK_KEYS 160

#include "sm90/decode/key_chunks/launch.cuh"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cases.h"

namespace {

using namespace flash_cute;
namespace key_chunks = sm90::decode::key_chunks;

constexpr int kNoPage = 1 << 20;

struct Case {
  int batch, heads_q, heads_kv, capacity, left, right;
  bool packed, bottom_right, is_bfloat16, sinks;
  std::vector<int> rows, keys;  // of each sequence; keys before the append below 0: none

  std::string describe() const {
    char text[300];
    std::snprintf(text, sizeof(text), "batch %d heads %d/%d capacity %d window %d %d%s%s%s %s", batch, heads_q,
                  heads_kv, capacity, left, right, packed ? " packed" : "", bottom_right ? " bottom_right" : "",
                  sinks ? " sinks" : "", is_bfloat16 ? "bf16" : "fp16");
    std::string result = text;
    for (size_t i = 0; i < rows.size(); ++i) result += " " + std::to_string(rows[i]) + ":" + std::to_string(keys[i]);
    return result;
  }
};

Case draw_case(Random& random) {
  Case c{};
  c.batch = random.range(1, 3);
  c.heads_kv = random.range(1, 2);
  c.heads_q = c.heads_kv * random.range(1, 5);
  c.packed = random.chance(0.5);
  int const equal = random.range(1, random.chance(0.5) ? 20 : 150);
  for (int b = 0; b < c.batch; ++b) {
    c.rows.push_back(c.packed ? random.range(0, random.chance(0.5) ? 10 : 150) : equal);
    c.keys.push_back(random.chance(0.1) ? random.range(-1, 0) : random.range(1, 700));
  }
  c.capacity = std::max(1, *std::max_element(c.keys.begin(), c.keys.end())) + random.range(0, 90);
  c.left = random.chance(0.5) ? kNoLimit : random.range(0, 300);
  c.right = random.chance(0.6) ? 0 : random.chance(0.5) ? kNoLimit : random.range(0, 150);
  c.bottom_right = random.chance(0.7);
  c.is_bfloat16 = random.chance(0.7);
  c.sinks = random.chance(0.3);
  return c;
}

// What a call is given. Rows of q are of each sequence, whatever their number.
template <class Element>
struct Inputs {
  Tensor4<Element> q, k, v;
  std::vector<float> sinks;
};

// Where a sequence's rows and keys are in another call: as (sequence, first row, rows), with the keys that end there.
struct Part {
  int sequence, first_row, rows, keys;
};

// One call over `parts`, by the kernels of a plan drawn at random.
template <class Element>
class Call {
 public:
  Call(Case const& c, Inputs<Element> const& in, std::vector<Part> parts, bool packed, Random& random)
      : c_(c), parts_(std::move(parts)), packed_(packed) {
    int const batch = int(parts_.size()), batch_of_q = packed ? 1 : batch;
    for (Part const& part : parts_) cu_.push_back(cu_.back() + part.rows);
    total_ = std::max(1, packed ? cu_.back() : parts_[0].rows);
    Tensor4<Element> q(random, batch_of_q, c.heads_q, total_, HEAD_DIM);
    Tensor4<Element> out(random, batch_of_q, c.heads_q, total_, HEAD_DIM);
    out.poison();
    lse_.assign(size_t(batch_of_q) * c.heads_q * total_, 7.f);
    for (int b = 0; b < batch; ++b) {
      Part const& part = parts_[size_t(b)];
      for (int h = 0; h < c.heads_q; ++h) {
        for (int i = 0; i < part.rows; ++i) {
          int const row = (packed ? cu_[size_t(b)] : 0) + i;
          for (int d = 0; d < HEAD_DIM; ++d) {
            q.at(packed ? 0 : b, h, row, d) = in.q(part.sequence, h, part.first_row + i, d);
          }
        }
      }
    }
    DecodeParams params{.q = q.data(), .out = out.data(), .lse = lse_.data()};
    params.q_strides = q.strides;
    params.out_strides = out.strides;
    params.cu_q = packed ? cu_.data() : nullptr;
    params.batch = batch;
    params.heads_q = c.heads_q;
    params.heads_kv = c.heads_kv;
    params.group = c.heads_q / c.heads_kv;
    params.len_q = total_;
    params.head_dim = params.head_dim_v = HEAD_DIM;
    params.window_left = c.left;
    params.window_right = c.right;
    params.bottom_right = c.bottom_right;
    params.scale_log2 = float(scale() * Scores::kLog2E);
    if (c.sinks) params.sinks = {.data = in.sinks.data(), .stride = 1, .is_float32 = true};
    bool const alike = std::all_of(parts_.begin(), parts_.end(), [&](Part const& part) {
      return part.keys == parts_[0].keys && part.keys >= 0;
    });
    if (random.chance(0.4) && (packed || alike)) {
      over_batch(in, params, random);
    } else {
      over_cache(in, params, random);
    }
    for (int b = 0; b < batch; ++b) {
      for (int h = 0; h < c.heads_q; ++h) {
        for (int i = 0; i < parts_[size_t(b)].rows; ++i) {
          int const at = packed ? 0 : b, row = (packed ? cu_[size_t(b)] : 0) + i;
          for (int d = 0; d < HEAD_DIM; ++d) out_.push_back(float(out(at, h, row, d)));
        }
      }
    }
  }

  static double scale() { return 1.2 / std::sqrt(double(HEAD_DIM)); }

  // Keys that row i of a part sees.
  static std::pair<int, int> bounds(Case const& c, Part const& part, int i) {
    int const keys = std::max(0, part.keys), position = c.bottom_right ? i + keys - part.rows : i;
    int64_t const first = int64_t{position} - c.left, last = int64_t{position} + c.right;
    return {int(std::max<int64_t>(0, first)), int(std::min<int64_t>(keys, last + 1))};
  }

  float out(int b, int h, int i, int d) const {
    size_t before = 0;
    for (int p = 0; p < b; ++p) before += size_t(parts_[size_t(p)].rows) * c_.heads_q;
    return out_[(before + size_t(h) * parts_[size_t(b)].rows + i) * HEAD_DIM + d];
  }
  float lse(int b, int h, int i) const {
    int const at = packed_ ? 0 : b, row = (packed_ ? cu_[size_t(b)] : 0) + i;
    return lse_[(size_t(at) * c_.heads_q + h) * total_ + row];
  }

 private:
  // Keys of a part, by `place(b, n)`: page and row.
  template <class Place>
  void copy_keys(Inputs<Element> const& in, Tensor4<Element>& k, Tensor4<Element>& v, Place const& place) const {
    k.poison();
    v.poison();
    for (int b = 0; b < int(parts_.size()); ++b) {
      Part const& part = parts_[size_t(b)];
      for (int n = part.rows > 0 ? bounds(c_, part, 0).first : 0; n < part.keys; ++n) {
        auto const [page, row] = place(b, n);
        for (int h = 0; h < c_.heads_kv; ++h) {
          for (int d = 0; d < HEAD_DIM; ++d) {
            k.at(page, h, row, d) = in.k(part.sequence, h, n, d);
            v.at(page, h, row, d) = in.v(part.sequence, h, n, d);
          }
        }
      }
    }
  }

  void over_cache(Inputs<Element> const& in, DecodeParams& params, Random& random) const {
    constexpr int kPages[] = {0, 1, 4, 16, 16, 48, 64, 64, 80, 256};  // 0: contiguous
    int const page = kPages[random.range(0, 9)], batch = int(parts_.size());
    int const unit = std::max(1, page), capacity = (c_.capacity + unit - 1) / unit * unit;
    int const pages_of_sequence = page == 0 ? 1 : capacity / page, pages = batch * pages_of_sequence + 2;
    int const page_size = page == 0 ? capacity : page;
    Tensor4<Element> k(random, pages, c_.heads_kv, page_size, HEAD_DIM);
    Tensor4<Element> v(random, pages, c_.heads_kv, page_size, HEAD_DIM);
    std::vector<int> order(static_cast<size_t>(pages)), table(size_t(batch) * pages_of_sequence, kNoPage), lengths;
    std::iota(order.begin(), order.end(), 0);
    if (page > 0) std::shuffle(order.begin(), order.end(), random.engine);
    for (Part const& part : parts_) lengths.push_back(part.keys);
    copy_keys(in, k, v, [&](int b, int n) {
      int const entry = b * pages_of_sequence + n / page_size;
      return std::pair(table[size_t(entry)] = page == 0 ? b : order[size_t(entry)], n % page_size);
    });
    params.k = k.data();
    params.v = v.data();
    params.k_strides = {.page = k.strides.batch, .head = k.strides.head, .row = k.strides.row};
    params.v_strides = {.page = v.strides.batch, .head = v.strides.head, .row = v.strides.row};
    params.table = {.entries = page == 0 ? nullptr : table.data(), .stride = pages_of_sequence, .pages = pages,
                    .page_size = page_size, .capacity = capacity};
    params.cache_seqlens = lengths.data();
    launch(params, capacity, packed_ ? random.range(1, 40) : random.chance(0.5) ? 1 : total_ + 1, random);
  }

  // As a forward: dense, or packed keys.
  void over_batch(Inputs<Element> const& in, DecodeParams& params, Random& random) const {
    std::vector<int> cu{0};
    for (Part const& part : parts_) cu.push_back(cu.back() + std::max(0, part.keys));
    int const batch = int(parts_.size()), total = packed_ ? cu.back() : parts_[0].keys, pages = packed_ ? 1 : batch;
    Tensor4<Element> k(random, pages, c_.heads_kv, std::max(1, total), HEAD_DIM);
    Tensor4<Element> v(random, pages, c_.heads_kv, std::max(1, total), HEAD_DIM);
    copy_keys(in, k, v, [&](int b, int n) { return packed_ ? std::pair(0, cu[size_t(b)] + n) : std::pair(b, n); });
    FwdParams forward = sm90::decode::long_rows::params_of(params);
    forward.k = k.data();
    forward.v = v.data();
    forward.k_strides = k.strides;
    forward.v_strides = v.strides;
    forward.len_k = total;
    forward.sequences.cu_k = packed_ ? cu.data() : nullptr;
    forward.sequences.shift = c_.bottom_right && !packed_ ? total - params.len_q : 0;
    params.forward = &forward;
    launch(params, total, 1, random);
  }

  void launch(DecodeParams& params, int capacity, int long_rows, Random& random) const {
    DecodePlan plan{};
    plan.dtype = c_.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
    plan.num_sms = random.range(1, 5);
    plan.long_rows = long_rows;
    key_chunks::Rows const rows{params.batch, c_.heads_q, c_.heads_kv, total_, packed_, capacity};
    int64_t const bytes = key_chunks::Work::of(HEAD_DIM, rows, plan.long_rows, plan.num_sms).bytes;
    std::vector<float> workspace(size_t(bytes / 4 + 4), NAN);
    params.parts = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(workspace.data()) + 15) / 16 * 16);
    if (params.forward != nullptr) const_cast<FwdParams*>(params.forward)->parts = params.parts;
    if (key_chunks::launch<HEAD_DIM, HEAD_DIM>(plan, params, nullptr) != cudaSuccess) {
      throw std::runtime_error("the launch failed");
    }
  }

  Case const& c_;
  std::vector<Part> parts_;
  bool packed_;
  std::vector<int> cu_{0};
  int total_;
  std::vector<float> lse_, out_;
};

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

template <class Element>
void run(Case const& c, Random& random) {
  int const most_rows = std::max(1, *std::max_element(c.rows.begin(), c.rows.end()));
  Inputs<Element> const in{Tensor4<Element>(random, c.batch, c.heads_q, most_rows, HEAD_DIM),
                           Tensor4<Element>(random, c.batch, c.heads_kv, c.capacity, HEAD_DIM),
                           Tensor4<Element>(random, c.batch, c.heads_kv, c.capacity, HEAD_DIM),
                           [&] {
                             std::vector<float> sinks(size_t(c.heads_q));
                             for (float& sink : sinks) sink = random.normal();
                             return sinks;
                           }()};
  std::vector<Part> whole;
  for (int b = 0; b < c.batch; ++b) whole.push_back({b, 0, c.rows[size_t(b)], c.keys[size_t(b)]});
  Call<Element> const call(c, in, whole, c.packed, random);

  double const epsilon = c.is_bfloat16 ? 0x1p-8 : 0x1p-10;
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < c.heads_q; ++h) {
      int const h_kv = h / (c.heads_q / c.heads_kv);
      for (int i = 0; i < c.rows[size_t(b)]; ++i) {
        auto const [first, limit] = Call<Element>::bounds(c, whole[size_t(b)], i);
        std::vector<double> scores;
        double largest = -INFINITY, sum = 0;
        for (int j = first; j < limit; ++j) {
          double score = 0;
          for (int d = 0; d < HEAD_DIM; ++d) score += double(in.q(b, h, i, d)) * double(in.k(b, h_kv, j, d));
          scores.push_back(score * Call<Element>::scale());
          largest = std::max(largest, scores.back());
        }
        for (double& x : scores) sum += x = std::exp(x - largest);
        bool const blind = scores.empty();
        double const exact_lse = blind ? -INFINITY : largest + std::log(sum);
        expect(call.lse(b, h, i), exact_lse, 2e-4 + 5e-5 * std::abs(exact_lse), "LSE", b, h, i, 0);
        double const divisor = c.sinks && !blind ? sum + std::exp(double(in.sinks[size_t(h)]) - largest) : sum;
        for (int d = 0; d < HEAD_DIM; ++d) {
          double value = 0, size = 0;
          for (int j = first; j < limit; ++j) {
            double const term = scores[size_t(j - first)] / divisor * double(in.v(b, h_kv, j, d));
            value += term;
            size += std::abs(term);
          }
          expect(double(call.out(b, h, i, d)), value, blind ? 0 : 2 * epsilon * size + 1e-6, "out", b, h, i, d);
        }
      }
    }
  }

  // The same rows in pieces of a sequence, as a chunked prefill and decoding steps have them, in any order.
  std::vector<Part> pieces;
  for (int b = 0; b < c.batch; ++b) {
    int const rows = c.rows[size_t(b)], keys = c.keys[size_t(b)];
    bool const cut = c.bottom_right && c.right == 0 && keys >= rows;  // rows of a chunk see no key behind it
    for (int i = 0; i < rows;) {
      int const n = !cut ? rows : std::min(rows - i, random.chance(0.5) ? random.range(1, 3) : random.range(1, 90));
      pieces.push_back({b, i, n, cut ? keys - rows + i + n : keys});
      i += n;
    }
  }
  if (pieces.empty()) return;
  std::shuffle(pieces.begin(), pieces.end(), random.engine);
  Call<Element> const again(c, in, pieces, /*packed=*/true, random);
  for (int p = 0; p < int(pieces.size()); ++p) {
    Part const& piece = pieces[size_t(p)];
    for (int h = 0; h < c.heads_q; ++h) {
      for (int i = 0; i < piece.rows; ++i) {
        int const row = piece.first_row + i;
        bool same = same_bits(again.lse(p, h, i), call.lse(piece.sequence, h, row));
        for (int d = 0; d < HEAD_DIM; ++d) {
          same = same && same_bits(again.out(p, h, i, d), call.out(piece.sequence, h, row, d));
        }
        if (same) continue;
        throw std::runtime_error("other bits of sequence " + std::to_string(piece.sequence) + " head " +
                                 std::to_string(h) + " row " + std::to_string(row) + ": LSE " +
                                 std::to_string(again.lse(p, h, i)) + " and " +
                                 std::to_string(call.lse(piece.sequence, h, row)));
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_cases<true>(argc, argv, draw_case,
                         []<class Element>(Case const& c, Random& random) { run<Element>(c, random); });
}
