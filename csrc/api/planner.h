// The plan: all decisions of the host about a call, made once. The launch, `explain` and the tests read them.
#pragma once

#include "dispatch.h"
#include "sm80/bwd/tile.h"
#include "sm80/fwd/float16_tile.h"
#include "sm80/fwd/tile.h"
#include "sm90/bwd/tile.h"
#include "sm90/bwd_wide/tile.h"
#include "sm90/fwd/tile.h"

namespace flash_cute {

// The properties of a GPU on which a plan depends.
struct Gpu {
  int capability;  // 80, 90, ...
  int num_sms;
};

// Why a tensor cannot be read or written in place.
enum class Copy { kNone, kHeadDimPadded, kLastDimStrided, kBaseMisaligned, kStrideMisaligned };

// What a tuning table has to say of a call, see tuning.h.
enum class Tuned { kNoTable, kOtherGpu, kNoEntry, kNotBuilt, kChosen };

// Predicted microseconds of the best kernel of each backend, where the plan chose between kernels; 0: no candidate.
struct Predicted {
  double sm90_us = 0;
  double sm80_us = 0;
};

// The decisions common to both directions.
template <class InstanceType, class PlanType>
struct Decision {
  Backend backend = Backend::kSm80;  // kSm80 or kSm90
  Gpu gpu = {};
  InstanceType instance = {};
  PlanType plan = {};
  int padded_head_dim = 0;  // the tensors' head dim, rounded up to whole 16-byte vectors
  int padded_head_dim_v = 0;
  Copy q = Copy::kNone;
  Copy k = Copy::kNone;
  Copy v = Copy::kNone;
  Copy out = Copy::kNone;  // written by a forward, read by a backward
  Tuned tuned = Tuned::kNoTable;
  Predicted predicted;
};

using FwdDecision = Decision<FwdInstance, FwdPlan>;

// Whether the kernel is that of fwd_wide or fwd_large. (The head dim alone does not tell: sm90's fwd has more of them.)
inline bool is_large(FwdDecision const& decision) {
  bool const sm90 = decision.backend == Backend::kSm90;
  return std::max(decision.plan.head_dim, decision.plan.head_dim_v) >
         (sm90 ? sm90::fwd::kMaxHeadDim : kMaxUnsplitHeadDim);
}

// The rows of a dense batch that see a key: `number` from `first` on. What the others hold must not reach the gradients,
// so that a backward leaves them out.
struct SeeingRows {
  int first = 0;
  int number = 0;
};

struct BwdDecision : Decision<BwdInstance, BwdPlan> {
  SeeingRows rows;  // of packed sequences: all of them
  Band band = {};   // of these rows
  Copy dout = Copy::kNone;
  Copy dq = Copy::kNone;
  Copy dk = Copy::kNone;
  Copy dv = Copy::kNone;
};

// Whether the kernels are those of bwd_large.
inline bool is_large(BwdDecision const& decision) {
  return std::max(decision.plan.head_dim, decision.plan.head_dim_v) > kMaxUnsplitHeadDim;
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
  // For a plan without CUDA tensors, storage is assumed to be aligned, as CUDA's allocator makes it.
  int64_t offset = 0;
  if (is_cuda(tensor)) {
    offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data_pointer(tensor.handle)));
  } else {
    check_shim(aoti_torch_get_storage_offset(tensor.handle, &offset), "read a tensor's storage offset");
    offset *= 2;
  }
  return offset % 16 == 0 ? Copy::kNone : Copy::kBaseMisaligned;
}

// The same for an output, which is allocated like empty_like(`like`).
inline Copy write_copy(TensorInfo const& like) {
  if (like.sizes[3] % 8 != 0) return Copy::kHeadDimPadded;
  return empty_like_strides(like)[3] == 1 ? Copy::kNone : Copy::kLastDimStrided;
}

// The same for a forward's out, see out_strides.
inline Copy out_copy(TensorInfo const& q, int64_t head_dim_v) {
  if (head_dim_v % 8 != 0) return Copy::kHeadDimPadded;
  return out_strides(q, head_dim_v)[3] == 1 ? Copy::kNone : Copy::kLastDimStrided;
}

// Whether some row does not see some key.
inline bool is_masked(Problem const& problem) { return problem.band.has_lower() || problem.band.has_upper(); }

// Tiles of `block` rows or keys over all heads.
inline int64_t num_tiles(int length, int block, int64_t heads) {
  return (int64_t{length} + block - 1) / block * heads;
}

// Row tiles over all query heads: the units of work of a forward.
inline int64_t num_row_tiles(Problem const& problem, KernelShape const& shape) {
  return num_tiles(problem.len_q, shape.block_m, int64_t{problem.batch} * problem.heads_q);
}

// Key tiles over all KV heads: one tile serves all query heads of its KV head.
inline int64_t num_key_tiles(Problem const& problem, KernelShape const& shape) {
  return num_tiles(problem.len_k, shape.block_n, int64_t{problem.batch} * problem.heads_kv);
}

// The tiles per head of a batch whose sequences the kernel reads at run time, `length` rows or keys long. Of a packed
// one the host knows the most that there can be: each sequence, or rows before and behind them, may end in a tile that
// is not full.
inline int64_t most_tiles(Problem const& problem, int length, int block, bool packed) {
  if (!packed) return num_tiles(length, block, problem.batch);
  return int64_t{length} / block + std::min<int64_t>(length, int64_t{problem.batch} + 2);
}

// Parts of a workspace begin at multiples of 128 bytes.
inline int64_t aligned(int64_t bytes) { return (bytes + 127) / 128 * 128; }

// The chip whose sm80 table serves a call.
inline int sm80_entry(Problem const& problem, Gpu gpu) {
  return problem.forced_chip >= 0 ? problem.forced_chip : sm80::chip_of(gpu.capability);
}

inline void check_num_tiles(char const* name, int64_t tiles, int block, char const* rows, TensorInfo const& tensor) {
  FLASH_CUTE_CHECK(tiles <= INT_MAX, name, ": expected at most 2^31 - 1 tiles of ", block, " ", rows, ", got ", tiles,
                   " with ", shape_text(tensor));
}

// Decides what is the same for both directions: backend, kernel and the copies of q, k and v. The caller chooses the
// tile.
template <class DecisionType, class InstanceType>
DecisionType decide(Kernels<InstanceType> const& kernels, FwdArgs const& args, Problem const& problem, Gpu gpu) {
  DecisionType decision;
  decision.gpu = gpu;
  decision.padded_head_dim = (problem.head_dim + 7) / 8 * 8;
  decision.padded_head_dim_v = (problem.head_dim_v + 7) / 8 * 8;
  int const head_dim = decision.padded_head_dim, head_dim_v = decision.padded_head_dim_v;
  bool const only_sm80 = problem.accumulate != Accumulate::kFloat32;
  Backend const asked = only_sm80 ? Backend::kSm80 : problem.backend;
  decision.backend = choose_backend(kernels, asked, gpu.capability, head_dim, head_dim_v);
  decision.instance = kernels.find(decision.backend, head_dim, head_dim_v);
  FLASH_CUTE_CHECK(decision.instance.launch != nullptr, "q: this build has no ", backend_name(decision.backend),
                   " ", kernels.direction, " kernel for head dim ",
                   std::max(problem.head_dim, problem.head_dim_v), "; expected ",
                   problem.backend == Backend::kAuto ? "" : "backend 'auto' or ",
                   "a build with FLASH_CUTE_HEAD_DIMS listing ", std::max(head_dim, head_dim_v), " or more");
  decision.q = read_copy(args.q);
  decision.k = read_copy(args.k);
  decision.v = read_copy(args.v);
  decision.plan.dtype = args.q.dtype == aoti_torch_dtype_float16() ? DType::kFloat16 : DType::kBFloat16;
  decision.plan.head_dim = decision.instance.head_dim;
  return decision;
}

// The row tiles of a forward, of all heads; of packed sequences the most that there can be.
int64_t most_row_tiles(Problem const& problem, KernelShape const& shape, bool packed);

// `block_m`: the rows of one of `plan.row_tiles`; `problem`: of a part of the call; `all_rows`: of scaled_dout.
BwdWorkspace bwd_workspace(BwdPlan const& plan, Problem const& problem, int64_t all_rows, int padded_head_dim_v,
                           int block_m, bool keeps_tickets, bool has_queue);

// Of Sequences::tiles_before.
int64_t prefix_bytes(Problem const& problem);

// Rows of scaled_dout over all heads.
int64_t scaled_rows(Problem const& asked, bool packed);

FwdDecision plan_fwd(FwdArgs const& args, Problem const& asked, Gpu gpu);

// `dout` and `out` null: tensors allocated like empty_like(q), as the forward's out is. `has_dlse`: a gradient reaches
// the LSE.
BwdDecision plan_bwd(FwdArgs const& call, TensorInfo const* dout, TensorInfo const* out, bool deterministic,
                     bool has_dlse, Problem const& asked, Gpu gpu);

}  // namespace flash_cute
