// The kernels of this build, and the choice of the architecture whose kernels serve a call.
#pragma once

#include <span>

#include "checks.h"
#include "plan.h"

#ifndef FLASH_CUTE_NO_CUDA
#include "instances.h"  // generated: the kernels of this build
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
  int head_dim_v;
  LaunchFunction launch;
};
using FwdInstance = Instance<cudaError_t (*)(FwdPlan const&, FwdParams const&, cudaStream_t)>;
using BwdInstance = Instance<cudaError_t (*)(BwdPlan const&, BwdParams const&, cudaStream_t)>;

// A kernel that is in the generated list but not in the build is a link error. An empty last entry ends each array, so
// that it is valid without kernels.
#define FLASH_CUTE_INSTANCE(kernel, head_dim, head_dim_v) {head_dim, head_dim_v, &kernel::launch<head_dim, head_dim_v>},
inline constexpr FwdInstance kFwdSm80[] = {FLASH_CUTE_FWD_INSTANCES_SM80(FLASH_CUTE_INSTANCE){}};
inline constexpr FwdInstance kFwdSm90[] = {FLASH_CUTE_FWD_INSTANCES_SM90(FLASH_CUTE_INSTANCE){}};
inline constexpr BwdInstance kBwdSm80[] = {FLASH_CUTE_BWD_INSTANCES_SM80(FLASH_CUTE_INSTANCE){}};
inline constexpr BwdInstance kBwdSm90[] = {FLASH_CUTE_BWD_INSTANCES_SM90(FLASH_CUTE_INSTANCE){}};

// The kernels of one direction in this build.
template <class InstanceType>
struct Kernels {
  char const* direction;  // for messages
  std::span<InstanceType const> sm80;
  std::span<InstanceType const> sm90;

  // The smallest kernel that holds the head dims of q and v; its `launch` is null when this build has none.
  InstanceType find(Backend backend, int head_dim, int head_dim_v) const {
    InstanceType best{};
    for (InstanceType const& instance : backend == Backend::kSm80 ? sm80 : sm90) {
      bool const holds = instance.head_dim >= head_dim && instance.head_dim_v >= head_dim_v;
      bool const smaller = instance.head_dim + instance.head_dim_v < best.head_dim + best.head_dim_v;
      if (holds && (best.launch == nullptr || smaller)) best = instance;
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

inline char const* backend_name(Backend backend) {
  constexpr char const* kNames[] = {"auto", "cpu", "sm80", "sm90"};
  return kNames[static_cast<int>(backend)];
}

// sm90 on a GPU of compute capability 9.0 if this build has a kernel for the head dim, else sm80.
template <class InstanceType>
Backend choose_backend(Kernels<InstanceType> const& kernels, Backend asked, int capability, int head_dim,
                       int head_dim_v) {
  FLASH_CUTE_CHECK(capability >= 80, "q: expected a GPU of compute capability 8.0 (Ampere) or newer, got ",
                   capability / 10, ".", capability % 10);
  FLASH_CUTE_CHECK(asked != Backend::kSm90 || capability == 90,
                   "backend: 'sm90' expects a GPU of compute capability 9.0, got ", capability / 10, ".",
                   capability % 10);
  FLASH_CUTE_CHECK(!kernels.sm80.empty() || !kernels.sm90.empty(), "this build has no CUDA kernels of the ",
                   kernels.direction, ": expected CPU tensors, or a build without FLASH_CUTE_NO_CUDA");
  bool const fits_sm90 = capability == 90 && kernels.find(Backend::kSm90, head_dim, head_dim_v).launch != nullptr;
  Backend const backend = asked != Backend::kAuto ? asked : fits_sm90 ? Backend::kSm90 : Backend::kSm80;
  FLASH_CUTE_CHECK(!(backend == Backend::kSm90 ? kernels.sm90 : kernels.sm80).empty(), "backend: the ",
                   kernels.direction, " of '", backend_name(backend), "' is not in this build, and compute capability ",
                   capability / 10, ".", capability % 10, " needs it; build with FLASH_CUTE_ARCHS=all");
  return backend;
}

}  // namespace flash_cute
