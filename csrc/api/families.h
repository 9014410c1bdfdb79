// The kernels of this build: each instance with its family, see planning/family.h. families.cpp lists the families.
#pragma once

#include <span>

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

std::span<FwdInstance const> fwd_instances();
std::span<BwdInstance const> bwd_instances();

}  // namespace flash_cute
