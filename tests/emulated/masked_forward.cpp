// Random calls of the Hopper forward with a mask, see cases.h. With the macro ONE_KERNEL the kernel of bfloat16 and
// plain scores alone is compiled.
#include "sm90/forward/masked_rows/launch.cuh"

#include "cases.h"

namespace {

using namespace flash_cute;
namespace masked_rows = sm90::forward::masked_rows;

#ifdef ONE_KERNEL
constexpr bool kOneKernel = true;
#else
constexpr bool kOneKernel = false;
#endif

constexpr auto kTile = masked_rows::tile_config(HEAD_DIM, HEAD_DIM_V, 0);
constexpr int kEntries = masked_rows::has_entry(HEAD_DIM, HEAD_DIM_V, 1) ? 2 : 1;
constexpr KernelShape kernel_shape(int entry) { return masked_rows::kernel_shape(HEAD_DIM, HEAD_DIM_V, entry); }

struct Case {
  int entry, batch, heads_q, heads_kv, len_q, len_k, ctas;
  bool is_bfloat16, draws, sorted;
  Scores scores;
  MaskKind kind;

  std::string describe() const {
    char text[300];
    std::snprintf(text, sizeof(text),
                  "entry %d batch %d heads %d/%d lengths %d %d ctas %d %s %s%s softcap %g alibi %d shift %d mask %s",
                  entry, batch, heads_q, heads_kv, len_q, len_k, ctas, is_bfloat16 ? "bf16" : "fp16",
                  draws ? "drawn" : "dealt", sorted ? " sorted" : "", scores.softcap, int(!scores.slopes.empty()),
                  scores.shift, name(kind));
    return text;
  }
};

Case draw_case(Random& random) {
  Case c{};
  c.entry = kOneKernel ? 0 : random.range(0, kEntries - 1);
  KernelShape const shape = kernel_shape(c.entry);
  c.batch = random.range(1, 2);
  c.heads_kv = random.range(1, 2);
  c.heads_q = c.heads_kv * random.range(1, 2);
  c.len_q = random.range(1, random.chance(0.3) ? 2 * shape.block_m + 70 : shape.block_m + 30);
  c.len_k = random.range(1, random.chance(0.2) ? 15 * shape.block_n : 7 * shape.block_n);
  if (random.chance(0.05)) {  // lists of two words
    c.batch = c.heads_q = c.heads_kv = 1;
    c.len_q = std::min(c.len_q, 150);
    c.len_k = random.range(32 * shape.block_n, 36 * shape.block_n);
  }
  c.ctas = random.range(1, 3);
  c.is_bfloat16 = kOneKernel || random.chance(0.7);
  c.draws = random.chance(0.5);
  c.sorted = c.draws && random.chance(0.7);
  c.scores = Scores::draw(random, c.heads_q, /*shifts=*/true);
  if (kOneKernel) c.scores = {.scale = c.scores.scale, .softcap = 0, .slopes = {}, .shift = 0};
  c.kind = MaskKind(random.range(0, 2));
  return c;
}

template <class Element>
void check(Case const& c, Tensor4<Element> const& q, Tensor4<Element> const& k, Tensor4<Element> const& v,
           Tensor4<Element>& out, std::vector<float> const& lse, Mask const& mask) {
  double const epsilon = c.is_bfloat16 ? 0x1p-8 : 0x1p-10;  // of P and of out
  std::vector<double> sums(HEAD_DIM_V), sizes(HEAD_DIM_V);
  size_t index = 0;
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < c.heads_q; ++h) {
      int const h_kv = h / (c.heads_q / c.heads_kv);
      for (int i = 0; i < c.len_q; ++i, ++index) {
        Weights const weights(q, k, mask, c.scores, b, h, h_kv, i, c.len_k);
        std::fill(sums.begin(), sums.end(), 0);
        std::fill(sizes.begin(), sizes.end(), 0);
        for (int j = 0; j < c.len_k; ++j) {
          double const p = weights.p[size_t(j)];
          if (p == 0) continue;
          for (size_t d = 0; d < HEAD_DIM_V; ++d) {
            double const term = p * double(v(b, h_kv, j, int(d)));
            sums[d] += term;
            sizes[d] += std::abs(term);
          }
        }
        double const lse_bound = 2e-4 + 5e-5 * (std::abs(weights.lse) + c.scores.softcap);
        expect(double(lse[index]), weights.lse, lse_bound, "LSE", b, h, i, 0);
        bool const blind = weights.lse == -INFINITY;
        for (int d = 0; d < HEAD_DIM_V; ++d) {
          double const bound = blind ? 0 : 2 * epsilon * sizes[size_t(d)] + 1e-6;
          expect(double(out(b, h, i, d)), sums[size_t(d)], bound, "out", b, h, i, d);
        }
      }
    }
  }
  out.check_padding();
}

template <class Element>
void run(Case const& c, Random& random) {
  KernelShape const shape = kernel_shape(c.entry);
  Tensor4<Element> const q(random, c.batch, c.heads_q, c.len_q, HEAD_DIM),
      k(random, c.batch, c.heads_kv, c.len_k, HEAD_DIM), v(random, c.batch, c.heads_kv, c.len_k, HEAD_DIM_V);
  Tensor4<Element> out(random, c.batch, c.heads_q, c.len_q, HEAD_DIM_V);
  out.poison();
  std::vector<float> lse(size_t(c.batch * c.heads_q * c.len_q), NAN);
  Mask const mask(random, c.kind, c.batch, c.heads_kv, c.len_q, c.len_k, masked_rows::kUnitRows, shape.block_n,
                  shape.block_m / masked_rows::kUnitRows);
  int ticket = 0;

  FwdParams params{.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data()};
  params.lse = lse.data();
  params.ticket = &ticket;
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
  params.scale_log2 = c.scores.scale_log2();
  params.power_scale = power_of_two_from(params.scale_log2);
  params.order = sm90::forward::tile_order(shape, /*masked=*/true, c.batch, c.heads_q, c.heads_kv, c.len_q, c.len_k,
                                           HEAD_DIM, c.ctas);
  params.draws_tiles = c.draws;
  params.tile_heads = 1;
  params.sequences.shift = c.scores.shift;
  params.score = c.scores.terms(c.len_k);
  params.mask = mask.tile_mask(c.sorted);
  FwdPlan plan{};
  plan.entry = c.entry;
  plan.dtype = c.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  plan.variant = c.scores.are_modified() ? Variant::kMaskedModified : Variant::kMasked;
  plan.ctas = std::min<int64_t>(c.ctas, params.order.num_tiles());
  cudaError_t error;
  if constexpr (kOneKernel) {
    using Kernel = masked_rows::Traits<Element, HEAD_DIM, kTile, Variant::kMasked, HEAD_DIM_V>;
    error = masked_rows::launch_kernel<Kernel>(plan, params, nullptr);
  } else {
    error = masked_rows::launch<HEAD_DIM, HEAD_DIM_V>(plan, params, nullptr);
  }
  if (error != cudaSuccess) throw std::runtime_error("the launch failed");
  check(c, q, k, v, out, lse, mask);
}

}  // namespace

int main(int argc, char** argv) {
  return run_cases<!kOneKernel>(argc, argv, draw_case,
                                []<class Element>(Case const& c, Random& random) { run<Element>(c, random); });
}
