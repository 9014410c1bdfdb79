// Which kernel runs, and on what: one plan, which the launch, `fwd_plan` and the tests read.
#pragma once

#include <span>
#include <type_traits>

#include "checks.h"
#include "plan.h"
#include "sm80/fwd_tile.h"

#ifndef FLASH_CUTE_NO_CUDA
#include "instances.h"  // generated: the kernels of this build
#endif
#if __has_include("../sm90/fwd_tile.h")
#include "../sm90/fwd_tile.h"
#define FLASH_CUTE_HAS_SM90_TABLE
#endif

#ifndef FLASH_CUTE_FWD_INSTANCES_SM80
#define FLASH_CUTE_FWD_INSTANCES_SM80(X)
#endif
#ifndef FLASH_CUTE_FWD_INSTANCES_SM90
#define FLASH_CUTE_FWD_INSTANCES_SM90(X)
#endif

namespace flash_cute {

using LaunchFwd = cudaError_t (*)(FwdPlan const&, FwdParams const&, cudaStream_t);

struct FwdInstance {
  int head_dim;
  bool causal;
  LaunchFwd launch;
};

// A kernel that is in the list and not in the build is a link error. The last entry ends the list,
// which may be empty.
#define FLASH_CUTE_INSTANCE_SM80(head_dim, Mask) \
  {head_dim, std::is_same_v<Mask, CausalMask>, &sm80::launch_fwd<head_dim, Variant<Mask>>},
#define FLASH_CUTE_INSTANCE_SM90(head_dim, Mask) \
  {head_dim, std::is_same_v<Mask, CausalMask>, &sm90::launch_fwd<head_dim, Variant<Mask>>},
inline constexpr FwdInstance kSm80Instances[] = {FLASH_CUTE_FWD_INSTANCES_SM80(FLASH_CUTE_INSTANCE_SM80){}};
inline constexpr FwdInstance kSm90Instances[] = {FLASH_CUTE_FWD_INSTANCES_SM90(FLASH_CUTE_INSTANCE_SM90){}};

inline std::span<FwdInstance const> instances(Backend backend) {
  if (backend == Backend::kSm80) return {kSm80Instances, std::size(kSm80Instances) - 1};
  return {kSm90Instances, std::size(kSm90Instances) - 1};
}

// What a plan depends on of the GPU.
struct Gpu {
  int capability;  // 80, 90, ...
  int num_sms;
};

// Why a tensor cannot be read, or written, where it is.
enum class Copy { kNone, kHeadDimPadded, kLastDimStrided, kBaseMisaligned, kStrideMisaligned };

// The answer of plan_fwd.
struct FwdDecision {
  Backend backend = Backend::kSm80;  // kSm80 or kSm90
  Gpu gpu = {};
  FwdInstance instance = {};
  FwdPlan plan = {};
  KernelShape shape = {};
  int padded_head_dim = 0;  // the tensors', rounded up to whole 16-byte vectors
  Copy q = Copy::kNone;
  Copy k = Copy::kNone;
  Copy v = Copy::kNone;
  Copy out = Copy::kNone;
};

// A chip that is not known gets the table that asks for the least shared memory.
inline sm80::Chip sm80_chip(int capability) {
  if (capability == 90) return sm80::kH100;
  if (capability == 80 || capability == 87 || capability / 10 == 10) return sm80::kA100;
  return sm80::kSmem99K;
}

// The smallest kernel that holds the head dim; its `launch` is null when this build has none.
inline FwdInstance find_instance(Backend backend, int head_dim, bool causal) {
  FwdInstance best{};
  for (FwdInstance const& instance : instances(backend)) {
    if (instance.causal == causal && instance.head_dim >= head_dim &&
        (best.launch == nullptr || instance.head_dim < best.head_dim)) {
      best = instance;
    }
  }
  return best;
}

// sm90 on the GPU that it is for, where this build has such a kernel; else sm80.
inline Backend choose_backend(Backend asked, int capability, int head_dim, bool causal) {
  FLASH_CUTE_CHECK(capability >= 80, "q: expected a GPU of compute capability 8.0 (Ampere) or newer, got ",
                   capability / 10, ".", capability % 10);
  FLASH_CUTE_CHECK(asked != Backend::kSm90 || capability == 90,
                   "backend: 'sm90' expects a GPU of compute capability 9.0, got ", capability / 10, ".",
                   capability % 10);
  bool const has_sm80 = !instances(Backend::kSm80).empty();
  bool const has_sm90 = !instances(Backend::kSm90).empty();
  FLASH_CUTE_CHECK(has_sm80 || has_sm90,
                   "this build has no CUDA kernels: expected CPU tensors, or a build without FLASH_CUTE_NO_CUDA");
  bool const fits_sm90 = capability == 90 && find_instance(Backend::kSm90, head_dim, causal).launch != nullptr;
  Backend const backend = asked != Backend::kAuto ? asked : fits_sm90 ? Backend::kSm90 : Backend::kSm80;
  FLASH_CUTE_CHECK(backend == Backend::kSm90 ? has_sm90 : has_sm80, "backend: '",
                   backend == Backend::kSm90 ? "sm90" : "sm80", "' is not in this build, and compute capability ",
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

inline Copy write_copy(TensorInfo const& q) {
  if (q.sizes[3] % 8 != 0) return Copy::kHeadDimPadded;
  return empty_like_strides(q)[3] == 1 ? Copy::kNone : Copy::kLastDimStrided;
}

// CTAs' worth of work: one tile a block of query rows of a head.
inline int64_t num_tiles(FwdProblem const& problem, KernelShape const& shape) {
  int64_t const row_blocks = (int64_t{problem.len_q} + shape.block_m - 1) / shape.block_m;
  return row_blocks * problem.batch * problem.heads_q;
}

inline FwdDecision plan_fwd(FwdArgs const& args, FwdProblem const& problem, Gpu gpu) {
  bool const causal = problem.causal != Causal::kNone;
  int const padded_head_dim = (problem.head_dim + 7) / 8 * 8;
  FwdDecision decision{.backend = choose_backend(problem.backend, gpu.capability, padded_head_dim, causal),
                       .gpu = gpu,
                       .padded_head_dim = padded_head_dim,
                       .q = read_copy(args.q),
                       .k = read_copy(args.k),
                       .v = read_copy(args.v),
                       .out = write_copy(args.q)};
  decision.instance = find_instance(decision.backend, padded_head_dim, causal);
  FLASH_CUTE_CHECK(decision.instance.launch != nullptr, "q: this build has no ",
                   decision.backend == Backend::kSm90 ? "sm90" : "sm80", " kernel for head dim ", problem.head_dim,
                   causal ? ", causal" : ", full", "; build with FLASH_CUTE_HEAD_DIMS listing ", padded_head_dim,
                   " or more");
  int const head_dim = decision.instance.head_dim;  // the kernel's
  int config = 0;
  if (decision.backend == Backend::kSm80) {
    config = sm80_chip(gpu.capability);
    decision.shape = sm80::fwd_shape(head_dim, causal, config);
  }
#ifdef FLASH_CUTE_HAS_SM90_TABLE
  if (decision.backend == Backend::kSm90) {
    config = sm90::choose_config(head_dim, causal, problem.len_q, problem.len_k,
                                 int64_t{problem.batch} * problem.heads_q, gpu.num_sms);
    decision.shape = sm90::fwd_shape(head_dim, causal, config);
  }
#endif
  decision.plan = {.dtype = args.q.dtype == aoti_torch_dtype_float16() ? DType::kFloat16 : DType::kBFloat16,
                   .head_dim = head_dim,
                   .causal = causal,
                   .config = config};
  FLASH_CUTE_CHECK(num_tiles(problem, decision.shape) <= INT_MAX, "q: expected at most 2^31 - 1 tiles of ",
                   decision.shape.block_m, " rows, got ", num_tiles(problem, decision.shape), " with ",
                   shape_text(args.q));
  return decision;
}

}  // namespace flash_cute
