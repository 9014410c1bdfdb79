// Tuning tables: measured choices that replace the plan's own, for the very calls that were measured.
//
// A table belongs to one kind of GPU and is loaded by the user (flash_cute.use_tuning), never by itself. Where none is
// loaded, a plan pays one atomic load; where one is, a hash of seventeen integers. Loading is safe beside plans of
// other threads: a plan sees the old table or the new one.
#pragma once

#include "device.h"

namespace flash_cute {

// The call that a choice was measured for. A dense call is described exactly: how many tiles its last wave has, and so
// which tile is best, changes with every length, and an entry must never make a call slower that was not measured. Of
// packed sequences, whose totals are others in every step of a training, `batch`, `len_q` and `len_k` are rounded up to
// powers of two: the host knows no more of their lengths than whether the hints say that all are equal.
struct TuningKey {
  static constexpr int kFields = 17;
  static constexpr std::array<std::string_view, kFields> kNames{
      "backward", "bfloat16", "packed",   "equal_lengths", "deterministic", "softcap",
      "alibi",    "batch",    "heads_q",  "heads_kv",      "len_q",         "len_k",
      "head_dim", "head_dim_v", "band_lower", "band_upper", "num_sms"};
  std::array<int, kFields> values;

  bool operator==(TuningKey const&) const = default;
};

TuningKey tuning_key(bool backward, FwdArgs const& args, Problem const& problem, Gpu gpu);

struct TuningEntry {
  Tuned tuned;
  Choice choice;  // if kChosen
};

// What the table that is loaded says of a call that leaves the choice to the plan.
TuningEntry find_tuning(TuningKey const& key, TensorInfo const& q, Gpu gpu);

// Whether a table is loaded, as cheaply as can be.
bool has_tuning();

// The kind of GPU that the loaded table is of; empty without one.
std::string tuning_gpu();

// Loads the table of `gpu`, a device's name. Each line of `rows` has the fields of a TuningKey as name=value, and at
// its end choice=<name>, see parse_choice. An empty `gpu` unloads.
void set_tuning(std::string_view gpu, int64_t capability, std::string_view rows);

// What is asked of the plan: the choice of the table, where there is one and the caller insists on nothing else.
struct Tuning {
  Tuned tuned = Tuned::kNoTable;
  Choice choice = {};
};

template <class InstanceType>
Tuning tune(std::span<InstanceType const> instances, FwdArgs const& args, Problem const& problem, Gpu gpu) {
  Choice const& asked = problem.asked;
  Tuning result{.choice = asked};
  bool const forced = asked.entry >= 0 || asked.split >= 0;
  // Tables have none of these, and the second have one tile.
  bool const untuned = problem.fp8 || problem.accumulate != AccumulateIn::kFloat32 || problem.has_mask() ||
                       (std::is_same_v<InstanceType, FwdInstance> && problem.row_invariant);
  if (!has_tuning() || tuner_is_running || forced || untuned) return result;
  constexpr bool kBackward = std::is_same_v<InstanceType, BwdInstance>;
  TuningEntry const found = find_tuning(tuning_key(kBackward, args, problem, gpu), args.q, gpu);
  result.tuned = found.tuned;
  if (found.tuned != Tuned::kChosen) return result;
  if (asked.backend != Backend::kAuto && asked.backend != found.choice.backend) {
    result.tuned = Tuned::kNoEntry;
  } else if (smallest_size(instances, found.choice.backend, problem) == kNoInstance) {
    result.tuned = Tuned::kNotBuilt;
  } else {
    result.choice = found.choice;
  }
  return result;
}

}  // namespace flash_cute
