// The loop over key tiles, from the last to the first: S = Q K^T over chunks of the head dim, mask, online softmax, P
// to shared memory, O += P V over steps of keys.
#pragma once

#include "../../core/convert.cuh"
#include "../../core/layout.cuh"
#include "../../core/mask.cuh"
#include "../../core/score.cuh"
#include "../large/steps.cuh"
#include "load.cuh"
#include "softmax.cuh"

namespace flash_cute::sm80::fwd_large {

// The part of a CTA.
struct Part {
  large::LeftChunks left;  // of Q
  int first_column;  // of out
  int columns;       // from there on
};

template <class Traits, class Out>
CUTE_DEVICE void mainloop(FwdParams const& params, typename Traits::Storage& smem, large::Pipeline& pipeline,
                          Loader<Traits>& load, Part const& part, Softmax<Traits>& softmax,
                          Out& out,  // (4, 4, kOutBlocks)
                          int thread) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  fwd::SequenceTile const& tile = smem.tile;
  typename Traits::ScoreMma score_mma;
  auto const lanes = large::LaneOffsets::of(thread);
  uint32_t const weights = cast_smem_ptr_to_uint(smem.weights);
  int const chunks = large::num_chunks(params.head_dim);
  bool const few_columns = part.columns <= 320;

#pragma unroll 1
  for (int n = tile.keys.end - 1; n >= tile.keys.begin; --n) {
    auto tSrS = partition_fragment_C(score_mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (4, 2, 4)
    clear(tSrS);
    large::score_product<Element>(pipeline, load, part.left, lanes, chunks, tSrS);

    auto scores = rowcol_view(tSrS);  // (rows, keys)
    auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
    auto tScS_0 = rowcol_view(score_mma.get_slice(_0{}).partition_C(cS));    // (rows, keys) -> (row, key) of thread 0
    auto tScS = rowcol_view(score_mma.get_slice(thread).partition_C(cS));  // the same of this one
    int const offset = tile.coord.m_block * kBlockM - n * kBlockN, keys = tile.sequence.len_k - n * kBlockN;
    modify_scores(scores, tScS, tScS_0, params.score, tile.slope, offset + tile.sequence.shift);
    if (tile.keys.needs_mask(n)) apply_mask(scores, tScS, tScS_0, tile.sequence, offset, keys);
    auto acc = rowcol_view(out);  // (rows, columns)
    softmax.update(smem, scores, acc, thread);

    // No warp reads P of the tile before any more: the barriers of this one's steps are behind it.
    auto rP = make_tensor_like<Element>(tSrS);  // (4, 2, 4)
    convert(tSrS, rP);
    large::store_weights(rP, weights, thread);
    int const steps = large::value_steps(keys);
    if (few_columns) {
      large::out_product<Element, 5>(pipeline, load, lanes.weights + weights, lanes.values, steps, out);
    } else {
      large::out_product<Element, large::kOutBlocks>(pipeline, load, lanes.weights + weights, lanes.values, steps,
                                                     out);
    }
  }
}

}  // namespace flash_cute::sm80::fwd_large
