// Shared memory of other CTAs of a cluster (DSMEM).
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

#include "pipeline.cuh"

namespace flash_cute::sm90 {

using namespace cute;

// The address of a shared variable of CTA `rank` of the cluster; `own`: this CTA's.
CUTE_DEVICE uint32_t address_in_cta(void const* own, uint32_t rank) {
  return set_block_rank(cast_smem_ptr_to_uint(own), rank);
}

// Stores 16 bytes in another CTA, and counts them at its barrier. The barrier's waiters see them.
CUTE_DEVICE void store_async(uint32_t address, float4 const& values, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   address),
               "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(barrier)
               : "memory");
}
CUTE_DEVICE void store_async(uint32_t address, uint4 const& words, uint32_t barrier) {
  float4 const values{__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                      __uint_as_float(words.w)};
  store_async(address, values, barrier);
}
CUTE_DEVICE void store_in_cta(uint32_t address, int value) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Waits (MEMBAR.GPU) until what the thread has written is visible, and its loads are complete.
CUTE_DEVICE void arrive_in_cta(uint32_t barrier) {
  jitter();
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// For a barrier whose waiters overwrite what has been read. Waits for nothing: WGMMAs that read it must have been
// waited for, and what was loaded must have been used, since a load may take longer than the other CTA's answer. (Among
// TMA loads the MEMBAR.GPU of arrive_in_cta takes thousands of clocks.)
CUTE_DEVICE void release_in_cta(uint32_t barrier) {
  jitter();
  asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of a barrier's phase, at which threads of other CTAs arrive.
CUTE_DEVICE void wait_for_cluster(uint64_t const& barrier, int phase) {
  asm volatile(
      "{ .reg .pred done;\n"
      "RETRY:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra COMPLETE;\n"
      "bra RETRY;\n"
      "COMPLETE: }\n" ::"r"(cast_smem_ptr_to_uint(&barrier)),
      "r"(phase)
      : "memory");
  jitter();
}

}  // namespace flash_cute::sm90
