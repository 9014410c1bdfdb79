// What the drivers share: the cases' loop, and the softmax in double precision.
//
// A driver is called with FIRST COUNT [diverge]: it runs the cases of the seeds from FIRST on, and prints a line for
// each.
// HEAD_DIM and HEAD_DIM_V are macros.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include <cutlass/numeric_types.h>

#include "contract/params.h"
#include "machine/machine.h"
#include "mask.h"
#include "tensors.h"

// What scores are: softcap * tanh(scale q.k / softcap) - slope |row + shift - column|.
struct Scores {
  double scale;
  double softcap;             // 0: none
  std::vector<float> slopes;  // of each query head; empty: none
  int shift;

  static Scores draw(Random& random, int heads_q, bool shifts) {
    double const scale = 0.5 / std::sqrt(double(HEAD_DIM)) * random.range(1, 4);
    Scores scores{.scale = scale, .softcap = 0, .slopes = {}, .shift = 0};
    if (random.chance(0.55)) return scores;
    if (random.chance(0.7)) scores.softcap = random.range(1, 30);
    for (int head = 0; head < heads_q && random.chance(0.8); ++head) {
      scores.slopes.resize(size_t(heads_q));
      scores.slopes[size_t(head)] = 0.5f / float(1 + head);
    }
    if (shifts) scores.shift = random.range(-50, 50);
    return scores;
  }

  bool are_modified() const { return softcap > 0 || !slopes.empty(); }
  float scale_log2() const { return float((softcap > 0 ? softcap : scale) * kLog2E); }

  // As csrc/api/kernel_args.h makes them.
  flash_cute::ScoreTerms terms(int len_k) const {
    double const softcap_scale = softcap > 0 ? scale / softcap : 0;
    return {.softcap_scale = float(softcap_scale),
            .softcap = flash_cute::softcap_polynomial(softcap_scale, softcap * kLog2E, len_k),
            .slope_factor = float(1 / (softcap > 0 ? softcap : scale)),
            .slopes = slopes.empty() ? nullptr : slopes.data(),
            .slopes_batch_stride = 0,
            .slopes_head_stride = 1};
  }

  static constexpr double kLog2E = 1.4426950408889634;
};

// A row's weights; all 0 where it sees no key.
struct Weights {
  std::vector<double> p;
  std::vector<double> derivative;  // of the score by scale * q.k
  double lse = -INFINITY;

  template <class Element>
  Weights(Tensor4<Element> const& q, Tensor4<Element> const& k, Mask const& mask, Scores const& scores, int batch,
          int head, int head_kv, int row, int len_k)
      : p(size_t(len_k), -INFINITY), derivative(size_t(len_k), 1.) {
    double largest = -INFINITY, sum = 0;
    for (int j = 0; j < len_k; ++j) {
      if (!mask.sees(batch, head_kv, row, j)) continue;
      double score = 0;
      for (int d = 0; d < HEAD_DIM; ++d) score += double(q(batch, head, row, d)) * double(k(batch, head_kv, j, d));
      score *= scores.scale;
      if (scores.softcap > 0) {
        double const tanh = std::tanh(score / scores.softcap);
        score = scores.softcap * tanh;
        derivative[size_t(j)] = 1 - tanh * tanh;
      }
      if (!scores.slopes.empty()) score -= double(scores.slopes[size_t(head)]) * std::abs(row + scores.shift - j);
      p[size_t(j)] = score;
      largest = std::max(largest, score);
    }
    for (double& x : p) sum += x = x == -INFINITY ? 0 : std::exp(x - largest);
    if (sum == 0) return;
    lse = largest + std::log(sum);
    for (double& x : p) x /= sum;
  }
};

// One result against its exact value. (NaN is wrong.)
inline void expect(double got, double want, double bound, char const* what, int batch, int head, int row, int column) {
  if (got == want || std::abs(got - want) <= bound) return;
  char text[200];
  std::snprintf(text, sizeof(text), "%s of batch %d head %d row %d column %d: got %g, expected %g, bound %g", what,
                batch, head, row, column, got, want, bound);
  throw std::runtime_error(text);
}

// `draw(random)`: a case, which has `is_bfloat16` and `describe()`. `run<Element>(case, random)` throws where it is
// wrong.
template <bool kHasFloat16, class Draw, class Run>
int run_cases(int argc, char** argv, Draw const& draw, Run const& run) {
  if (argc < 3) return 2;
  int const first = std::atoi(argv[1]), count = std::atoi(argv[2]);
  emu::machine.diverges = argc > 3;
  bool failed = false;
  for (int number = first; number < first + count; ++number) {
    Random random(uint64_t(number) * 1'000'003 + HEAD_DIM);
    auto const drawn = draw(random);
    emu::seed(uint64_t(number));
    std::string const text = drawn.describe();
    try {
      if constexpr (kHasFloat16) {
        if (!drawn.is_bfloat16) run.template operator()<cutlass::half_t>(drawn, random);
      }
      if (drawn.is_bfloat16) run.template operator()<cutlass::bfloat16_t>(drawn, random);
      std::printf("ok %d: %s\n", number, text.c_str());
    } catch (std::runtime_error const& error) {
      std::printf("FAILED %d: %s\n  %s\n", number, text.c_str(), error.what());
      failed = true;
    }
    std::fflush(stdout);
  }
  return failed;
}
