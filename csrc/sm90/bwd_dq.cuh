// dQ is summed over the key tiles in float32, in memory. A consumer warpgroup leaves its part of a row tile in
// shared memory and goes on; a thread of the producer warpgroup adds it there by bulk reductions. The sums lie in the
// order of the WGMMA fragments, four of a thread together: nobody has to put them in rows before the convert kernel.
//
// Key tile 0 stores and the others wait for it: nobody has to clear the sums first. In the deterministic mode every
// key tile waits for the one before it, so that the sum has the same bits each time. A CTA waits only for CTAs
// launched before it.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "../core/convert.cuh"
#include "bwd_args.cuh"
#include "bwd_traits.cuh"
#include "pipeline.cuh"

namespace flash_cute::sm90 {

// Read anew at each use: nothing that is computed from it stays in registers, which the accumulators leave few of.
CUTE_DEVICE int consumer_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread - 128;
}

// A warpgroup's buffers of dQ are its own again once what its epilogue left there has gone.
CUTE_DEVICE void wait_results_read() {
  int const thread = consumer_thread();
  if (thread % 128 == 0) tma_store_wait<0>();
  named_sync(kResults + thread / 128, 128);
}

// The turns of the key tiles at a row tile: the semaphore counts those that have added.
CUTE_DEVICE void wait_turn(int const* semaphore, int turn) {
  int arrived;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(semaphore) : "memory");
  } while (arrived < turn);
  asm volatile("fence.proxy.async;" ::: "memory");  // what the acquire saw comes before the bulk reduction
}

CUTE_DEVICE void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

CUTE_DEVICE void end_turn(int* semaphore) {
  bulk_wait_written();
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

// A consumer warpgroup's part of dQ to shared memory, in fragment order: the sums' offset i + 4 * 128 * j is register
// 4 * j + i % 4 of thread i / 4.
template <class Traits, class Accumulator>
CUTE_DEVICE void store_dq(typename Traits::SharedStorage& smem, int warpgroup, PipelineState<2> state,
                          Accumulator const& tdQrdQ) {  // (MMA, MMA_M, MMA_D)
  static_assert(decltype(size(tdQrdQ))::value == Traits::kDqPerThread);
  auto* const place = reinterpret_cast<float4*>(smem.dq[warpgroup][state.stage]) + consumer_thread() % 128;
  smem.dq_pipeline[warpgroup].wait_empty(state);  // the sums of two steps before have been read
  CUTE_UNROLL
  for (int i = 0; i < Traits::kDqPerThread; i += 4) {
    place[i * 32] = make_float4(tdQrdQ(i), tdQrdQ(i + 1), tdQrdQ(i + 2), tdQrdQ(i + 3));
  }
}

// Makes it known, after a fence for the async proxy.
template <class Traits>
CUTE_DEVICE void publish_dq(typename Traits::SharedStorage& smem, int warpgroup, PipelineState<2> state) {
  smem.dq_pipeline[warpgroup].arrive_full(state);
}

// Adds what store_dq leaves to memory: of two threads one the even steps, the other the odd ones, so that an ordered
// sum's way to memory and the wait for the turn at the next row tile overlap.
template <class Traits, int kParity>
CUTE_DEVICE void add_dq(BwdArgs const& args, typename Traits::SharedStorage& smem) {
  constexpr int kElements = Traits::kDqPerThread * 128;
  BwdParams const& params = args.params;
  int count = 0;  // of steps, of all key tiles
#pragma unroll 1
  for (int draws = 0;; ++draws) {
    smem.tile_pipeline.wait_full(at_step(draws));
    KeyTile const volatile& tile = smem.tile[draws & 1];
    if (tile.n_block < 0) break;
#pragma unroll 1
    for (int i = 0; i < args.group; ++i) {
#pragma unroll 1
      for (int m = args.m_blocks - 1; m >= tile.m_begin; --m, ++count) {
        if (count % 2 != kParity) continue;
        int const row_tile = (tile.batch * params.heads_q + tile.head_kv * args.group + i) * args.m_blocks + m;
#pragma unroll 1
        for (int warpgroup = 0; warpgroup < Traits::kWarpgroups; ++warpgroup) {
          smem.dq_pipeline[warpgroup].wait_full(at_step(count));
          float* const sums = params.dq_acc + int64_t{row_tile} * Traits::kQElements + warpgroup * kElements;
          uint32_t const source = cast_smem_ptr_to_uint(smem.dq[warpgroup][kParity]);
          if (tile.n_block == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(sums), "r"(source),
                         "n"(kElements * sizeof(float))
                         : "memory");
          } else {
            if (warpgroup == 0) wait_turn(params.semaphores + row_tile, params.deterministic ? tile.n_block : 1);
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums),
                         "r"(source), "n"(kElements * sizeof(float))
                         : "memory");
          }
          tma_store_arrive();
          tma_store_wait<0>();  // shared memory has been read
          smem.dq_pipeline[warpgroup].arrive_empty(at_step(count));
        }
        if (params.deterministic || tile.n_block == 0) end_turn(params.semaphores + row_tile);
      }
    }
    smem.tile_pipeline.arrive_empty(at_step(draws));
  }
  bulk_wait_written();  // shared memory must stay until then
}

// dQ of one row tile: sums to 16-bit rows.
template <class Traits>
__global__ void __launch_bounds__(Traits::kConsumerThreads) bwd_convert_kernel(__grid_constant__ BwdArgs const args) {
  using Element = typename Traits::Element;
  __shared__ alignas(1024) Element smem[Traits::kQElements];
  int const thread = threadIdx.x;
  int const row_tile = int(gridDim.x) - 1 - int(blockIdx.x);  // the last ones' sums are still in the L2 cache
  int const m_block = row_tile % args.m_blocks;
  int const head = row_tile / args.m_blocks % args.params.heads_q;
  int const batch = row_tile / args.m_blocks / args.params.heads_q;
  // Row tiles that no key tile reads have no sums.
  RowRange const range = row_range<typename Traits::Mask, Traits::kBlockM, Traits::kBlockN>(args.params, 0);
  bool const summed = m_block >= range.begin;

  typename Traits::MmaQueries mma;
  auto tdQrdQ = partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
  int64_t const part = int64_t{row_tile} * Traits::kWarpgroups + thread / 128;
  auto const* const sums = reinterpret_cast<float4 const*>(args.params.dq_acc) + part * Traits::kDqPerThread * 32;
  CUTE_UNROLL
  for (int i = 0; i < Traits::kDqPerThread; i += 4) {
    float4 const four = summed ? __ldcs(sums + i * 32 + thread % 128) : make_float4(0.f, 0.f, 0.f, 0.f);
    tdQrdQ(i) = four.x * args.params.scale;
    tdQrdQ(i + 1) = four.y * args.params.scale;
    tdQrdQ(i + 2) = four.z * args.params.scale;
    tdQrdQ(i + 3) = four.w * args.params.scale;
  }
  auto rdQ = make_tensor_like<Element>(tdQrdQ);  // (MMA, MMA_M, MMA_D)
  convert(tdQrdQ, rdQ);
  auto sdQ = make_tensor(make_smem_ptr(smem), typename Traits::SmemLayoutDq{});  // (BLK_M, D)
  auto const copy_dq = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma).get_slice(thread);
  copy(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, copy_dq.retile_S(rdQ), copy_dq.partition_D(sdQ));
  tma_store_fence();
  __syncthreads();
  if (thread == 0) {
    CUTE_UNROLL
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      SM90_TMA_STORE_4D::copy(&args.dq, smem + chunk * Traits::kBlockM * Traits::kChunk, chunk * Traits::kChunk,
                              m_block * Traits::kBlockM, head, batch);
    }
    tma_store_arrive();
    tma_store_wait<0>();
  }
}

}  // namespace flash_cute::sm90
