// The loop over the tiles of the other side, for each query head from the last to the first: the scores over chunks of
// the head dim, P, dP and dS, W (P or dS) to shared memory, and the gradient += W X over steps of 16 rows of X.
#pragma once

#include "core/convert.cuh"
#include "core/registers.cuh"
#include "load.cuh"
#include "scores.cuh"

namespace flash_cute::sm80::backward::streamed {

// W of a tile of the other side to shared memory; returns it. `left`: the chunks of the scores' left operand; those of
// dP's are behind them. `head`: from the task's first one on.
template <class Traits, Side kSide>
CUTE_DEVICE auto compute_weights(BwdParams const& params, typename Traits::Storage& smem, streaming::Pipeline& pipeline,
                                 Loader<Traits, kSide>& load, streaming::LeftChunks const& left, int head, int other) {
  using Element = typename Traits::Element;
  using Tile = Shape<Int<kTileRows>, Int<kOtherRows>>;
  auto const& task = smem.task;
  typename Traits::ScoreMma score_mma;
  auto const lanes = [] { return streaming::LaneOffsets::of(fresh_thread_index()); };
  if constexpr (kSide == Side::kKeys) {  // the barriers of the steps of X are behind the last use
    load_statistics<kOtherRows>(params, smem, task.head + head, other * kOtherRows, fresh_thread_index());
  }
  uint32_t const seen = seen_scores<Traits, kSide>(params, smem, task.head + head, other, fresh_thread_index());
  auto tSrS = partition_fragment_C(score_mma, Tile{});  // (4, 2, 4)
  clear(tSrS);
  streaming::score_product<Element>(pipeline, load, left, lanes(), task.chunks, tSrS);
  exponentiate<Traits, kSide>(params, smem, task.head + head, other, tSrS, seen, fresh_thread_index());
  if (task.needs_dp()) {
    auto tSrdP = partition_fragment_C(score_mma, Tile{});  // (4, 2, 4)
    clear(tSrdP);
    streaming::LeftChunks const left_dp{left.tiles + task.chunks * streaming::kLeftBytes, left.resident};
    streaming::score_product<Element>(pipeline, load, left_dp, lanes(), task.score_steps - task.chunks, tSrdP);
    differentiate<Traits, kSide>(smem, tSrS, tSrdP, fresh_thread_index());
  }

  // No warp reads W of the tile before any more: the barriers of this one's steps are behind it.
  auto rW = make_tensor_like<Element>(tSrS);  // (4, 2, 4)
  convert(tSrS, rW);
  streaming::store_weights(rW, cast_smem_ptr_to_uint(smem.weights), fresh_thread_index());
  return rW;
}

// out += W X.
template <class Traits, Side kSide, class Out>
CUTE_DEVICE void add_product(typename Traits::Storage const& smem, streaming::Pipeline& pipeline,
                             Loader<Traits, kSide>& load, uint32_t weights, int columns, int other,
                             Out& out) {  // (4, 4, kOutBlocks)
  using Element = typename Traits::Element;
  auto const lanes = [] { return streaming::LaneOffsets::of(fresh_thread_index()); };
  int const steps = streaming::value_steps(smem.task.x.rows - other * kOtherRows);
  if (columns <= 320) {
    streaming::out_product<Element, 5>(pipeline, load, lanes().weights + weights, lanes().values, steps, out);
  } else {
    streaming::out_product<Element, streaming::kOutBlocks>(pipeline, load, lanes().weights + weights, lanes().values,
                                                           steps, out);
  }
}

template <class Traits, Side kSide, class Out>
CUTE_DEVICE void mainloop(BwdParams const& params, typename Traits::Storage& smem, streaming::Pipeline& pipeline,
                          Loader<Traits, kSide>& load, streaming::LeftChunks const& left, Alone,
                          Out& out) {  // (4, 4, kOutBlocks)
  auto const& task = smem.task;
  uint32_t const weights = cast_smem_ptr_to_uint(smem.weights);
  int const columns = task.x.columns;
  if constexpr (kSide == Side::kQueries) {
    load_statistics<kTileRows>(params, smem, task.head, task.tile * kTileRows, fresh_thread_index());
  }

#pragma unroll 1
  for (int head = 0; head < task.template loop_heads<kSide>(); ++head) {
#pragma unroll 1
    for (int other = task.others.end - 1; other >= task.others.begin; --other) {
      compute_weights<Traits, kSide>(params, smem, pipeline, load, left, head, other);
      add_product<Traits, kSide>(smem, pipeline, load, weights, columns, other, out);
    }
  }
}

}  // namespace flash_cute::sm80::backward::streamed
