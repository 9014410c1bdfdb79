// Random calls of the Hopper backward with a mask (dq_in_memory), on the emulated machine, against double precision:
// as masked_forward.cpp. HEAD_DIM is a macro.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "planning/backward.h"
#include "planning/tile_mask.h"
#include "sm90/backward/dq_in_memory/family.h"
#include "sm90/backward/dq_in_memory/launch.cuh"

#include "machine/machine.h"
#include "mask.h"
#include "tensors.h"

namespace {

using namespace flash_cute;
namespace dq_in_memory = sm90::backward::dq_in_memory;
constexpr double kLog2E = 1.4426950408889634;

struct Case {
  int ctas;
  bool alibi;
  MaskKind kind;
  Problem problem;

  std::string describe() const {
    char text[300];
    std::snprintf(text, sizeof(text), "batch %d heads %d/%d lengths %d %d ctas %d %s%s softcap %g alibi %d mask %s",
                  problem.batch, problem.heads_q, problem.heads_kv, problem.len_q, problem.len_k, ctas,
                  problem.bfloat16 ? "bf16" : "fp16", problem.deterministic ? " deterministic" : "", problem.softcap,
                  int(alibi), name(kind));
    return text;
  }
};

Case draw_case(Random& random) {
  KernelShape const shape = dq_in_memory::kernel_shape(HEAD_DIM, HEAD_DIM, Variant::kMasked);
  Case c{};
  Problem& problem = c.problem;
  problem.batch = random.range(1, 2);
  problem.heads_kv = random.range(1, 2);
  problem.heads_q = problem.heads_kv * random.range(1, 2);
  problem.len_q = problem.lse_rows = random.range(1, random.chance(0.3) ? 5 * shape.block_m : 3 * shape.block_m);
  problem.len_k = random.range(1, random.chance(0.3) ? 4 * shape.block_n : 2 * shape.block_n);
  problem.head_dim = problem.head_dim_v = HEAD_DIM;
  problem.bfloat16 = random.chance(0.7);
  problem.deterministic = random.chance(0.4);
  problem.scale = 0.5 / std::sqrt(double(HEAD_DIM)) * random.range(1, 3);
  problem.band = {-kNoLimit, kNoLimit};
  if (random.chance(0.4)) {
    problem.softcap = random.chance(0.7) ? random.range(1, 30) : 0;
    problem.has_alibi = c.alibi = random.chance(0.6);
  }
  c.ctas = random.range(1, 3);
  c.kind = MaskKind(random.range(0, 2));
  problem.mask_intervals = c.kind == MaskKind::kTwoIntervals ? 2 : 1;
  problem.mask_matrix = c.kind == MaskKind::kBits;
  return c;
}

// The exact gradients, and for each the sum of the sizes of its terms.
struct Reference {
  std::vector<double> dq, dk, dv, dq_size, dk_size, dv_size;
};

template <class Element>
void run(Case const& c, Random& random) {
  Problem const& problem = c.problem;
  int const batch = problem.batch, heads_q = problem.heads_q, heads_kv = problem.heads_kv, len_q = problem.len_q,
            len_k = problem.len_k, d_all = HEAD_DIM, heads_per_kv = heads_q / heads_kv;
  BwdPlan plan{};
  plan.dtype = problem.bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  plan.head_dim = plan.head_dim_v = HEAD_DIM;
  plan.deterministic = problem.deterministic;
  plan.parts = 1;
  dq_in_memory::Family::plan(plan, problem, Choice{}, Gpu{.capability = 90, .num_sms = c.ctas});

  Tensor4<Element> const q(random, batch, heads_q, len_q, d_all), k(random, batch, heads_kv, len_k, d_all),
      v(random, batch, heads_kv, len_k, d_all), dout(random, batch, heads_q, len_q, d_all);
  Tensor4<Element> out(random, batch, heads_q, len_q, d_all), dq(random, batch, heads_q, len_q, d_all),
      dk(random, batch, heads_kv, len_k, d_all), dv(random, batch, heads_kv, len_k, d_all);
  for (auto* tensor : {&dq, &dk, &dv}) tensor->poison();
  std::vector<float> slopes;
  for (int head = 0; head < heads_q; ++head) slopes.push_back(c.alibi ? 0.5f / float(1 + head) : 0.f);
  Mask const mask(random, c.kind, batch, heads_kv, len_q, len_k, plan.mask.unit_rows, plan.mask.block_n, 1);

  // The forward, and the gradients.
  std::vector<float> lse(size_t(batch * heads_q * len_q), 0.f);
  Reference exact;
  for (auto* list : {&exact.dq, &exact.dq_size}) list->resize(size_t(batch) * size_t(heads_q * len_q * d_all));
  for (auto* list : {&exact.dk, &exact.dv, &exact.dk_size, &exact.dv_size}) {
    list->resize(size_t(batch) * size_t(heads_kv * len_k * d_all));
  }
  std::vector<double> p(size_t(len_k), 0), slope_of(size_t(len_k), 0), o(std::size_t(HEAD_DIM), 0);
  for (int b = 0; b < batch; ++b) {
    for (int h = 0; h < heads_q; ++h) {
      int const h_kv = h / heads_per_kv;
      for (int i = 0; i < len_q; ++i) {
        double largest = -INFINITY, sum = 0;
        for (int j = 0; j < len_k; ++j) {
          double& score = p[size_t(j)] = -INFINITY;
          if (!mask.sees(b, h_kv, i, j)) continue;
          score = 0;
          for (int d = 0; d < d_all; ++d) score += double(q(b, h, i, d)) * double(k(b, h_kv, j, d));
          score *= problem.scale;
          slope_of[size_t(j)] = 1;
          if (problem.softcap > 0) {
            double const tanh = std::tanh(score / problem.softcap);
            score = problem.softcap * tanh;
            slope_of[size_t(j)] = 1 - tanh * tanh;
          }
          score -= double(slopes[size_t(h)]) * std::abs(i - j);
          largest = std::max(largest, score);
        }
        for (double& x : p) sum += x = x == -INFINITY ? 0 : std::exp(x - largest);
        std::fill(o.begin(), o.end(), 0);
        for (int j = 0; j < len_k; ++j) {
          if (p[size_t(j)] == 0) continue;
          p[size_t(j)] /= sum;
          for (int d = 0; d < d_all; ++d) o[size_t(d)] += p[size_t(j)] * double(v(b, h_kv, j, d));
        }
        double delta = 0;
        for (int d = 0; d < d_all; ++d) {
          out.at(b, h, i, d) = Element(float(o[size_t(d)]));
          delta += double(out(b, h, i, d)) * double(dout(b, h, i, d));
        }
        lse[size_t((b * heads_q + h) * len_q + i)] = sum == 0 ? -INFINITY : float(largest + std::log(sum));
        size_t const row = (size_t(b * heads_q + h) * size_t(len_q) + size_t(i)) * size_t(d_all);
        for (int j = 0; j < len_k; ++j) {
          if (p[size_t(j)] == 0) continue;
          size_t const key = (size_t(b * heads_kv + h_kv) * size_t(len_k) + size_t(j)) * size_t(d_all);
          double dp = 0, dp_size = std::abs(delta);
          for (int d = 0; d < d_all; ++d) {
            double const term = double(dout(b, h, i, d)) * double(v(b, h_kv, j, d));
            dp += term;
            dp_size += std::abs(term) / 8;
          }
          double const factor = p[size_t(j)] * slope_of[size_t(j)] * problem.scale, ds = factor * (dp - delta);
          double const ds_size = factor * dp_size;
          for (int d = 0; d < d_all; ++d) {
            size_t const at = size_t(d);
            exact.dq[row + at] += ds * double(k(b, h_kv, j, d));
            exact.dq_size[row + at] += ds_size * std::abs(double(k(b, h_kv, j, d)));
            exact.dk[key + at] += ds * double(q(b, h, i, d));
            exact.dk_size[key + at] += ds_size * std::abs(double(q(b, h, i, d)));
            exact.dv[key + at] += p[size_t(j)] * double(dout(b, h, i, d));
            exact.dv_size[key + at] += p[size_t(j)] * std::abs(double(dout(b, h, i, d)));
          }
        }
      }
    }
  }

  std::vector<char> workspace(size_t(plan.workspace.bytes) + 256, char(0xff));  // NaN
  char* const base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
  auto const part = [&]<class T>(T*, int64_t offset) { return offset == kNoPart ? nullptr : reinterpret_cast<T*>(base + offset); };
  BwdParams params{};
  params.q = q.data(), params.k = k.data(), params.v = v.data(), params.out = out.data(), params.dout = dout.data();
  params.dq = dq.data(), params.dk = dk.data(), params.dv = dv.data();
  params.lse = lse.data();
  params.dq_acc = part((float*)nullptr, plan.workspace.dq_acc);
  params.lse_log2 = part((float*)nullptr, plan.workspace.lse_log2);
  params.delta = part((float*)nullptr, plan.workspace.delta);
  params.semaphores = part((int*)nullptr, plan.workspace.semaphores);
  params.counters = part((int*)nullptr, plan.workspace.counters);
  params.q_strides = q.strides, params.k_strides = k.strides, params.v_strides = v.strides;
  params.out_strides = out.strides, params.dout_strides = dout.strides;
  params.dq_strides = dq.strides, params.dk_strides = dk.strides, params.dv_strides = dv.strides;
  params.batch = batch, params.heads_q = heads_q, params.heads_kv = heads_kv;
  params.len_q = params.lse_rows = len_q;
  params.len_k = len_k;
  params.head_dim = params.head_dim_v = HEAD_DIM;
  params.band = problem.band;
  params.scale = float(problem.scale);
  params.scale_log2 = float((problem.softcap > 0 ? problem.softcap : problem.scale) * kLog2E);
  params.deterministic = problem.deterministic;
  params.m_blocks = plan.m_blocks, params.n_blocks = plan.n_blocks;
  params.heads_per_kv = heads_per_kv;
  params.task_order = plan.task_order;
  params.split = plan.split;
  double const softcap_scale = problem.softcap > 0 ? problem.scale / problem.softcap : 0;
  params.score = {.softcap_scale = float(softcap_scale),
                  .softcap = softcap_polynomial(softcap_scale, problem.softcap * kLog2E, len_k),
                  .slope_factor = float(1 / (problem.softcap > 0 ? problem.softcap : problem.scale)),
                  .slopes = c.alibi ? slopes.data() : nullptr,
                  .slopes_batch_stride = 0,
                  .slopes_head_stride = 1};
  params.mask = mask.tile_mask(false);
  cudaError_t const error =
      problem.modifies_scores()
          ? dq_in_memory::launch_variant<HEAD_DIM, HEAD_DIM, Variant::kMaskedModified>(plan, params, nullptr)
          : dq_in_memory::launch_variant<HEAD_DIM, HEAD_DIM, Variant::kMasked>(plan, params, nullptr);
  if (error != cudaSuccess) throw std::runtime_error("the launch failed");

  double const epsilon = problem.bfloat16 ? 0x1p-8 : 0x1p-10;
  auto const check = [&](char const* what, Tensor4<Element>& got, int heads, int rows, std::vector<double> const& want,
                         std::vector<double> const& size) {
    size_t index = 0;
    for (int b = 0; b < batch; ++b) {
      for (int h = 0; h < heads; ++h) {
        for (int i = 0; i < rows; ++i) {
          for (int d = 0; d < d_all; ++d, ++index) {
            double const value = double(got(b, h, i, d)), error = std::abs(value - want[index]);
            if (error <= 2 * epsilon * size[index] + 1e-6) continue;
            throw std::runtime_error(std::string(what) + " of batch " + std::to_string(b) + " head " + std::to_string(h) +
                                     " row " + std::to_string(i) + " column " + std::to_string(d) + ": got " +
                                     std::to_string(value) + ", expected " + std::to_string(want[index]) +
                                     ", terms of " + std::to_string(size[index]));
          }
        }
      }
    }
    got.check_padding();
  };
  check("dq", dq, heads_q, len_q, exact.dq, exact.dq_size);
  check("dk", dk, heads_kv, len_k, exact.dk, exact.dk_size);
  check("dv", dv, heads_kv, len_k, exact.dv, exact.dv_size);
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
      c.problem.bfloat16 ? run<cutlass::bfloat16_t>(c, random) : run<cutlass::half_t>(c, random);
      std::printf("ok %d: %s\n", number, c.describe().c_str());
    } catch (std::runtime_error const& error) {
      std::printf("FAILED %d: %s\n  %s\n", number, c.describe().c_str(), error.what());
      ++failures;
    }
    std::fflush(stdout);
  }
  return failures > 0;
}
