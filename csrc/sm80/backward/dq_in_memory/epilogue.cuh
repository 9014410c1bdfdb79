// Stores dK and dV in 16-byte vectors, through the shared memory of K and V.
#pragma once

#include <cute/tensor.hpp>

#include "core/convert.cuh"
#include "task.cuh"
#include "traits.cuh"
#include "sm80/common/load_cp_async.cuh"

namespace flash_cute::sm80::backward::dq_in_memory {

// `results(base, strides)`: dK or dV of the tile's head, (keys, head dim).
template <class Traits, class Results, class Accumulator>
CUTE_DEVICE void store_results(BwdParams const& params, typename Traits::SharedStorage& smem, Results const& results,
                               int n_block,
                               Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                               Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  using Element = typename Traits::Element;
  using Tile = Shape<Int<Traits::kBlockN>, Int<Traits::kHeadDim>>;
  int const thread = threadIdx.x;
  typename Traits::MmaKeys mma;
  typename Traits::SmemStoreAtom const store_atom;
  auto const copy_out = make_tiled_copy_C(store_atom, mma).get_slice(thread);
  auto sdK = make_tensor(make_smem_ptr(smem.k), typename Traits::SmemLayoutK{})(_, _, _0{});  // (BLK_N, D)
  auto sdV = make_tensor(make_smem_ptr(smem.v), typename Traits::SmemLayoutK{})(_, _, _0{});  // (BLK_N, D)

  auto to_smem = [&](auto& acc, auto& sX) {
    auto rX = make_tensor_like<Element>(acc);  // (MMA, MMA_N, MMA_D)
    convert(acc, rX);
    copy(store_atom, copy_out.retile_S(rX), copy_out.partition_D(sX));
  };
  auto to_memory = [&](auto const& sX, void* base, Strides const& strides) {
    auto mX = results(base, strides);                            // (keys, head dim)
    auto gX = local_tile(mX, Tile{}, make_coord(n_block, _0{}));  // (BLK_N, D)
    typename Traits::GmemStore gmem_store;
    auto const gmem_thread = gmem_store.get_slice(thread);
    store_tile(gmem_store, gmem_thread.partition_S(sX), gmem_thread.partition_D(gX),
               gmem_thread.partition_S(make_identity_tensor(Tile{})), int(size<0>(mX)) - n_block * Traits::kBlockN,
               params.head_dim);
  };
  CUTE_UNROLL
  for (int i = 0; i < size(tdKrdK); ++i) tdKrdK(i) *= params.scale;
  __syncthreads();  // all threads have finished reading K and V, which are overwritten
  to_smem(tdVrdV, sdV);
  to_smem(tdKrdK, sdK);
  __syncthreads();  // all threads have written dK and dV to shared memory
  to_memory(sdV, params.dv, params.dv_strides);
  to_memory(sdK, params.dk, params.dk_strides);
}

template <class Traits, bool kDeterministic, class Accumulator>
CUTE_DEVICE void epilogue(BwdParams const& params, typename Traits::SharedStorage& smem,
                          Accumulator& tdKrdK,    // (MMA, MMA_N, MMA_D)
                          Accumulator& tdVrdV) {  // (MMA, MMA_N, MMA_D)
  KeyTile const tile(params, reread_index<kDeterministic>(params));
  auto const results = [&](void* base, Strides const& strides) {
    return make_head_tensor(static_cast<typename Traits::Element*>(base), strides, tile.batch, tile.head_kv,
                            params.len_k, params.head_dim);
  };
  store_results<Traits>(params, smem, results, tile.n_block, tdKrdK, tdVrdV);
}

}  // namespace flash_cute::sm80::backward::dq_in_memory
