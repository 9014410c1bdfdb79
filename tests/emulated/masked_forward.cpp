// Random calls of the Hopper forward with a mask, on the emulated machine, against double precision:
//     masked_forward FIRST COUNT [part of a description]
// runs the cases of the seeds FIRST to FIRST + COUNT - 1, and stops at the first that is wrong. HEAD_DIM and HEAD_DIM_V
// are macros.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "sm90/forward/masked_rows/launch.cuh"

#include "machine/machine.h"
#include "mask.h"
#include "tensors.h"

namespace {

using namespace flash_cute;
namespace masked_rows = sm90::forward::masked_rows;

#ifdef HAS_ENTRIES
constexpr auto kTile = masked_rows::tile_config(HEAD_DIM, HEAD_DIM_V, 0);
constexpr int kEntries = masked_rows::has_entry(HEAD_DIM, HEAD_DIM_V, 1) ? 2 : 1;
constexpr KernelShape kernel_shape(int entry) { return masked_rows::kernel_shape(HEAD_DIM, HEAD_DIM_V, entry); }
#else
constexpr auto kTile = masked_rows::tile_config(HEAD_DIM, HEAD_DIM_V);
constexpr int kEntries = 1;
constexpr KernelShape kernel_shape(int) { return masked_rows::kernel_shape(HEAD_DIM, HEAD_DIM_V); }
#endif

struct Case {
  int entry, batch, heads_q, heads_kv, len_q, len_k, ctas, shift;
  bool is_bfloat16, draws, sorted;
  float scale, softcap;
  bool alibi;
  MaskKind kind;

  std::string describe() const {
    char text[300];
    std::snprintf(text, sizeof(text),
                  "entry %d batch %d heads %d/%d lengths %d %d ctas %d %s %s%s softcap %g alibi %d shift %d mask %s", entry, batch, heads_q,
                  heads_kv, len_q, len_k, ctas, is_bfloat16 ? "bf16" : "fp16", draws ? "drawn" : "dealt",
                  sorted ? " sorted" : "", double(softcap), int(alibi), shift, name(kind));
    return text;
  }
};

Case draw_case(Random& random) {
  Case c{};
  c.entry = random.range(0, kEntries - 1);
  KernelShape const shape = kernel_shape(c.entry);
  c.batch = random.range(1, 2);
  c.heads_kv = random.range(1, 2);
  c.heads_q = c.heads_kv * random.range(1, 2);
  c.len_q = random.range(1, random.chance(0.3) ? 2 * shape.block_m + 70 : shape.block_m + 30);
  c.len_k = random.range(1, random.chance(0.2) ? 34 * 16 : 7 * shape.block_n);
  c.ctas = random.range(1, 3);
  c.is_bfloat16 = random.chance(0.7);
  c.draws = random.chance(0.5);
  c.sorted = c.draws && random.chance(0.7);
  c.scale = 0.5f / std::sqrt(float(HEAD_DIM)) * float(random.range(1, 4));
  if (random.chance(0.45)) {
    c.softcap = random.chance(0.7) ? float(random.range(1, 30)) : 0.f;
    c.alibi = random.chance(0.6);
    c.shift = random.range(-50, 50);
  }
  c.kind = MaskKind(random.range(0, 2));
#ifdef ONE_KERNEL
  c.entry = c.shift = 0;
  c.is_bfloat16 = true;
  c.softcap = 0;
  c.alibi = false;
#endif
  return c;
}

template <class Element>
void run(Case const& c, Random& random) {
  KernelShape const shape = kernel_shape(c.entry);
  bool const modified = c.softcap != 0 || c.alibi;
  Tensor4<Element> const q(random, c.batch, c.heads_q, c.len_q, HEAD_DIM), k(random, c.batch, c.heads_kv, c.len_k, HEAD_DIM),
      v(random, c.batch, c.heads_kv, c.len_k, HEAD_DIM_V);
  Tensor4<Element> out(random, c.batch, c.heads_q, c.len_q, HEAD_DIM_V);
  out.poison();
  std::vector<float> lse(size_t(c.batch * c.heads_q * c.len_q), NAN);
  std::vector<float> slopes;
  for (int head = 0; head < c.heads_q; ++head) slopes.push_back(c.alibi ? 0.5f / float(1 + head) : 0.f);
  Mask const mask(random, c.kind, c.batch, c.heads_kv, c.len_q, c.len_k, 64, shape.block_n, shape.block_m / 64);
  int ticket = 0;

  float const scale_log2 = float((c.softcap > 0 ? c.softcap : c.scale) * 1.4426950408889634);
  double const softcap_scale = c.softcap > 0 ? c.scale / c.softcap : 0;
  FwdParams params{.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data(), .lse = lse.data(), .ticket = &ticket};
  params.q_strides = q.strides;
  params.k_strides = k.strides;
  params.v_strides = v.strides;
  params.out_strides = out.strides;
  params.batch = c.batch;
  params.heads_q = c.heads_q;
  params.heads_kv = c.heads_kv;
  params.len_q = c.len_q;
  params.len_k = c.len_k;
  params.head_dim = HEAD_DIM;
  params.head_dim_v = HEAD_DIM_V;
  params.band = {-kNoLimit, kNoLimit};
  params.scale_log2 = scale_log2;
  params.power_scale = power_of_two_from(scale_log2);
  params.order = sm90::forward::tile_order(shape, true, c.batch, c.heads_q, c.heads_kv, c.len_q, c.len_k, HEAD_DIM, c.ctas);
  params.draws_tiles = c.draws;
  params.tile_heads = 1;
  params.sequences.shift = c.shift;
  if (modified) {
    params.score = {.softcap_scale = float(softcap_scale),
                    .softcap = softcap_polynomial(softcap_scale, c.softcap * 1.4426950408889634, c.len_k),
                    .slope_factor = float(1 / (c.softcap > 0 ? c.softcap : c.scale)),
                    .slopes = c.alibi ? slopes.data() : nullptr,
                    .slopes_batch_stride = 0,
                    .slopes_head_stride = 1};
  }
  params.mask = mask.tile_mask(c.sorted);
  FwdPlan plan{};
  plan.entry = c.entry;
  plan.dtype = c.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  plan.variant = modified ? Variant::kMaskedModified : Variant::kMasked;
  plan.ctas = std::min<int64_t>(c.ctas, params.order.num_tiles());
#ifdef ONE_KERNEL
  using Kernel = masked_rows::Traits<Element, HEAD_DIM, kTile, Variant::kMasked, HEAD_DIM_V>;
  cudaError_t const error = masked_rows::launch_kernel<Kernel>(plan, params, nullptr);
#else
  cudaError_t const error = masked_rows::launch<HEAD_DIM, HEAD_DIM_V>(plan, params, nullptr);
#endif
  if (error != cudaSuccess) throw std::runtime_error("the launch failed");

  double const epsilon = c.is_bfloat16 ? 0x1p-8 : 0x1p-10;  // of P and of out
  std::vector<double> scores(size_t(c.len_k), 0), sums(HEAD_DIM_V), sizes(HEAD_DIM_V);
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < c.heads_q; ++h) {
      int const h_kv = h / (c.heads_q / c.heads_kv);
      for (int i = 0; i < c.len_q; ++i) {
        double largest = -INFINITY, sum = 0;
        for (int j = 0; j < c.len_k; ++j) {
          double& score = scores[size_t(j)] = -INFINITY;
          if (!mask.sees(b, h_kv, i, j)) continue;
          score = 0;
          for (int d = 0; d < HEAD_DIM; ++d) score += double(q(b, h, i, d)) * double(k(b, h_kv, j, d));
          score *= double(c.scale);
          if (c.softcap > 0) score = double(c.softcap) * std::tanh(score / double(c.softcap));
          score -= double(slopes[size_t(h)]) * std::abs(i + c.shift - j);
          largest = std::max(largest, score);
        }
        std::fill(sums.begin(), sums.end(), 0);
        std::fill(sizes.begin(), sizes.end(), 0);
        for (int j = 0; j < c.len_k; ++j) {
          if (scores[size_t(j)] == -INFINITY) continue;
          double const p = std::exp(scores[size_t(j)] - largest);
          sum += p;
          for (int d = 0; d < HEAD_DIM_V; ++d) {
            sums[size_t(d)] += p * double(v(b, h_kv, j, d));
            sizes[size_t(d)] += p * std::abs(double(v(b, h_kv, j, d)));
          }
        }
        float const got_lse = lse[size_t((b * c.heads_q + h) * c.len_q + i)];
        double const want_lse = largest + std::log(sum);
        auto const wrong = [&](char const* what, int d, double got, double want) {
          throw std::runtime_error(std::string(what) + " of batch " + std::to_string(b) + " head " + std::to_string(h) +
                                   " row " + std::to_string(i) + " column " + std::to_string(d) + ": got " +
                                   std::to_string(got) + ", expected " + std::to_string(want));
        };
        bool const blind = sum == 0;
        if (blind ? got_lse != -INFINITY : !(std::abs(got_lse - want_lse) < 2e-4 + 5e-5 * std::abs(want_lse) + 5e-5 * double(c.softcap))) {
          wrong("LSE", 0, double(got_lse), want_lse);
        }
        for (int d = 0; d < HEAD_DIM_V; ++d) {
          double const want = blind ? 0 : sums[size_t(d)] / sum, got = double(out(b, h, i, d));
          double const bound = blind ? 0 : 2 * epsilon * sizes[size_t(d)] / sum + 1e-6;
          if (!(std::abs(got - want) <= bound)) wrong("out", d, got, want);
        }
      }
    }
  }
  out.check_padding();
}

}  // namespace

int main(int argc, char** argv) {
  int const first = std::atoi(argv[1]), count = std::atoi(argv[2]);
  emu::machine.diverges = argc > 3;
  int failures = 0;
  for (int number = first; number < first + count; ++number) {
    Random random(uint64_t(number) * 1'000'003 + HEAD_DIM);
    Case const c = draw_case(random);
    emu::seed(uint64_t(number));
    try {
#ifdef ONE_KERNEL
      run<cutlass::bfloat16_t>(c, random);
#else
      c.is_bfloat16 ? run<cutlass::bfloat16_t>(c, random) : run<cutlass::half_t>(c, random);
#endif
      std::printf("ok %d: %s\n", number, c.describe().c_str());
    } catch (std::runtime_error const& error) {
      std::printf("FAILED %d: %s\n  %s\n", number, c.describe().c_str(), error.what());
      ++failures;
    }
    std::fflush(stdout);
  }
  return failures > 0;
}
