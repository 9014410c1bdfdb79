// dQ is summed over the key tiles in float32, in memory. A consumer warpgroup leaves its part of a row tile in
// shared memory and goes on; a thread of the producer warpgroup adds it there by bulk reductions. The sums lie in the
// order of the WGMMA fragments, four of a thread together. Once all key tiles of a head have added, consumers turn the
// sums into 16-bit rows, between two key tiles of later heads: most are still in L2, and no kernel has to follow.
//
// Key tile 0 stores and the others wait for it: nobody has to clear the sums first. In the deterministic mode every
// key tile waits for the one before it, so that the sum has the same bits each time. A CTA waits only for CTAs
// launched before it.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "../core/convert.cuh"
#include "bwd_args.cuh"
#include "bwd_scores.cuh"
#include "bwd_traits.cuh"
#include "pipeline.cuh"

namespace flash_cute::sm90 {

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

// How often the adding threads have been done with a key tile of a key head, of all batches: twice each.
CUTE_DEVICE int* head_counter(BwdArgs const& args, int head) { return args.params.counters + 1 + head; }

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
    smem.task_pipeline.wait_full(at_step(draws));
    Task const volatile& task = smem.task[draws & 1];
    if (task.dq_begin < 0) break;
#pragma unroll 1
    for (int i = 0; i < args.group; ++i) {
#pragma unroll 1
      for (int m = args.m_blocks - 1; m >= task.m_begin; --m, ++count) {
        if (count % 2 != kParity) continue;
        int const row_tile = (task.batch * params.heads_q + task.head_kv * args.group + i) * args.m_blocks + m;
#pragma unroll 1
        for (int warpgroup = 0; warpgroup < Traits::kWarpgroups; ++warpgroup) {
          smem.dq_pipeline[warpgroup].wait_full(at_step(count));
          float* const sums = params.dq_acc + int64_t{row_tile} * Traits::kQElements + warpgroup * kElements;
          uint32_t const source = cast_smem_ptr_to_uint(smem.dq[warpgroup][kParity]);
          if (task.n_block == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(sums), "r"(source),
                         "n"(kElements * sizeof(float))
                         : "memory");
          } else {
            if (warpgroup == 0) wait_turn(params.semaphores + row_tile, params.deterministic ? task.n_block : 1);
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums),
                         "r"(source), "n"(kElements * sizeof(float))
                         : "memory");
          }
          tma_store_arrive();
          tma_store_wait<0>();  // shared memory has been read
          smem.dq_pipeline[warpgroup].arrive_empty(at_step(count));
        }
        if (params.deterministic || task.n_block == 0) end_turn(params.semaphores + row_tile);
      }
    }
    if (task.n_block >= 0) end_turn(head_counter(args, task.batch * params.heads_kv + task.head_kv));
    smem.task_pipeline.arrive_empty(at_step(draws));
  }
}

// The sums of complete row tiles to 16-bit rows, each warpgroup its own part, through its buffers of dQ.
template <class Traits>
CUTE_DEVICE void convert_dq(BwdArgs const& args, Task const volatile& task, int count,
                            typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int kElements = 64 * Traits::kChunk;
  constexpr int kBuffers = sizeof(smem.dq[0]) / (kElements * sizeof(Element));
  constexpr int kFours = Traits::kDqPerThread / 4;
  static_assert(kBuffers >= 4);
  BwdParams const& params = args.params;
  int const thread = consumer_thread();
  int const warpgroup = thread / 128;
  typename Traits::MmaQueriesPart mma;
  auto const copy_dq = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma).get_slice(thread % 128);
  auto tdQrdQ = partition_fragment_C(mma, Shape<_64, Int<Traits::kChunk>>{});  // (MMA, MMA_M, MMA_D)
  auto rdQ = make_tensor_like<Element>(tdQrdQ);                                // (MMA, MMA_M, MMA_D)
  // Row tiles that no key tile reads have no sums.
  int const summed = row_range<typename Traits::Mask, Traits::kBlockM, Traits::kBlockN>(params, 0).begin;

  smem.dq_pipeline[warpgroup].wait_empty(at_step(count));
  smem.dq_pipeline[warpgroup].wait_empty(at_step(count + 1));
  if (thread % 128 == 0) wait_turn(head_counter(args, task.dq_head), 2 * args.n_blocks);
  wait_results_read();
  int buffer = 0;
#pragma unroll 1
  for (int row_tile = task.dq_begin; row_tile < task.dq_end; ++row_tile) {
    int const m_block = row_tile % args.m_blocks, head = row_tile / args.m_blocks;
    auto const* const sums = reinterpret_cast<float4 const*>(params.dq_acc) +
                             (int64_t{row_tile} * Traits::kWarpgroups + warpgroup) * kFours * 128 + thread % 128;
    CUTE_UNROLL
    for (int i = 0; i < kFours; ++i) {
      float4 const four = m_block >= summed ? __ldcg(sums + i * 128) : make_float4(0.f, 0.f, 0.f, 0.f);
      tdQrdQ(4 * i) = four.x * params.scale;
      tdQrdQ(4 * i + 1) = four.y * params.scale;
      tdQrdQ(4 * i + 2) = four.z * params.scale;
      tdQrdQ(4 * i + 3) = four.w * params.scale;
    }
    convert(tdQrdQ, rdQ);
    Element* const place = reinterpret_cast<Element*>(smem.dq[warpgroup][0]) + buffer * kElements;
    auto sdQ = make_tensor(make_smem_ptr(place), typename Traits::SmemLayoutDq{});  // (64, kChunk)
    copy(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, copy_dq.retile_S(rdQ), copy_dq.partition_D(sdQ));
    tma_store_fence();
    named_sync(kResults + warpgroup, 128);
    if (thread % 128 == 0) {
      int const row = m_block * Traits::kBlockM + (Traits::kSplitColumns ? 0 : 64 * warpgroup);
      int const column = Traits::kSplitColumns ? Traits::kChunk * warpgroup : 0;
      SM90_TMA_STORE_4D::copy(&args.dq, place, column, row, head % params.heads_q, head / params.heads_q);
      tma_store_arrive();
      tma_store_wait<kBuffers - 2>();  // after the next sync the buffer after next may be written
    }
    buffer = buffer + 1 == kBuffers ? 0 : buffer + 1;
  }
}

}  // namespace flash_cute::sm90
