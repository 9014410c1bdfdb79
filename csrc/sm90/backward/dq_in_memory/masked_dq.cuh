// The sums of dQ where the batch has a mask: as in dq.cuh, but the key tiles that visit a row tile are bits
// of a list. Whichever comes first stores, and the others wait until it has. In the deterministic mode a key tile's
// turn is its rank among those of the list, which is the order in which tasks are drawn.
#pragma once

#include "core/memory_order.cuh"
#include "dq.cuh"
#include "dq_rows.cuh"
#include "sm90/backward/common/masked_rows.cuh"

namespace flash_cute::sm90::backward::dq_in_memory {

// What the semaphore of a row tile holds, but in the deterministic mode, which counts the key tiles that have added.
enum Sums : int {
  kNone = 0,
  kBegun = 1,   // the first key tile is storing
  kStored = 2,
};

// Waits until the task's dQ of a row tile may be stored, or added to the sums; whether it is to be stored.
CUTE_DEVICE bool take_turn(BwdParams const& params, MaskedTask const volatile& task, int m_block, int* semaphore) {
  if (params.deterministic) {
    TileMask const& mask = params.mask;
    int64_t const list = task.batch * mask.row_list_batch_stride + task.head_kv * mask.row_list_head_stride +
                         int64_t{m_block} * mask.of_rows.words;
    int const rank = bits_below(mask.of_rows.visited + list, task.n_block);
    if (rank > 0) wait_for_count(semaphore, rank);
    return rank == 0;
  }
  int before;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(semaphore), "n"(int{kNone}), "n"(int{kBegun})
               : "memory");
  if (before == kNone) return true;
  if (before == kBegun) {
    wait_for_count(semaphore, kStored);
  } else {
    asm volatile("fence.proxy.async;" ::: "memory");  // orders the bulk copies that follow after the acquire
  }
  return false;
}

// As add_dq.
template <class Traits, int kParity>
CUTE_DEVICE void add_masked_dq(KernelArgs const& args, typename Traits::SharedStorage& smem) {
  constexpr int kBytes = Traits::kDqElements * sizeof(float);
  // The warpgroups that compute dQ of these steps.
  constexpr int kFirst = Traits::kAlternates ? kParity : 0;
  constexpr int kEnd = Traits::kAlternates ? kParity + 1 : Traits::kWarpgroups;
  BwdParams const& params = args.params;
#pragma unroll 1
  for (int task_number = 0;; ++task_number) {
    smem.task_pipeline.wait_full(at_step(task_number));  // the producer has written the task
    auto task = [&]() -> MaskedTask const volatile& { return smem.task[opaque(task_number) & 1]; };
    if (task().dq_begin < 0) break;
#pragma unroll 1
    for (int count = task().begin + ((task().begin ^ kParity) & 1); count < task().end; count += 2) {
      auto const state = dq_state<Traits>(count);
      // Read again at each use: these threads have 24 registers. The producer overwrites the step's row tile once this
      // thread has done the step after the next.
      auto const visit = [&]() -> RowVisit volatile& { return smem.visits.at(opaque(count)); };
      auto const index = [&] {
        return row_tile_index<Traits>(params, task(), RowTile{visit().m_block, visit().head});
      };
#pragma unroll 1
      for (int warpgroup = kFirst; warpgroup < kEnd; ++warpgroup) {
        smem.dq_pipeline[warpgroup].wait_full(state);  // the warpgroup's four warps have stored dQ of this step
        if (warpgroup == kFirst) {
          visit().stores = take_turn(params, task(), visit().m_block, params.semaphores + index());
        }
        int64_t const offset = Traits::kAlternates ? 0 : warpgroup * Traits::kDqElements;
        float* const sums = params.dq_acc + int64_t{index()} * Traits::kQElements + offset;
        uint32_t const source = cast_smem_ptr_to_uint(smem.dq[warpgroup][state.stage % Traits::kDqBuffers]);
        if (visit().stores) {
          bulk_store<kBytes>(sums, source);
        } else {
          bulk_add<kBytes>(sums, source);
        }
        tma_store_arrive();
        tma_store_wait<0>();  // the bulk copy has read shared memory, which the warpgroup may overwrite
        smem.dq_pipeline[warpgroup].arrive_empty(state);
      }
      if (params.deterministic || visit().stores) count_up(params.semaphores + index());
    }
    if (task().n_block >= 0) end_key_tile<Traits>(args, task, smem.task[0]);
    smem.task_pipeline.arrive_empty(at_step(task_number));
  }
}

// A task's share of dQ. Of a row tile that no key tile visits there are no sums: its semaphore is 0.
template <class Traits>
struct MaskedDqShare : DenseDqShare<Traits> {
  CUTE_DEVICE float const* sums(int row_tile) const {
    BwdParams const& params = this->params;
    if (__ldcg(params.semaphores + row_tile) == kNone) return nullptr;
    return params.dq_acc + int64_t{row_tile} * Traits::kQElements;
  }
};

}  // namespace flash_cute::sm90::backward::dq_in_memory
