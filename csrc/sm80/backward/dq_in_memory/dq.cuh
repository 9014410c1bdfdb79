// dQ is accumulated over the key tiles in float32, in global memory: each CTA adds its share of a row tile by atomic
// reductions without a return value. The sums are stored in MMA fragment order, register by register over all threads:
// a warp's reduction covers a whole cache line, and only the convert kernel needs to reorder them into rows.
//
// In the deterministic mode the key tiles of a row tile add in a fixed order, so that dQ is bitwise reproducible. A CTA
// waits only for CTAs that drew lower tickets, which already run or have ended. All CTAs of a head visit its row tiles
// in the same order, so that a CTA stays behind its predecessor after one wait, instead of waiting at every row tile.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "core/memory_order.cuh"
#include "schedule.cuh"
#include "task.cuh"
#include "traits.cuh"
#include "sm80/common/load_cp_async.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// The semaphore of a row tile counts the key tiles that have added to it.
CUTE_DEVICE int turns_ended(int const* semaphore) { return load_acquire(semaphore); }

// Called by one thread, after a barrier that follows the adds of all threads. The release makes them visible before the
// count; it waits until they have reached memory.
CUTE_DEVICE void end_turn(int* semaphore) { increment_release(semaphore); }

// Two threads, of different warps, end the turns of a CTA and wait for them. A turn ends at the beginning of the next
// step, when the adds have mostly reached memory, and is awaited before the barrier after which all threads add.
constexpr int kEndingThread = 0;
constexpr int kWaitingThread = 32;

template <class Schedule>
__device__ inline int* semaphore(Task<Schedule> const& task, RowTile const& row_tile) {
  return task.params.semaphores + row_tile.index(task.params, opaque(task.tile.batch));
}

// Waits until the key tiles that come earlier in the order have added to a row tile. `ended`: what its semaphore showed
// before, or 0.
template <class Schedule>
__device__ inline void wait_turn(Task<Schedule> const& task, RowTile const& row_tile, int ended) {
  using Traits = typename Schedule::Traits;
  KeyTiles const visiting = visiting_key_tiles<Traits::kBlockM, Traits::kBlockN>(task.params, row_tile.m_block);
  int const turn = task.ascends ? visiting.end - 1 - opaque(task.tile.n_block)
                                : opaque(task.tile.n_block) - visiting.begin;
  while (ended < turn) ended = turns_ended(semaphore(task, row_tile));
}

// Ends this CTA's turn at the row tile before `row_tile`, unless that is the first one.
template <class Schedule>
__device__ inline void end_turn_before(Task<Schedule> const& task, RowTile const& row_tile) {
  RowTile const before = task.previous(row_tile);
  if (before.head >= opaque(task.tile.head_kv) * task.params.heads_per_kv) end_turn(semaphore(task, before));
}

// Points to the sums of register 0 of this thread.
template <class Traits>
CUTE_DEVICE float* dq_sums(BwdParams const& params, RowTile const& row_tile, int batch) {
  int64_t const index = row_tile.index(params, batch);
  return params.dq_acc + index * (Traits::kBlockM * Traits::kHeadDim) + fresh_thread_index();
}

// Adds part `part` of kParts of a thread's registers to a row tile's sums: register i of thread t is at offset
// i * kThreads + t.
template <class Traits, int kParts, class Accumulator>
CUTE_DEVICE void add_dq(float* sums, int part,
                        Accumulator const& tdQrdQ) {  // (MMA, MMA_M, MMA_D)
  constexpr int kSize = Traits::kDqPerThread / kParts;
  static_assert(decltype(size(tdQrdQ))::value == Traits::kDqPerThread && Traits::kDqPerThread % kParts == 0);
  CUTE_UNROLL
  for (int i = part * kSize; i < (part + 1) * kSize; ++i) atomicAdd(sums + i * Traits::kThreads, tdQrdQ(i));
}

// dQ of this CTA's row tile, from its sums.
template <class Traits>
CUTE_DEVICE auto scaled_dq(BwdParams const& params) {
  constexpr int kBlockM = Traits::kBlockM, kHeadDim = Traits::kHeadDim;
  typename Traits::MmaQueries mma;
  auto tdQrdQ = partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
  float const* const sums = params.dq_acc + int64_t{blockIdx.x} * (kBlockM * kHeadDim) + int(threadIdx.x);
  CUTE_UNROLL
  for (int i = 0; i < Traits::kDqPerThread; ++i) tdQrdQ(i) = __ldcs(sums + i * Traits::kThreads) * params.scale;
  return tdQrdQ;
}

// Stores row tile `m_block` of a head of dQ as 16-bit rows.
template <class Traits, class Accumulator, class Gmem>
CUTE_DEVICE void store_row_tile(Accumulator const& tdQrdQ,  // (MMA, MMA_M, MMA_D)
                                Gmem const& mdQ,            // (rows, head dim)
                                int m_block) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kHeadDim = Traits::kHeadDim;
  __shared__ alignas(128) Element smem[kBlockM * kHeadDim];
  int const thread = threadIdx.x;
  typename Traits::MmaQueries mma;
  auto rdQ = make_tensor_like<Element>(tdQrdQ);  // (MMA, MMA_M, MMA_D)
  convert(tdQrdQ, rdQ);
  auto sdQ = make_tensor(make_smem_ptr(smem), typename Traits::template Rows<kBlockM, 1>{})(_, _, _0{});  // (BLK_M, D)
  typename Traits::SmemStoreAtom const store_atom;
  auto const copy_dq = make_tiled_copy_C(store_atom, mma).get_slice(thread);
  copy(store_atom, copy_dq.retile_S(rdQ), copy_dq.partition_D(sdQ));
  __syncthreads();  // all threads have written sdQ, which is read by rows

  auto gdQ = local_tile(mdQ, Shape<Int<kBlockM>, Int<kHeadDim>>{}, make_coord(m_block, _0{}));  // (BLK_M, D)
  auto cdQ = make_identity_tensor(Shape<Int<kBlockM>, Int<kHeadDim>>{});
  typename Traits::GmemStore gmem_store;
  auto const gmem_thread = gmem_store.get_slice(thread);
  store_tile(gmem_store, gmem_thread.partition_S(sdQ), gmem_thread.partition_D(gdQ), gmem_thread.partition_S(cdQ),
             int(size<0>(mdQ)) - m_block * kBlockM, int(size<1>(mdQ)));
}

// Converts dQ of one row tile from float32 sums in fragment order to 16-bit rows. One CTA per row tile.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads) bwd_convert_kernel(__grid_constant__ BwdParams const params) {
  int const m_block = blockIdx.x % params.m_blocks;
  int const head = blockIdx.x / params.m_blocks % params.heads_q;
  int const batch = blockIdx.x / params.m_blocks / params.heads_q;
  auto mdQ = make_head_tensor(static_cast<typename Traits::Element*>(params.dq), params.dq_strides, batch, head,
                              params.len_q, params.head_dim);  // (rows, head dim)
  store_row_tile<Traits>(scaled_dq<Traits>(params), mdQ, m_block);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
