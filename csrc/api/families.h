// The kernels of this build: each instance with its family, see planning/family.h. families.cpp lists the families.
#pragma once

#include <climits>
#include <span>

#include "planning/decode.h"
#include "planning/family.h"

namespace flash_cute {

template <class PlanType, class ParamsType>
struct InstanceOf {
  FamilyOf<PlanType> const* family;
  HeadDims head_dims;
  cudaError_t (*launch)(PlanType const&, ParamsType const&, cudaStream_t);
};
using FwdInstance = InstanceOf<FwdPlan, FwdParams>;
using BwdInstance = InstanceOf<BwdPlan, BwdParams>;


struct DecodeInstance {
  DecodeFamily const* family;
  HeadDims head_dims;
  cudaError_t (*launch)(DecodePlan const&, DecodeParams const&, cudaStream_t);
};

std::span<FwdInstance const> fwd_instances();
std::span<BwdInstance const> bwd_instances();
std::span<DecodeInstance const> decode_instances();

// Whether the GPU can run an architecture's kernels.
inline bool runs_on(Backend backend, Gpu gpu) {
  return backend == Backend::kSm80 ? gpu.capability >= 80 : gpu.capability == 90;
}

template <class InstanceType>
int size_of(InstanceType const& instance) {
  return instance.head_dims.head_dim + instance.head_dims.head_dim_v;
}

// Whether an instance of that architecture holds the head dims and serves the call.
template <class InstanceType>
bool can_serve(InstanceType const& instance, Backend backend, Problem const& problem) {
  HeadDims const dims = instance.head_dims;
  constexpr bool kForward = std::is_same_v<InstanceType, FwdInstance>;
  return instance.family->backend == backend &&
         (!kForward || instance.family->row_invariant == problem.row_invariant) &&
         instance.family->reads_float8 == problem.fp8 && (instance.family->reads_masks || !problem.has_mask()) &&
         dims.head_dim >= problem.head_dim && dims.head_dim_v >= problem.head_dim_v &&
         instance.family->serves(dims, problem);
}

// That of the architecture's smallest instances that can serve the call; kNoInstance: this build has none.
constexpr int kNoInstance = INT_MAX;
template <class InstanceType>
int smallest_size(std::span<InstanceType const> instances, Backend backend, Problem const& problem) {
  int smallest = kNoInstance;
  for (InstanceType const& instance : instances) {
    int const size = size_of(instance);
    if (size < smallest && can_serve(instance, backend, problem)) smallest = size;
  }
  return smallest;
}

}  // namespace flash_cute
