// The plan: all decisions of the host about a call, made once. The launch, `explain` and the tests read them.
//
// Choice (architecture, row of the tile table, split) -> Candidate (with its predicted time) -> Selection (with its
// instance) -> Decision (with the copies of tensors, and the plan). What the caller asks for is a Choice, too, and so
// is what a tuning table says (Tuning).
#pragma once

#include "checks.h"
#include "families.h"

namespace flash_cute {

// Why a tensor cannot be read or written in place.
enum class Copy { kNone, kHeadDimPadded, kLastDimStrided, kBaseMisaligned, kStrideMisaligned };

// What a tuning table has to say of a call, see tuning.h.
enum class Tuned { kNoTable, kOtherGpu, kNoEntry, kNotBuilt, kChosen };

// The predicted times of the chosen kernel and of the other architecture's best, where these competed.
struct Predicted {
  double us = kNoTime;
  double rival_us = kNoTime;
  Backend rival = Backend::kAuto;
};

// The decisions common to both directions.
template <class InstanceType, class PlanType>
struct Decision {
  InstanceType const* instance = nullptr;
  Gpu gpu = {};
  PlanType plan = {};
  int padded_head_dim = 0;  // the tensors' head dim as the kernel sees it
  int padded_head_dim_v = 0;
  Copy q = Copy::kNone;
  Copy k = Copy::kNone;
  Copy v = Copy::kNone;
  Copy out = Copy::kNone;  // written by a forward, read by a backward
  Tuned tuned = Tuned::kNoTable;
  Predicted predicted;

  Backend backend() const { return instance->family->backend; }
};

using FwdDecision = Decision<FwdInstance, FwdPlan>;

// The rows of a dense batch that see a key: `number` from `first` on. What the others hold must not reach the
// gradients, so that a backward leaves them out.
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

// The kernels move rows of the head dim as 16-byte vectors, of so many elements.
inline Copy read_copy(TensorInfo const& tensor, int vector) {
  int64_t const* sizes = tensor.sizes;
  int64_t const* strides = tensor.strides;
  if (sizes[3] % vector != 0) return Copy::kHeadDimPadded;
  if (strides[3] != 1) return Copy::kLastDimStrided;
  for (int dim = 0; dim < 3; ++dim) {
    if (sizes[dim] > 1 && strides[dim] % vector != 0) return Copy::kStrideMisaligned;
  }
  // For a plan without CUDA tensors, storage is assumed to be aligned, as CUDA's allocator makes it.
  int64_t offset = 0;
  if (is_cuda(tensor)) {
    offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data_pointer(tensor.handle)));
  } else {
    check_shim(aoti_torch_get_storage_offset(tensor.handle, &offset), "read a tensor's storage offset");
    offset *= 16 / vector;
  }
  return offset % 16 == 0 ? Copy::kNone : Copy::kBaseMisaligned;
}

// The same for an output, which is allocated like empty_like(`like`).
inline Copy write_copy(TensorInfo const& like) {
  if (like.sizes[3] % 8 != 0) return Copy::kHeadDimPadded;
  return empty_like_strides(like)[3] == 1 ? Copy::kNone : Copy::kLastDimStrided;
}

// The same for a forward's out, see out_strides. The kernels write as many columns as they read of v, so that `vector`
// is that of q, k and v. Elements of out are as large as theirs, or larger.
inline Copy out_copy(TensorInfo const& q, int64_t head_dim_v, int vector) {
  if (head_dim_v % vector != 0) return Copy::kHeadDimPadded;
  return out_strides(q, head_dim_v)[3] == 1 ? Copy::kNone : Copy::kLastDimStrided;
}

FwdDecision plan_fwd(FwdArgs const& args, Problem const& problem, Gpu gpu);

// `dout` and `out` null: tensors allocated like empty_like(q), as the forward's out is.
BwdDecision plan_bwd(FwdArgs const& call, TensorInfo const* dout, TensorInfo const* out, Problem const& problem,
                     Gpu gpu);

}  // namespace flash_cute
