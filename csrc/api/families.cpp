#include "families.h"

#ifdef FLASH_CUTE_NO_CUDA

namespace flash_cute {

std::span<FwdInstance const> fwd_instances() { return {}; }
std::span<BwdInstance const> bwd_instances() { return {}; }
std::span<DecodeInstance const> decode_instances() { return {}; }

}  // namespace flash_cute

#else

// The families.
#include "sm80/backward/dq_in_memory/family.h"
#include "sm80/backward/streamed/family.h"
#include "sm80/decode/split_keys/family.h"
#include "sm80/decode/streamed/family.h"
#include "sm80/forward/rows/family.h"
#include "sm80/forward/streamed/family.h"
#include "sm90/backward/dq_in_memory/family.h"
#include "sm90/backward/dq_in_registers_large/family.h"
#include "sm90/backward/dq_in_registers/family.h"
#include "sm90/decode/key_chunks/family.h"
#include "sm90/decode/latent/family.h"
#include "sm90/decode/split_keys/family.h"
#include "sm90/forward/fp8_rows/family.h"
#include "sm90/forward/key_chunks/family.h"
#include "sm90/forward/masked_rows/family.h"
#include "sm90/forward/rows/family.h"
#include "sm90/forward/pair_by_columns/family.h"
#include "sm90/forward/pair_by_turns/family.h"

#include "instances.h"  // generated: the kernels of this build

namespace flash_cute {
namespace {

template <class Family>
constexpr FwdFamily kFwdFamily = family_of<Family, FwdPlan>();
template <class Family>
constexpr BwdFamily kBwdFamily = family_of<Family, BwdPlan>();
template <class Family>
constexpr DecodeFamily kDecodeFamily = decode_family_of<Family>();

// A kernel that is in the generated list but not in the build is a link error. An empty last entry ends each array, so
// that it is valid without kernels.
#define FLASH_CUTE_FWD_INSTANCE(kernel, head_dim, head_dim_v) \
  {&kFwdFamily<kernel::Family>, {head_dim, head_dim_v}, &kernel::launch<head_dim, head_dim_v>},
#define FLASH_CUTE_BWD_INSTANCE(kernel, head_dim, head_dim_v) \
  {&kBwdFamily<kernel::Family>, {head_dim, head_dim_v}, &kernel::launch<head_dim, head_dim_v>},
#define FLASH_CUTE_DECODE_INSTANCE(kernel, head_dim, head_dim_v) \
  {&kDecodeFamily<kernel::Family>, {head_dim, head_dim_v}, &kernel::launch<head_dim, head_dim_v>},
constexpr FwdInstance kFwdInstances[] = {FLASH_CUTE_FWD_INSTANCES(FLASH_CUTE_FWD_INSTANCE){}};
constexpr BwdInstance kBwdInstances[] = {FLASH_CUTE_BWD_INSTANCES(FLASH_CUTE_BWD_INSTANCE){}};
constexpr DecodeInstance kDecodeInstances[] = {FLASH_CUTE_DECODE_INSTANCES(FLASH_CUTE_DECODE_INSTANCE){}};

}  // namespace

std::span<FwdInstance const> fwd_instances() { return {kFwdInstances, std::size(kFwdInstances) - 1}; }
std::span<BwdInstance const> bwd_instances() { return {kBwdInstances, std::size(kBwdInstances) - 1}; }
std::span<DecodeInstance const> decode_instances() { return {kDecodeInstances, std::size(kDecodeInstances) - 1}; }

}  // namespace flash_cute

#endif  // FLASH_CUTE_NO_CUDA
