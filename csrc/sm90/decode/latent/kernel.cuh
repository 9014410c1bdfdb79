// Multi-head latent attention over a KV cache on Hopper, whose values are the first columns of the keys: persistent
// CTAs of two warpgroups that compute (consumer.cuh) and a warp, or four, that load (load.cuh). See contract/decode.h
// for how the work is cut. A KV head's query heads are those of several CTAs of a bundle where there are more than 64.
#pragma once

#include "consumer.cuh"
#include "load.cuh"
#include "merge.cuh"
#include "sm90/common/dependent_launch.cuh"

namespace flash_cute::sm90::decode::latent {

template <class Traits, class Loader>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(__grid_constant__ KernelArgs const args) {
  constexpr int kInitialization = kConsumers + 32 * Loader::kWarps;  // threads that take part
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
  if (threadIdx.x >= kConsumers) {
    int const warp = uniform(threadIdx.x / 32) - kConsumerWarps;
    Producer<Traits, Loader> producer(args, smem, warp);
    bool const loads = warp < Loader::kWarps;
    if (loads) {
      producer.find_work();
      named_sync(kInitialized, kInitialization);
    }
    lower_max_registers<kProducerRegs>();
    if (loads) producer.run();
    return;
  }
  if (threadIdx.x == 0) {
    init_ring(smem, Loader::kChunkArrivals);
    smem.unit_pipeline.init(kConsumerWarps + Loader::kWarps - 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
    if constexpr (Loader::kByTma) prefetch_tma_descriptor(&args.k);
  }
  launch_dependents();  // the producers do so once they have asked for the first tile
  named_sync(kAllConsumers, kConsumers);
  named_arrive(kInitialized, kInitialization);
  raise_max_registers<kConsumerRegs>();
  Consumer<Traits, Loader::kByTma>(args.params, smem).run();
}

template <class Traits>
__global__ void __launch_bounds__(kMergeThreads, kMergeCtasPerSm)
    merge_kernel(__grid_constant__ DecodeParams const params) {
  int const share = blockIdx.x % kMergeShares, number = blockIdx.x / kMergeShares;
  int const place = number / params.heads_kv, head_kv = number % params.heads_kv;
  if (place < params.bundles - 1) {
    Merge<Traits>(params, place + 1, head_kv, share).run();
  } else if (share == 0) {
    flash_cute::split_keys::clear_rows_of_no_sequence<typename Traits::Element>(params);
  }
}

}  // namespace flash_cute::sm90::decode::latent
