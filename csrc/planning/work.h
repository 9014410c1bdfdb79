// A problem as the model of times sees it.
#pragma once

#include "problem.h"
#include "time_model.h"

namespace flash_cute::time_model {

// The sequences as the predictions see them. Of packed ones the host knows the totals, and from the hints the longest
// lengths: one sequence is taken to have these, and the others to share the rest equally; where that is more than a
// tile of rows, and the longest one is far longer still, half of them.
inline std::array<EqualSequences, 2> sequences_of(Problem const& problem) {
  if (!problem.packed) return {{{problem.batch, problem.len_q, problem.len_k}}};
  if (problem.batch == 0) return {};
  int others = problem.batch - 1;
  auto const mean_of_others = [&](int total, int longest) {
    return others == 0 ? 0 : static_cast<int>((int64_t{total} - longest + others - 1) / others);
  };
  int const mean = mean_of_others(problem.len_k, problem.longest_k);
  constexpr int kTileRows = 256, kFarLonger = 4;
  if (mean >= kTileRows && problem.longest_k > int64_t{kFarLonger} * mean) others -= others / 2;
  int const len_q = mean_of_others(problem.len_q, problem.longest_q);
  int const len_k = mean_of_others(problem.len_k, problem.longest_k);
  if (len_q == problem.longest_q && len_k == problem.longest_k) return {{{problem.batch, len_q, len_k}}};
  return {{{1, problem.longest_q, problem.longest_k}, {others, len_q, len_k}}};
}

inline Work work_of(Problem const& problem, Gpu gpu) {
  return {.sequences = sequences_of(problem),
          .packed = problem.packed,
          .ends_aligned = problem.causal != Causal::kTopLeft,
          .heads_q = problem.heads_q,
          .heads_kv = problem.heads_kv,
          .head_dim = nominal_head_dim(problem.head_dim),
          .head_dim_v = nominal_head_dim(problem.head_dim_v),
          .band = problem.band,
          .num_sms = gpu.num_sms};
}

}  // namespace flash_cute::time_model
