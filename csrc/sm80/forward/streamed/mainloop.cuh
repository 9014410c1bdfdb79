// The loop over key tiles, from the last to the first: S = Q K^T over chunks of the head dim, mask, online softmax, P
// to shared memory, O += P V over steps of keys.
#pragma once

#include "core/convert.cuh"
#include "core/layout.cuh"
#include "core/mask.cuh"
#include "core/score.cuh"
#include "sm80/streaming/steps.cuh"
#include "load.cuh"
#include "softmax.cuh"

namespace flash_cute::sm80::forward::streamed {

// The part of a CTA.
struct Part {
  streaming::LeftChunks left;  // of Q
  int first_column;  // of out
  int columns;       // from there on
};

// P of key tile n to shared memory, and in a pair to the partner.
template <class Traits, class Out>
CUTE_DEVICE void compute_weights(FwdParams const& params, typename Traits::Storage& smem, streaming::Pipeline& pipeline,
                                 Loader<Traits>& load, streaming::LeftChunks const& left, Softmax<Traits>& softmax,
                                 typename Traits::Partner const& pair, int n,
                                 Out& out) {  // (4, 4, kOutBlocks)
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  forward::SequenceTile const& tile = smem.tile;
  typename Traits::ScoreMma score_mma;
  auto tSrS = partition_fragment_C(score_mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // (4, 2, 4)
  clear(tSrS);
  streaming::score_product<Element>(pipeline, load, left, streaming::LaneOffsets::of(fresh_thread_index()),
                                streaming::num_chunks(params.head_dim), tSrS);

  int const thread = fresh_thread_index();
  auto scores = rowcol_view(tSrS);  // (rows, keys)
  auto cS = make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{});
  auto tScS_0 = rowcol_view(score_mma.get_slice(_0{}).partition_C(cS));  // (rows, keys) -> (row, key) of thread 0
  auto tScS = rowcol_view(score_mma.get_slice(thread).partition_C(cS));  // the same of this one
  int const offset = tile.coord.m_block * kBlockM - n * kBlockN, keys = tile.sequence.len_k - n * kBlockN;
  modify_scores(scores, tScS, tScS_0, params.score, tile.slope, offset + tile.sequence.shift);
  if (has_mask(params.mask)) {
    keep_seen(scores, seen_bits<1>(tScS, head_mask(params, tile), tile.coord.m_block * kBlockM, n * kBlockN),
              -INFINITY);
  } else if (tile.keys.needs_mask(n)) {
    apply_mask(scores, tScS, tScS_0, tile.sequence, offset, keys);
  }
  auto acc = rowcol_view(out);  // (rows, columns)
  softmax.update(smem, scores, acc, thread);

  // No warp reads P of the tile before any more: the barriers of this one's steps are behind it.
  auto rP = make_tensor_like<Element>(tSrS);  // (4, 2, 4)
  convert(tSrS, rP);
  streaming::store_weights(rP, cast_smem_ptr_to_uint(smem.weights), thread);
  if constexpr (Traits::kPaired) streaming::store_message(rP, pair.own().weights, thread);
}

// The partner's P to shared memory, if it has a tile, and its maxima.
template <class Traits, class Out>
CUTE_DEVICE void receive_weights(typename Traits::Storage& smem, Softmax<Traits>& softmax,
                                 typename Traits::Partner const& pair, bool has_tile,
                                 Out& out) {  // (4, 4, kOutBlocks)
  using Element = typename Traits::Element;
  int const thread = fresh_thread_index();
  pair.wait(thread);  // and no warp reads this CTA's own P any more
  auto acc = rowcol_view(out);  // (rows, columns)
  bool const rescaled = softmax.merge_maxima(smem, pair.other(), acc, thread);
  if (!has_tile) return;
  using Tile = Shape<Int<Traits::kBlockM>, Int<Traits::kBlockN>>;
  auto rP = make_tensor_like<Element>(partition_fragment_C(typename Traits::ScoreMma{}, Tile{}));  // (4, 2, 4)
  streaming::load_message(pair.other().weights, thread, rP);
  if (rescaled) {
    auto weights = rowcol_view(rP);  // (rows, keys)
    CUTE_UNROLL
    for (int i = 0; i < size<0>(weights); ++i) {
      float const factor = smem.other_factor[Softmax<Traits>::score_row(i, thread)];
      CUTE_UNROLL
      for (int j = 0; j < size<1>(weights); ++j) weights(i, j) = Element(float(weights(i, j)) * factor);
    }
  }
  streaming::store_weights(rP, cast_smem_ptr_to_uint(smem.weights), thread);
}

template <class Traits, class Out>
CUTE_DEVICE void mainloop(FwdParams const& params, typename Traits::Storage& smem, streaming::Pipeline& pipeline,
                          Loader<Traits>& load, Part const& part, Softmax<Traits>& softmax,
                          typename Traits::Partner& pair, Turns<Traits::kPaired> turns,
                          Out& out) {  // (4, 4, kOutBlocks)
  using Element = typename Traits::Element;
  uint32_t const weights = cast_smem_ptr_to_uint(smem.weights);
  bool const few_columns = part.columns <= 320;

#pragma unroll 1
  for (; turns.more(); turns.advance()) {
    int const n = turns.tile();
    bool const has_tile = turns.has_tile();
    if (turns.is_own()) {
      if (has_tile) compute_weights<Traits>(params, smem, pipeline, load, part.left, softmax, pair, n, out);
      if constexpr (Traits::kPaired) {
        Softmax<Traits>::send_maxima(smem, pair.own(), fresh_thread_index());
        pair.send(fresh_thread_index());
      }
    } else if constexpr (Traits::kPaired) {
      receive_weights<Traits>(smem, softmax, pair, has_tile, out);
    }
    if (!has_tile) continue;
    int const steps = streaming::value_steps(smem.tile.sequence.len_k - n * Traits::kBlockN);
    auto const lanes = streaming::LaneOffsets::of(fresh_thread_index());
    if (few_columns) {
      streaming::out_product<Element, 5>(pipeline, load, lanes.weights + weights, lanes.values, steps, out);
    } else {
      streaming::out_product<Element, streaming::kOutBlocks>(pipeline, load, lanes.weights + weights, lanes.values,
                                                             steps, out);
    }
  }
}

}  // namespace flash_cute::sm80::forward::streamed
