#include "planner.h"

#include "planning/tile_mask.h"
#include "tuning.h"

namespace flash_cute {
namespace {

constexpr Backend kArchitectures[] = {Backend::kSm90, Backend::kSm80};  // in the order of preference

template <class InstanceType>
constexpr char const* kDirection = std::is_same_v<InstanceType, FwdInstance> ? "forward" : "backward";

std::string capability_text(Gpu gpu) {
  return std::to_string(gpu.capability / 10) + "." + std::to_string(gpu.capability % 10);
}

template <class InstanceType>
void check_gpu(std::span<InstanceType const> instances, Backend asked, bool float8, Gpu gpu) {
  FLASH_CUTE_CHECK(!float8 || runs_on(Backend::kSm90, gpu),
                   "q: expected a GPU of compute capability 9.0 for float8 tensors, got ", capability_text(gpu));
  FLASH_CUTE_CHECK(gpu.capability >= 80, "q: expected a GPU of compute capability 8.0 (Ampere) or newer, got ",
                   capability_text(gpu));
  FLASH_CUTE_CHECK(asked != Backend::kSm90 || runs_on(asked, gpu),
                   "backend: 'sm90' expects a GPU of compute capability 9.0, got ", capability_text(gpu));
  FLASH_CUTE_CHECK(!instances.empty(), "this build has no CUDA kernels of the ", kDirection<InstanceType>,
                   ": expected CPU tensors, or a build without FLASH_CUTE_NO_CUDA");
}

template <class InstanceType>
[[noreturn]] void refuse(std::span<InstanceType const> instances, Backend asked, Problem const& problem, Gpu gpu) {
  Backend const portable = problem.fp8 ? Backend::kSm90 : Backend::kSm80;
  Backend const backend = asked == Backend::kAuto ? portable : asked;
  auto const is_of = [&](InstanceType const& instance) { return instance.family->backend == backend; };
  auto const serves_unmasked = [&](InstanceType const& instance) {
    Problem unmasked = problem;
    unmasked.mask_intervals = 0;
    unmasked.mask_matrix = unmasked.mask_blocks = false;
    return runs_on(instance.family->backend, gpu) &&
           (asked == Backend::kAuto || instance.family->backend == asked) &&
           can_serve(instance, instance.family->backend, unmasked);
  };
  FLASH_CUTE_CHECK(!problem.has_mask() || std::none_of(instances.begin(), instances.end(), serves_unmasked),
                   "mask: expected CPU tensors, or None: no ", kDirection<InstanceType>, " kernel of this build for ",
                   asked == Backend::kAuto ? "" : std::string("backend '") + backend_name(asked) + "', ",
                   "compute capability ", capability_text(gpu), " and head dim ",
                   std::max(problem.head_dim, problem.head_dim_v), " reads a mask");
  FLASH_CUTE_CHECK(std::any_of(instances.begin(), instances.end(), is_of), "backend: the ", kDirection<InstanceType>,
                   " of '", backend_name(backend), "' is not in this build, and compute capability ",
                   capability_text(gpu), " needs it; build with FLASH_CUTE_ARCHS=all");
  fail("q: this build has no ", backend_name(backend), " ", kDirection<InstanceType>, " kernel",
       problem.fp8 ? " of float8 tensors" : "", " for head dim ", std::max(problem.head_dim, problem.head_dim_v),
       "; expected ",
       asked == Backend::kAuto ? "" : "backend 'auto' or ", "a build with FLASH_CUTE_HEAD_DIMS listing ",
       std::max(problem.padded_head_dim(), problem.padded_head_dim_v()), " or more");
}

template <class InstanceType>
struct Selection {
  InstanceType const* instance = nullptr;
  Candidate candidate;
  Predicted predicted;
};

// Puts the kernel in the place of the best one so far if it is predicted to take less time. Where a time is not known,
// the one that came first stays.
template <class InstanceType>
void compete(Selection<InstanceType>& best, InstanceType const& instance, Problem const& problem, Choice const& asked,
             Gpu gpu) {
  bool const competes = best.instance != nullptr;
  Candidate const candidate = instance.family->choose(instance.head_dims, problem, asked, competes, gpu);
  Predicted predicted;
  if (competes) {
    predicted.us = instance.family->predict(instance.head_dims, problem, candidate, gpu);
    if (predicted.us == kNoTime) return;
    auto const& rival = *best.instance;
    predicted.rival = rival.family->backend;
    predicted.rival_us = rival.family->predict(rival.head_dims, problem, best.candidate, gpu);
    if (predicted.rival_us == kNoTime) return;
    if (predicted.us >= predicted.rival_us) {
      best.predicted = {.us = predicted.rival_us, .rival_us = predicted.us, .rival = instance.family->backend};
      return;
    }
  }
  best = {&instance, candidate, predicted};
}

// Of each architecture that the GPU can run, the smallest kernels that serve the call compete: one of each family that
// has them. Several architectures do if the caller leaves all open.
template <class InstanceType>
Selection<InstanceType> select(std::span<InstanceType const> instances, Problem const& problem, Choice const& asked,
                               Gpu gpu) {
  check_gpu(instances, asked.backend, problem.fp8, gpu);
  Selection<InstanceType> best;
  for (Backend backend : kArchitectures) {
    bool const may_run = best.instance != nullptr ? asked.is_open()
                                                  : asked.backend == Backend::kAuto || asked.backend == backend;
    if (!may_run || !runs_on(backend, gpu)) continue;
    int const size = smallest_size(instances, backend, problem);
    for (InstanceType const& instance : instances) {
      if (size_of(instance) == size && can_serve(instance, backend, problem)) {
        compete(best, instance, problem, asked, gpu);
      }
    }
  }
  if (best.instance == nullptr) refuse(instances, asked.backend, problem, gpu);
  return best;
}

// Decides what is the same for both directions: kernel, tile, and the copies of q, k and v. Returns the family's
// choice.
template <class DecisionType, class InstanceType>
Choice decide(DecisionType& decision, std::span<InstanceType const> instances, FwdArgs const& args,
              Problem const& problem, Tuning const& tuning, Gpu gpu) {
  Selection<InstanceType> const selected = select(instances, problem, tuning.choice, gpu);
  decision.instance = selected.instance;
  decision.gpu = gpu;
  decision.tuned = tuning.tuned;
  decision.predicted = selected.predicted;
  decision.padded_head_dim = problem.padded_head_dim();
  decision.padded_head_dim_v = problem.padded_head_dim_v();
  decision.q = read_copy(args.q, problem.vector());
  decision.k = read_copy(args.k, problem.vector());
  decision.v = read_copy(args.v, problem.vector());
  decision.plan.dtype = problem.fp8     ? DType::kFloat8
                        : problem.bfloat16 ? DType::kBFloat16
                                           : DType::kFloat16;
  decision.plan.head_dim = selected.instance->head_dims.head_dim;
  decision.plan.head_dim_v = selected.instance->head_dims.head_dim_v;
  decision.plan.entry = selected.candidate.choice.entry;
  return selected.candidate.choice;
}

// Where v has a head dim of its own and the kernel has not, the tensors of the smaller one are padded by copies.
void pad_to_one_head_dim(BwdDecision& decision) {
  int const head_dim = std::max(decision.padded_head_dim, decision.padded_head_dim_v);
  if (decision.padded_head_dim < head_dim) {
    decision.q = decision.k = decision.dq = decision.dk = Copy::kHeadDimPadded;
  }
  if (decision.padded_head_dim_v < head_dim) {
    decision.v = decision.out = decision.dout = decision.dv = Copy::kHeadDimPadded;
  }
  decision.padded_head_dim = decision.padded_head_dim_v = head_dim;
}

// Leaves out the rows of a dense batch that see no key: they are at both ends.
SeeingRows drop_blind_rows(Problem& problem) {
  Band& band = problem.band;
  int const first = band.has_upper() ? std::max(0, -band.upper) : 0;
  int64_t const limit = band.has_lower() ? std::clamp<int64_t>(int64_t{problem.len_k} - band.lower, 0, problem.len_q)
                                         : problem.len_q;
  bool const some = problem.len_k > 0 && first < limit;
  problem.len_q = some ? static_cast<int>(limit - first) : 0;
  if (!some) return {};
  if (band.has_lower()) band.lower += first;
  if (band.has_upper()) band.upper += first;
  return {.first = first, .number = problem.len_q};
}

// Plans what the kernels see of a call.
FwdDecision plan_seen(FwdArgs const& args, Problem const& problem, Gpu gpu) {
  std::span<FwdInstance const> const instances = fwd_instances();
  FwdDecision decision;
  Choice const choice = decide(decision, instances, args, problem, tune(instances, args, problem, gpu), gpu);
  decision.out = out_copy(args.q, problem.head_dim_v, problem.vector());
  decision.plan.accumulate = problem.accumulate;
  decision.instance->family->plan(decision.plan, problem, choice, gpu);
  return decision;
}

}  // namespace

FwdDecision plan_fwd(FwdArgs const& args, Problem const& problem, Gpu gpu) {
  check_row_invariant(problem, gpu);
  if (!problem.has_mask()) return plan_seen(args, problem, gpu);
  Problem const seen = seen_by_kernels(problem);
  FwdDecision decision = plan_seen(args, seen, gpu);
  FwdPlan& plan = decision.plan;
  if (plan.ctas > 0) plan.workspace.bytes = lay_out_mask(plan.mask, seen, plan.workspace.bytes);
  return decision;
}

BwdDecision plan_bwd(FwdArgs const& call, TensorInfo const* dout, TensorInfo const* out, Problem const& asked,
                     Gpu gpu) {
  std::span<BwdInstance const> const instances = bwd_instances();
  Tuning const tuning = tune(instances, call, asked, gpu);
  Problem problem = seen_by_kernels(asked);
  problem.lse_rows = asked.len_q;
  BwdDecision decision;
  bool const keeps_rows = asked.packed || asked.has_mask();  // the device alone knows those that see no key
  decision.rows = keeps_rows ? SeeingRows{.first = 0, .number = asked.len_q} : drop_blind_rows(problem);
  decision.band = problem.band;
  Choice const choice = decide(decision, instances, call, problem, tuning, gpu);
  check_accumulate_of_bwd(problem);  // `explain` asks for this plan without check_bwd
  int const vector = problem.vector();
  decision.dout = dout ? read_copy(*dout, vector) : out_copy(call.q, problem.head_dim_v, vector);
  decision.out = out ? read_copy(*out, vector) : out_copy(call.q, problem.head_dim_v, vector);
  decision.dq = write_copy(call.q);
  decision.dk = write_copy(call.k);
  decision.dv = write_copy(call.v);
  if (decision.instance->family->one_head_dim) pad_to_one_head_dim(decision);
  BwdPlan& plan = decision.plan;
  plan.deterministic = problem.deterministic;
  plan.parts = 1;
  plan.sequences_per_part = problem.batch;
  plan.scales_dout = problem.has_sinks_and_dlse() && plan.dtype == DType::kFloat16;
  decision.instance->family->plan(plan, problem, choice, gpu);
  if (problem.has_mask() && plan.workspace.bytes > 0) {
    plan.workspace.bytes = lay_out_mask(plan.mask, problem, plan.workspace.bytes);
  }
  return decision;
}

}  // namespace flash_cute
