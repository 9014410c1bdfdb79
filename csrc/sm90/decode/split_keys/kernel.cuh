// Attention over a KV cache on Hopper: persistent CTAs of four warps that compute and two or four that load. See
// contract/decode.h for how the work is cut, core/split_keys/consumer.cuh for what the four warps do.
#pragma once

#include "load.cuh"
#include "core/split_keys/consumer.cuh"
#include "core/split_keys/merge.cuh"
#include "sm90/common/dependent_launch.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::split_keys {

namespace common = flash_cute::split_keys;

constexpr int kInitialized = common::kConsumers + 1;  // named barrier: what thread 0 has written is there

// The consumers' side of the ring of tiles, K and V by turns.
template <class Traits, class Loader>
class Ring {
 public:
  using Cache = typename Traits::Cache;
  CUTE_DEVICE explicit Ring(typename Traits::SharedStorage& smem) : smem_(smem) { values_.advance(); }

  CUTE_DEVICE Cache const* wait_keys() const { return wait(keys_); }
  CUTE_DEVICE Cache const* wait_values() const { return wait(values_); }
  CUTE_DEVICE void release_keys() { release(keys_); }
  CUTE_DEVICE void release_values() { release(values_); }

 private:
  using State = PipelineState<Traits::kStages>;

  CUTE_DEVICE Cache const* wait(State const& state) const {
    smem_.pipeline.wait_full(state);
    if constexpr (Traits::kHasWarpgroupProducts && !Loader::kByTma) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // WGMMA may read it
    }
    return smem_.tiles[state.stage];
  }
  CUTE_DEVICE void release(State& state) {
    __syncwarp();
    smem_.pipeline.release(state);
    state.advance();
    state.advance();
  }

  typename Traits::SharedStorage& smem_;
  State keys_;
  State values_;
};

template <class Traits, class Loader>
CUTE_DEVICE void consume(DecodeParams const& params, typename Traits::SharedStorage& smem) {
  Ring<Traits, Loader> ring(smem);
#pragma unroll 1
  for (PipelineState<2> state;; state.advance()) {
    smem.unit_pipeline.wait_full(state);
    Unit const& unit = smem.units[state.stage];
    if (unit.rows == 0) break;
    if (rows_of_tile(unit.sequence.len_q * params.group) == kFewRows) {
      common::Consumer<Traits, 1>(params, unit, smem.consumers).run(ring);
    } else {
      common::Consumer<Traits, kConsumerWarps>(params, unit, smem.consumers).run(ring);
    }
    __syncwarp();
    smem.unit_pipeline.release(state);
  }
}

template <class Traits, class Loader>
__global__ void __launch_bounds__(threads(Loader::kWarps), Traits::kCtasPerSm)
    decode_kernel(__grid_constant__ KernelArgs const args) {
  constexpr int kThreads = threads(Loader::kWarps);
  extern __shared__ char smem_raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_raw);
  if (int const producer_warp = threadIdx.x / 32 - kConsumerWarps; producer_warp >= 0) {
    Producer<Traits, Loader> producer(args, smem, producer_warp);
    auto walk = producer.find_work();
    named_sync(kInitialized, kThreads);
    producer.run(walk);
    return;
  }
  if (threadIdx.x == 0) {
    smem.pipeline.init(kConsumerWarps, Loader::kTileArrivals);
    smem.unit_pipeline.init(kConsumerWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // makes the barriers visible to TMA
    if constexpr (Loader::kByTma) {
      prefetch_tma_descriptor(&args.k);
      prefetch_tma_descriptor(&args.v);
    }
  }
  launch_dependents();  // the producers do so once they have asked for the first tile
  common::consumers_sync();
  named_arrive(kInitialized, kThreads);
  consume<Traits, Loader>(args.params, smem);
}

template <class Traits>
__global__ void __launch_bounds__(32 * common::kMergeWarps, 1)
    merge_kernel(__grid_constant__ DecodeParams const params) {
  int const place = int(blockIdx.x) / params.heads_kv, head_kv = int(blockIdx.x) % params.heads_kv;
  if (place == params.bundles - 1) {
    common::clear_rows_of_no_sequence<typename Traits::Element>(params);
  } else {
    common::Merge<Traits>(params, place + 1, head_kv).run([] { wait_for_kernel_before(); });
  }
}

}  // namespace flash_cute::sm90::decode::split_keys
