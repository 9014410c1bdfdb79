// Which kernel runs, and on what: one plan a direction, which the launch, `explain` and the tests read.
#pragma once

#include <span>
#include <type_traits>

#include "checks.h"
#include "plan.h"
#include "sm80/bwd/tile.h"
#include "sm80/fwd/tile.h"

#ifndef FLASH_CUTE_NO_CUDA
#include "instances.h"  // generated: the kernels of this build
#endif
#if __has_include("../sm90/fwd/tile.h")
#include "../sm90/bwd/order.h"
#include "../sm90/fwd/tile.h"
#define FLASH_CUTE_HAS_SM90_TABLE
#endif

#ifndef FLASH_CUTE_FWD_INSTANCES_SM80
#define FLASH_CUTE_FWD_INSTANCES_SM80(X)
#endif
#ifndef FLASH_CUTE_FWD_INSTANCES_SM90
#define FLASH_CUTE_FWD_INSTANCES_SM90(X)
#endif
#ifndef FLASH_CUTE_BWD_INSTANCES_SM80
#define FLASH_CUTE_BWD_INSTANCES_SM80(X)
#endif
#ifndef FLASH_CUTE_BWD_INSTANCES_SM90
#define FLASH_CUTE_BWD_INSTANCES_SM90(X)
#endif

namespace flash_cute {

template <class LaunchFunction>
struct Instance {
  int head_dim;
  bool causal;
  LaunchFunction launch;
};
using FwdInstance = Instance<cudaError_t (*)(FwdPlan const&, FwdParams const&, cudaStream_t)>;
using BwdInstance = Instance<cudaError_t (*)(BwdPlan const&, BwdParams const&, cudaStream_t)>;

// A kernel that is in the list and not in the build is a link error. The last entry ends the list,
// which may be empty.
#define FLASH_CUTE_INSTANCE(launch, head_dim, Mask) \
  {head_dim, std::is_same_v<Mask, CausalMask>, &launch<head_dim, Variant<Mask>>},
#define FLASH_CUTE_FWD_SM80(head_dim, Mask) FLASH_CUTE_INSTANCE(sm80::fwd::launch, head_dim, Mask)
#define FLASH_CUTE_FWD_SM90(head_dim, Mask) FLASH_CUTE_INSTANCE(sm90::fwd::launch, head_dim, Mask)
#define FLASH_CUTE_BWD_SM80(head_dim, Mask) FLASH_CUTE_INSTANCE(sm80::bwd::launch, head_dim, Mask)
#define FLASH_CUTE_BWD_SM90(head_dim, Mask) FLASH_CUTE_INSTANCE(sm90::bwd::launch, head_dim, Mask)
inline constexpr FwdInstance kFwdSm80[] = {FLASH_CUTE_FWD_INSTANCES_SM80(FLASH_CUTE_FWD_SM80){}};
inline constexpr FwdInstance kFwdSm90[] = {FLASH_CUTE_FWD_INSTANCES_SM90(FLASH_CUTE_FWD_SM90){}};
inline constexpr BwdInstance kBwdSm80[] = {FLASH_CUTE_BWD_INSTANCES_SM80(FLASH_CUTE_BWD_SM80){}};
inline constexpr BwdInstance kBwdSm90[] = {FLASH_CUTE_BWD_INSTANCES_SM90(FLASH_CUTE_BWD_SM90){}};

// The kernels of one direction in this build.
template <class InstanceType>
struct Kernels {
  char const* direction;  // for messages
  std::span<InstanceType const> sm80;
  std::span<InstanceType const> sm90;

  // The smallest kernel that holds the head dim; its `launch` is null when this build has none.
  InstanceType find(Backend backend, int head_dim, bool causal) const {
    InstanceType best{};
    for (InstanceType const& instance : backend == Backend::kSm80 ? sm80 : sm90) {
      if (instance.causal == causal && instance.head_dim >= head_dim &&
          (best.launch == nullptr || instance.head_dim < best.head_dim)) {
        best = instance;
      }
    }
    return best;
  }
};
inline constexpr Kernels<FwdInstance> kFwdKernels{
    .direction = "forward",
    .sm80 = {kFwdSm80, std::size(kFwdSm80) - 1},
    .sm90 = {kFwdSm90, std::size(kFwdSm90) - 1}};
inline constexpr Kernels<BwdInstance> kBwdKernels{
    .direction = "backward",
    .sm80 = {kBwdSm80, std::size(kBwdSm80) - 1},
    .sm90 = {kBwdSm90, std::size(kBwdSm90) - 1}};

// What a plan depends on of the GPU.
struct Gpu {
  int capability;  // 80, 90, ...
  int num_sms;
};

// Why a tensor cannot be read, or written, where it is.
enum class Copy { kNone, kHeadDimPadded, kLastDimStrided, kBaseMisaligned, kStrideMisaligned };

// What both directions' plans say.
template <class InstanceType, class PlanType>
struct Decision {
  Backend backend = Backend::kSm80;  // kSm80 or kSm90
  Gpu gpu = {};
  InstanceType instance = {};
  PlanType plan = {};
  KernelShape shape = {};
  int padded_head_dim = 0;  // the tensors', rounded up to whole 16-byte vectors
  Copy q = Copy::kNone;
  Copy k = Copy::kNone;
  Copy v = Copy::kNone;
  Copy out = Copy::kNone;
};

// The answer of plan_fwd; `out` is written.
struct FwdDecision : Decision<FwdInstance, FwdPlan> {
  bool draws_tiles = false;     // from a counter in memory
  TileSplit split = {};
  int64_t parts_bytes = 0;      // of split tiles, in memory
  int64_t workspace_bytes = 0;  // the counter, or the parts and their flags behind them
};

// The answer of plan_bwd; `out` is read.
struct BwdDecision : Decision<BwdInstance, BwdPlan> {
  Copy dout = Copy::kNone;
  Copy dq = Copy::kNone;
  Copy dk = Copy::kNone;
  Copy dv = Copy::kNone;
  bool deterministic = false;
  TileSplit split = {};
  BwdWorkspace workspace = {};
};

// A chip that is not known gets the table that asks for the least shared memory.
inline sm80::Chip sm80_chip(int capability) {
  if (capability == 90) return sm80::kH100;
  if (capability == 80 || capability == 87 || capability / 10 == 10) return sm80::kA100;
  return sm80::kSmem99K;
}

inline char const* backend_name(Backend backend) {
  constexpr char const* kNames[] = {"auto", "cpu", "sm80", "sm90"};
  return kNames[static_cast<int>(backend)];
}

// sm90 on the GPU that it is for, where this build has such a kernel; else sm80.
template <class InstanceType>
Backend choose_backend(Kernels<InstanceType> const& kernels, Backend asked, int capability, int head_dim,
                       bool causal) {
  FLASH_CUTE_CHECK(capability >= 80, "q: expected a GPU of compute capability 8.0 (Ampere) or newer, got ",
                   capability / 10, ".", capability % 10);
  FLASH_CUTE_CHECK(asked != Backend::kSm90 || capability == 90,
                   "backend: 'sm90' expects a GPU of compute capability 9.0, got ", capability / 10, ".",
                   capability % 10);
  FLASH_CUTE_CHECK(!kernels.sm80.empty() || !kernels.sm90.empty(), "this build has no CUDA kernels of the ",
                   kernels.direction, ": expected CPU tensors, or a build without FLASH_CUTE_NO_CUDA");
  bool const fits_sm90 = capability == 90 && kernels.find(Backend::kSm90, head_dim, causal).launch != nullptr;
  Backend const backend = asked != Backend::kAuto ? asked : fits_sm90 ? Backend::kSm90 : Backend::kSm80;
  FLASH_CUTE_CHECK(!(backend == Backend::kSm90 ? kernels.sm90 : kernels.sm80).empty(), "backend: the ",
                   kernels.direction, " of '", backend_name(backend), "' is not in this build, and compute capability ",
                   capability / 10, ".", capability % 10, " needs it; build with FLASH_CUTE_ARCHS=all");
  return backend;
}

// The kernels move rows of the head dim as 16-byte vectors: 8 elements.
inline Copy read_copy(TensorInfo const& tensor) {
  int64_t const* sizes = tensor.sizes;
  int64_t const* strides = tensor.strides;
  if (sizes[3] % 8 != 0) return Copy::kHeadDimPadded;
  if (strides[3] != 1) return Copy::kLastDimStrided;
  for (int dim = 0; dim < 3; ++dim) {
    if (sizes[dim] > 1 && strides[dim] % 8 != 0) return Copy::kStrideMisaligned;
  }
  // Tensors of a plan for another GPU count as allocated like CUDA's: the storage is aligned.
  int64_t offset = 0;
  if (is_cuda(tensor)) {
    offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data_pointer(tensor.handle)));
  } else {
    check_shim(aoti_torch_get_storage_offset(tensor.handle, &offset), "read a tensor's storage offset");
    offset *= 2;
  }
  return offset % 16 == 0 ? Copy::kNone : Copy::kBaseMisaligned;
}

// A tensor made like empty_like(`like`), which is what the outputs are.
inline Copy write_copy(TensorInfo const& like) {
  if (like.sizes[3] % 8 != 0) return Copy::kHeadDimPadded;
  return empty_like_strides(like)[3] == 1 ? Copy::kNone : Copy::kLastDimStrided;
}

// Tiles of `block` rows or keys over all heads.
inline int64_t num_tiles(int length, int block, int64_t heads) {
  return (int64_t{length} + block - 1) / block * heads;
}

// Query rows come in tiles of block_m: the CTAs' worth of work of a forward.
inline int64_t num_row_tiles(Problem const& problem, KernelShape const& shape) {
  return num_tiles(problem.len_q, shape.block_m, int64_t{problem.batch} * problem.heads_q);
}

// Keys come in tiles of block_n, all query heads of a key head in one.
inline int64_t num_key_tiles(Problem const& problem, KernelShape const& shape) {
  return num_tiles(problem.len_k, shape.block_n, int64_t{problem.batch} * problem.heads_kv);
}

inline void check_row_tiles(Problem const& problem, KernelShape const& shape, TensorInfo const& q) {
  int64_t const tiles = num_row_tiles(problem, shape);
  FLASH_CUTE_CHECK(tiles <= INT_MAX, "q: expected at most 2^31 - 1 tiles of ", shape.block_m, " rows, got ", tiles,
                   " with ", shape_text(q));
}

// What does not differ by direction: backend, kernel and the copies of q, k and v. `config` and `shape` are
// the caller's to fill in.
template <class DecisionType, class InstanceType>
DecisionType decide(Kernels<InstanceType> const& kernels, FwdArgs const& args, Problem const& problem, Gpu gpu) {
  bool const causal = problem.causal != Causal::kNone;
  DecisionType decision;
  decision.gpu = gpu;
  decision.padded_head_dim = (problem.head_dim + 7) / 8 * 8;
  decision.backend = choose_backend(kernels, problem.backend, gpu.capability, decision.padded_head_dim, causal);
  decision.instance = kernels.find(decision.backend, decision.padded_head_dim, causal);
  FLASH_CUTE_CHECK(decision.instance.launch != nullptr, "q: this build has no ", backend_name(decision.backend),
                   " ", kernels.direction, " kernel for head dim ", problem.head_dim, causal ? ", causal" : ", full",
                   "; expected ", problem.backend == Backend::kAuto ? "" : "backend 'auto' or ",
                   "a build with FLASH_CUTE_HEAD_DIMS listing ", decision.padded_head_dim, " or more");
  decision.q = read_copy(args.q);
  decision.k = read_copy(args.k);
  decision.v = read_copy(args.v);
  decision.plan = {.dtype = args.q.dtype == aoti_torch_dtype_float16() ? DType::kFloat16 : DType::kBFloat16,
                   .head_dim = decision.instance.head_dim,
                   .causal = causal,
                   .config = 0};
  return decision;
}

inline FwdDecision plan_fwd(FwdArgs const& args, Problem const& problem, Gpu gpu) {
  auto decision = decide<FwdDecision>(kFwdKernels, args, problem, gpu);
  decision.out = write_copy(args.q);
  FwdPlan& plan = decision.plan;
  if (decision.backend == Backend::kSm80) {
    plan.config = sm80_chip(gpu.capability);
    decision.shape = sm80::fwd::kernel_shape(plan.head_dim, plan.causal, plan.config);
  }
#ifdef FLASH_CUTE_HAS_SM90_TABLE
  if (decision.backend == Backend::kSm90) {
    auto const [config, split] = sm90::fwd::choose(
        plan.head_dim, plan.causal, problem.len_q, keys_of_last_row(problem), int64_t{problem.batch} * problem.heads_q,
        int64_t{problem.batch} * problem.heads_kv, gpu.num_sms);
    plan.config = config;
    decision.split = split;
    sm90::fwd::TileConfig const tile = sm90::fwd::tile_config(plan.head_dim, plan.causal, plan.config);
    decision.shape = sm90::fwd::kernel_shape(plan.head_dim, plan.causal, plan.config);
    decision.draws_tiles = plan.causal && num_row_tiles(problem, decision.shape) > gpu.num_sms;
    decision.parts_bytes = sm90::fwd::parts_bytes(tile, plan.head_dim, split);
    decision.workspace_bytes = decision.draws_tiles ? 4 : decision.parts_bytes + 4 * sm90::fwd::part_flags(tile, split);
  }
#endif
  check_row_tiles(problem, decision.shape, args.q);
  return decision;
}

// `dout` and `out` null: tensors made like empty_like(q), as the forward's out is.
inline BwdDecision plan_bwd(FwdArgs const& call, TensorInfo const* dout, TensorInfo const* out, bool deterministic,
                            Problem const& problem, Gpu gpu) {
  auto decision = decide<BwdDecision>(kBwdKernels, call, problem, gpu);
  decision.dout = dout ? read_copy(*dout) : write_copy(call.q);
  decision.out = out ? read_copy(*out) : write_copy(call.q);
  decision.dq = write_copy(call.q);
  decision.dk = write_copy(call.k);
  decision.dv = write_copy(call.v);
  decision.deterministic = deterministic;
  BwdPlan& plan = decision.plan;
  if (decision.backend == Backend::kSm80) {
    plan.config = sm80_chip(gpu.capability);
    decision.shape = sm80::bwd::kernel_shape(plan.head_dim, plan.causal, plan.config);
  }
#ifdef FLASH_CUTE_HAS_SM90_TABLE
  if (decision.backend == Backend::kSm90) {
    plan.config = sm90::bwd::choose_bwd_config(plan.head_dim, plan.causal, problem.len_q, problem.len_k,
                                          int64_t{problem.batch} * problem.heads_kv, gpu.num_sms);
    decision.shape = sm90::bwd::kernel_shape(plan.head_dim, plan.causal, plan.config);
  }
#endif
  check_row_tiles(problem, decision.shape, call.q);
  int64_t const key_tiles = num_key_tiles(problem, decision.shape);
  FLASH_CUTE_CHECK(key_tiles <= INT_MAX, "k: expected at most 2^31 - 1 tiles of ", decision.shape.block_n,
                   " keys, got ", key_tiles, " with ", shape_text(call.k));
  if (num_row_tiles(problem, decision.shape) == 0 || key_tiles == 0) return decision;
  decision.workspace = bwd_workspace(decision.shape, plan.head_dim, int64_t{problem.batch} * problem.heads_q,
                                     problem.len_q);
#ifdef FLASH_CUTE_HAS_SM90_TABLE
  if (decision.backend == Backend::kSm90 && !decision.shape.dq_in_registers) {
    decision.split = sm90::bwd::split_key_tiles(plan.head_dim, plan.causal, deterministic, problem.len_q, problem.len_k,
                                           problem.heads_q / problem.heads_kv,
                                           int64_t{problem.batch} * problem.heads_kv, gpu.num_sms);
  }
#endif
  return decision;
}

}  // namespace flash_cute
