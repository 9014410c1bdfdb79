// Compile-time choices of the mainloop that trade registers for latency, most of them chosen by experiment: with these
// settings no kernel spills on sm_80, sm_90 or sm_120. docs/trials/sm80_backward.md has the measurements.
#pragma once

#include <type_traits>

#include "core/registers.cuh"
#include "contract/params.h"
#include "traits.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

template <class Traits_, bool kDeterministic_>
struct Schedule {
  using Traits = Traits_;
  static constexpr bool kDeterministic = kDeterministic_;  // each mode has its own kernel
  static constexpr bool kTwoQ = Traits::kQStages == 2;
  static constexpr bool kTwoDout = Traits::kDoutStages == 2;

  // The deterministic kernels of head dim 128 have no register to spare.
  static constexpr bool kScarceRegisters = kDeterministic && Traits::kHeadDim == 128;
  static constexpr bool kScarcestRegisters = kScarceRegisters && !kTwoQ;
  static constexpr bool kHalf64 =
      Traits::kHeadDim == 64 && std::is_same_v<typename Traits::Element, cutlass::half_t> && !kDeterministic;

  // The range of row tiles that need no mask is kept in registers; else each tile is compared with the band again.
  static constexpr bool kWholeRangeInRegs =
      !kScarcestRegisters && !kHalf64 && (Traits::kHeadDim != 96 || kTwoQ);
  static constexpr bool kFirstTileInRegs = !kScarceRegisters;  // the first row tile of the range; else recomputed

  // The launch order may go through the row tiles from first to last. Up to head dim 64 it never does.
  static constexpr bool kMayAscend = kDeterministic && Traits::kHeadDim > 64;

  // The semaphore of a step's turn is first read at the beginning of the step, which hides the latency; up to head dim
  // 64 that does not pay.
  static constexpr bool kReadsSemaphoreEarly = kDeterministic && Traits::kHeadDim > 64 && !kScarceRegisters;

  // All row statistics of a step are read at once, before a GEMM that hides the latency of shared memory; else each
  // pair of rows at its use.
  static constexpr bool kReadsStatsEarly = !Traits::kPInRegs && Traits::kTile.ctas_per_sm == 1;

  // Where P stays in registers, dS is made of it in float32 and dV precedes dP^T; but of P as rounded for dV, after
  // dP^T, where both in float32 spill 48 bytes (in the code for sm_80; that for sm_90 is compiled from the same PTX).
  static constexpr bool kRoundsPOfDs = !kDeterministic && Traits::kHeadDim == 64;

  // Where end_basic_block stands.
  static constexpr bool kEndsBlockBeforeLoads = !kDeterministic && Traits::kPInRegs;
  static constexpr bool kEndsBlockBeforeBarrier = !kDeterministic || kScarcestRegisters;
  static constexpr bool kEndsBlockAfterAdds = !kScarceRegisters;

  // For the addresses of the products in the second half of a step.
  CUTE_DEVICE static int thread_index() { return fresh_thread_index(); }
};

// Ends a basic block, across which the compiler does not move instructions. If it may hoist loads here, most kernels
// spill 4 to 56 bytes, or are 1 to 7 % slower.
template <class Schedule>
CUTE_DEVICE void end_basic_block(BwdParams const& params) {
  if (params.deterministic != Schedule::kDeterministic) __trap();  // never taken
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
