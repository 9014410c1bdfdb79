// Random calls of the Hopper backward with a mask (dq_in_memory), see cases.h.
#include "planning/tile_mask.h"
#include "sm90/backward/dq_in_memory/family.h"
#include "sm90/backward/dq_in_memory/launch.cuh"

#include "cases.h"

namespace {

using namespace flash_cute;
namespace dq_in_memory = sm90::backward::dq_in_memory;

struct Case {
  int ctas;
  bool is_bfloat16;
  Scores scores;
  MaskKind kind;
  Problem problem;

  std::string describe() const {
    char text[300];
    std::snprintf(text, sizeof(text), "batch %d heads %d/%d lengths %d %d ctas %d %s%s softcap %g alibi %d mask %s",
                  problem.batch, problem.heads_q, problem.heads_kv, problem.len_q, problem.len_k, ctas,
                  is_bfloat16 ? "bf16" : "fp16", problem.deterministic ? " deterministic" : "", scores.softcap,
                  int(!scores.slopes.empty()), name(kind));
    return text;
  }
};

Case draw_case(Random& random) {
  KernelShape const shape = dq_in_memory::kernel_shape(HEAD_DIM, HEAD_DIM, Variant::kMasked);
  Case c{};
  c.ctas = random.range(1, 3);
  c.is_bfloat16 = random.chance(0.7);
  c.kind = MaskKind(random.range(0, 2));
  Problem& problem = c.problem;
  problem.batch = random.range(1, 2);
  problem.heads_kv = random.range(1, 2);
  problem.heads_q = problem.heads_kv * random.range(1, 2);
  problem.len_q = problem.lse_rows = random.range(1, random.chance(0.3) ? 5 * shape.block_m : 3 * shape.block_m);
  problem.len_k = random.range(1, random.chance(0.3) ? 4 * shape.block_n : 2 * shape.block_n);
  problem.head_dim = problem.head_dim_v = HEAD_DIM;
  problem.bfloat16 = c.is_bfloat16;
  problem.deterministic = random.chance(0.4);
  problem.band = {-kNoLimit, kNoLimit};
  c.scores = Scores::draw(random, problem.heads_q, /*shifts=*/false);
  problem.scale = c.scores.scale;
  problem.softcap = c.scores.softcap;
  problem.has_alibi = !c.scores.slopes.empty();
  problem.mask_intervals = c.kind == MaskKind::kTwoIntervals ? 2 : 1;
  problem.mask_matrix = c.kind == MaskKind::kBits;
  return c;
}

// A gradient, and how large its terms are together.
struct Gradient {
  std::vector<double> sums, sizes;

  explicit Gradient(int rows) : sums(size_t(rows) * HEAD_DIM), sizes(sums.size()) {}

  void add(int row, int d, double factor, double factor_size, double value) {
    size_t const at = size_t(row) * HEAD_DIM + size_t(d);
    sums[at] += factor * value;
    sizes[at] += factor_size * std::abs(value);
  }
};

template <class Element>
struct Tensors {
  Tensor4<Element> q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse;

  Tensors(Problem const& p, Random& random)
      : q(random, p.batch, p.heads_q, p.len_q, HEAD_DIM),
        k(random, p.batch, p.heads_kv, p.len_k, HEAD_DIM),
        v(random, p.batch, p.heads_kv, p.len_k, HEAD_DIM),
        out(random, p.batch, p.heads_q, p.len_q, HEAD_DIM),
        dout(random, p.batch, p.heads_q, p.len_q, HEAD_DIM),
        dq(random, p.batch, p.heads_q, p.len_q, HEAD_DIM),
        dk(random, p.batch, p.heads_kv, p.len_k, HEAD_DIM),
        dv(random, p.batch, p.heads_kv, p.len_k, HEAD_DIM),
        lse(size_t(p.batch * p.heads_q * p.len_q)) {
    for (auto* gradient : {&dq, &dk, &dv}) gradient->poison();
  }
};

struct Gradients {
  Gradient dq, dk, dv;
};

// The forward's results, and the exact gradients with them.
template <class Element>
Gradients compute(Case const& c, Mask const& mask, Tensors<Element>& t) {
  Problem const& p = c.problem;
  Gradients exact{Gradient(p.batch * p.heads_q * p.len_q), Gradient(p.batch * p.heads_kv * p.len_k),
                  Gradient(p.batch * p.heads_kv * p.len_k)};
  int row = 0;
  for (int b = 0; b < p.batch; ++b) {
    for (int h = 0; h < p.heads_q; ++h) {
      int const h_kv = h / (p.heads_q / p.heads_kv);
      for (int i = 0; i < p.len_q; ++i, ++row) {
        Weights const weights(t.q, t.k, mask, c.scores, b, h, h_kv, i, p.len_k);
        t.lse[size_t(row)] = float(weights.lse);
        double delta = 0;
        for (int d = 0; d < HEAD_DIM; ++d) {
          double o = 0;
          for (int j = 0; j < p.len_k; ++j) o += weights.p[size_t(j)] * double(t.v(b, h_kv, j, d));
          t.out.at(b, h, i, d) = Element(float(o));
          delta += double(t.out(b, h, i, d)) * double(t.dout(b, h, i, d));
        }
        for (int j = 0; j < p.len_k; ++j) {
          double const weight = weights.p[size_t(j)];
          if (weight == 0) continue;
          int const key = (b * p.heads_kv + h_kv) * p.len_k + j;
          double dp = 0;
          for (int d = 0; d < HEAD_DIM; ++d) dp += double(t.dout(b, h, i, d)) * double(t.v(b, h_kv, j, d));
          double const factor = weight * weights.derivative[size_t(j)] * p.scale;
          double const ds = factor * (dp - delta), ds_size = factor * (std::abs(dp) + std::abs(delta));
          for (int d = 0; d < HEAD_DIM; ++d) {
            exact.dq.add(row, d, ds, ds_size, double(t.k(b, h_kv, j, d)));
            exact.dk.add(key, d, ds, ds_size, double(t.q(b, h, i, d)));
            exact.dv.add(key, d, weight, weight, double(t.dout(b, h, i, d)));
          }
        }
      }
    }
  }
  return exact;
}

template <class Element>
void check(char const* what, Case const& c, int heads, int rows, Tensor4<Element>& got, Gradient const& exact) {
  double const epsilon = c.is_bfloat16 ? 0x1p-8 : 0x1p-10;
  size_t index = 0;
  for (int b = 0; b < c.problem.batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      for (int i = 0; i < rows; ++i) {
        for (int d = 0; d < HEAD_DIM; ++d, ++index) {
          expect(double(got(b, h, i, d)), exact.sums[index], 2 * epsilon * exact.sizes[index] + 1e-5, what, b, h, i, d);
        }
      }
    }
  }
  got.check_padding();
}

template <class Element>
void run(Case const& c, Random& random) {
  Problem const& problem = c.problem;
  BwdPlan plan{};
  plan.dtype = c.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  plan.head_dim = plan.head_dim_v = HEAD_DIM;
  plan.deterministic = problem.deterministic;
  plan.parts = 1;
  dq_in_memory::Family::plan(plan, problem, Choice{}, Gpu{.capability = 90, .num_sms = c.ctas});
  Mask const mask(random, c.kind, problem.batch, problem.heads_kv, problem.len_q, problem.len_k, plan.mask.unit_rows,
                  plan.mask.block_n, 1);
  Tensors<Element> t(problem, random);
  Gradients const exact = compute(c, mask, t);

  std::vector<char> workspace(size_t(plan.workspace.bytes) + 256, char(0xff));  // NaN
  char* const base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
  BwdParams params{};
  params.q = t.q.data(), params.k = t.k.data(), params.v = t.v.data();
  params.out = t.out.data(), params.dout = t.dout.data(), params.lse = t.lse.data();
  params.dq = t.dq.data(), params.dk = t.dk.data(), params.dv = t.dv.data();
  params.dq_acc = reinterpret_cast<float*>(base + plan.workspace.dq_acc);
  params.lse_log2 = reinterpret_cast<float*>(base + plan.workspace.lse_log2);
  params.delta = reinterpret_cast<float*>(base + plan.workspace.delta);
  params.semaphores = reinterpret_cast<int*>(base + plan.workspace.semaphores);
  params.counters = reinterpret_cast<int*>(base + plan.workspace.counters);
  params.q_strides = t.q.strides, params.k_strides = t.k.strides, params.v_strides = t.v.strides;
  params.out_strides = t.out.strides, params.dout_strides = t.dout.strides;
  params.dq_strides = t.dq.strides, params.dk_strides = t.dk.strides, params.dv_strides = t.dv.strides;
  params.batch = problem.batch, params.heads_q = problem.heads_q, params.heads_kv = problem.heads_kv;
  params.len_q = params.lse_rows = problem.len_q;
  params.len_k = problem.len_k;
  params.head_dim = params.head_dim_v = HEAD_DIM;
  params.band = problem.band;
  params.scale = float(problem.scale);
  params.scale_log2 = c.scores.scale_log2();
  params.deterministic = problem.deterministic;
  params.m_blocks = plan.m_blocks, params.n_blocks = plan.n_blocks;
  params.heads_per_kv = problem.heads_q / problem.heads_kv;
  params.task_order = plan.task_order;
  params.split = plan.split;
  params.score = c.scores.terms(problem.len_k);
  params.mask = mask.tile_mask(/*sorted=*/false);
  cudaError_t const error =
      c.scores.are_modified()
          ? dq_in_memory::launch_variant<HEAD_DIM, HEAD_DIM, Variant::kMaskedModified>(plan, params, nullptr)
          : dq_in_memory::launch_variant<HEAD_DIM, HEAD_DIM, Variant::kMasked>(plan, params, nullptr);
  if (error != cudaSuccess) throw std::runtime_error("the launch failed");
  check("dq", c, problem.heads_q, problem.len_q, t.dq, exact.dq);
  check("dk", c, problem.heads_kv, problem.len_k, t.dk, exact.dk);
  check("dv", c, problem.heads_kv, problem.len_k, t.dv, exact.dv);
}

}  // namespace

int main(int argc, char** argv) {
  return run_cases</*kHasFloat16=*/true>(
      argc, argv, draw_case, []<class Element>(Case const& c, Random& random) { run<Element>(c, random); });
}
