#include "choice.h"

#include <limits>

#include "kernel_time.h"

namespace flash_cute {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Head dim and head dim of v, in whole 16-byte vectors.
std::pair<int, int> padded_head_dims(Problem const& problem) {
  return {(problem.head_dim + 7) / 8 * 8, (problem.head_dim_v + 7) / 8 * 8};
}

// The sm90 kernel of the call if the plan may choose it, else one without `launch`.
template <class InstanceType>
InstanceType sm90_instance(Kernels<InstanceType> const& kernels, Problem const& problem, Gpu gpu, int largest) {
  bool const open = problem.backend == Backend::kAuto || problem.backend == Backend::kSm90;
  if (gpu.capability != 90 || !open || problem.accumulate != Accumulate::kFloat32) return {};
  auto const [head_dim, head_dim_v] = padded_head_dims(problem);
  InstanceType const found = kernels.find(Backend::kSm90, head_dim, head_dim_v);
  return std::max(found.head_dim, found.head_dim_v) <= largest ? found : InstanceType{};
}

// The sm80 kernel if it is a candidate: where its times are known, which they are not for modified scores and for a
// head dim of v's own.
template <class InstanceType>
InstanceType sm80_instance(Kernels<InstanceType> const& kernels, Problem const& problem) {
  bool const open = problem.backend == Backend::kAuto && problem.forced_entry < 0 && problem.forced_split < 0;
  bool const modified = problem.softcap > 0 || problem.has_alibi;
  if (!open || modified || problem.head_dim != problem.head_dim_v) return {};
  auto const [head_dim, head_dim_v] = padded_head_dims(problem);
  InstanceType const found = kernels.find(Backend::kSm80, head_dim, head_dim_v);
  return found.head_dim <= kMaxUnsplitHeadDim ? found : InstanceType{};
}

kernel_time::Work work_of(Problem const& problem, bool packed, Gpu gpu) {
  return {.sequences = sequences_of(problem, packed),
          .packed = packed,
          .ends_aligned = problem.causal != Causal::kTopLeft,
          .heads_q = problem.heads_q,
          .heads_kv = problem.heads_kv,
          .head_dim = kernel_time::nominal_head_dim(problem.head_dim),
          .head_dim_v = kernel_time::nominal_head_dim(problem.head_dim_v),
          .band = problem.band,
          .num_sms = gpu.num_sms};
}

}  // namespace

Variant fwd_variant(Problem const& problem, FwdInstance const& instance, bool packed) {
  if (problem.softcap > 0 || problem.has_alibi) return Variant::kModified;
  if (problem.accumulate != Accumulate::kFloat32) return Variant::kPacked;
  bool const one_head_dim = instance.head_dim == instance.head_dim_v;
  bool const own_head_dim = one_head_dim && problem.head_dim_v != problem.head_dim;
  return packed || own_head_dim ? Variant::kPacked : Variant::kDense;
}

TileSplit fwd_split(Problem const& problem, KernelShape const& shape, Gpu gpu) {
  return kernel_time::fwd_split(work_of(problem, /*packed=*/false, gpu), shape);
}

std::array<kernel_time::EqualSequences, 2> sequences_of(Problem const& problem, bool packed) {
  if (!packed) return {{{problem.batch, problem.len_q, problem.len_k}}};
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

bool fwd_draws(Problem const& problem, KernelShape const& shape, bool packed, Gpu gpu) {
  return kernel_time::fwd_draws(work_of(problem, packed, gpu), shape);
}

int fwd_tile_heads(Problem const& problem, KernelShape const& shape) {
  return sm90::fwd::tile_heads(shape, problem.band.is_window(problem.len_k),
                               problem.heads_q / std::max(1, problem.heads_kv));
}

Predicted choose_fwd(Problem& problem, bool packed, Gpu gpu) {
  using namespace sm90::fwd;
  FwdInstance const sm90 = sm90_instance(kFwdKernels, problem, gpu, kMaxHeadDim);
  if (sm90.launch == nullptr) return {};
  FwdInstance const sm80 = sm80_instance(kFwdKernels, problem);
  Variant const variant = fwd_variant(problem, sm90, packed);
  int const head_dim = sm90.head_dim, head_dim_v = sm90.head_dim_v, forced = problem.forced_entry;
  int const asked_split = problem.forced_split;
  bool const only_forced = has_kernel(head_dim, head_dim_v, forced, variant);
  kernel_time::Work const work = work_of(problem, packed, gpu);
  Predicted best{.sm90_us = kNever};
  for (int entry = 0; entry < kNumEntries; ++entry) {
    if (only_forced ? entry != forced : !is_candidate(head_dim, head_dim_v, entry, variant)) continue;
    KernelShape const shape = kernel_shape(head_dim, entry, head_dim_v);
    auto const consider = [&](TileSplit const& split) {
      int const heads = variant == Variant::kDense ? fwd_tile_heads(problem, shape) : 1;
      double const time = kernel_time::fwd_sm90(work, shape, speed(head_dim, entry), heads, split);
      if (time >= best.sm90_us) return;
      best.sm90_us = time;
      problem.forced_entry = entry;
      problem.forced_split = split.tiles > 0;
    };
    bool const may_split = variant == Variant::kDense && asked_split != 0;
    TileSplit const split = may_split ? kernel_time::fwd_split(work, shape) : TileSplit{};
    if (asked_split != 1 || split.tiles == 0) consider({});
    if (split.tiles > 0) consider(split);
  }
  problem.backend = Backend::kSm90;
  if (sm80.launch == nullptr) return best;
  int const chip = fwd_chip_on_hopper(packed);
  KernelShape const shape = sm80::fwd::kernel_shape(sm80.head_dim, chip, variant);
  best.sm80_us = kernel_time::fwd_sm80(work, shape);
  if (best.sm80_us < best.sm90_us) {
    problem.backend = Backend::kSm80;
    problem.forced_chip = chip;
  }
  return best;
}

Predicted choose_bwd(Problem& problem, bool packed, bool deterministic, Gpu gpu) {
  BwdInstance const sm90 = sm90_instance(kBwdKernels, problem, gpu, kMaxUnsplitHeadDim);
  BwdInstance const sm80 = sm80_instance(kBwdKernels, problem);
  if (sm90.launch == nullptr || sm80.launch == nullptr || deterministic) return {};
  kernel_time::Work const work = work_of(problem, packed, gpu);
  Variant const variant = packed ? Variant::kPacked : Variant::kDense;
  bool const wide = sm90.head_dim > sm90::bwd::kMaxHeadDim;
  int const chip = bwd_chip_on_hopper(sm80.head_dim, packed);
  bool const any_scores = packed && !sm80::bwd::has_plain_sequence_kernel(sm80.head_dim, chip);
  Predicted const best{
      .sm90_us = wide ? kernel_time::bwd_sm90_wide(
                            work, sm90::bwd_wide::kernel_shape(sm90.head_dim, sm90.head_dim_v))
                      : kernel_time::bwd_sm90(
                            work, sm90::bwd::kernel_shape(sm90.head_dim, sm90.head_dim_v, variant)),
      .sm80_us = kernel_time::bwd_sm80(work, sm80::bwd::kernel_shape(sm80.head_dim, chip, variant), any_scores)};
  if (best.sm80_us < best.sm90_us) {
    problem.backend = Backend::kSm80;
    problem.forced_chip = chip;
  }
  return best;
}

}  // namespace flash_cute
