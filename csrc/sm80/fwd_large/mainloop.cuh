// The loop over key tiles, from the last to the first: S = Q K^T over chunks of the head dim, mask, online softmax, P to
// shared memory, O += P V over steps of keys.
#pragma once

#include "../../core/convert.cuh"
#include "../../core/layout.cuh"
#include "../../core/mask.cuh"
#include "../../core/score.cuh"
#include "load.cuh"
#include "softmax.cuh"

namespace flash_cute::sm80::fwd_large {

// The part of a CTA: `left` is the address of Q's chunks, if they are resident.
struct Part {
  uint32_t left;
  bool left_resident;
  int first_column;  // of out
  int columns;       // from there on
};

// scores += Q K^T. Of the step before the first one nothing is read any more.
template <class Traits, class Pipeline, class Load, class Scores>
CUTE_DEVICE void score_product(Pipeline& pipeline, Load& load, Part const& part, large::LaneOffsets const& lanes,
                               int chunks,
                               Scores& scores) {  // (4, 2, 4)
  using Element = typename Traits::Element;
  constexpr int kSteps = large::kChunk / 16;
  static_assert(kSteps % 2 == 0);
  large::ScoreFragments fragments[2];
  auto const left = [&](int chunk, uint32_t stage) {
    return lanes.left + (part.left_resident ? part.left + chunk * large::kLeftBytes : stage + large::kRightBytes);
  };
  pipeline.advance(load);
  fragments[0].load(left(0, pipeline.current()), lanes.right + pipeline.current(), 0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    uint32_t const stage = pipeline.current();
    uint32_t const left_tile = left(chunk, stage), right_tile = lanes.right + stage;
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      if (k + 1 < kSteps) {
        fragments[(k + 1) % 2].load(left_tile, right_tile, k + 1);
      } else if (chunk + 1 < chunks) {
        uint32_t const next = pipeline.next();
        fragments[0].load(left(chunk + 1, next), lanes.right + next, 0);
      }
      fragments[k % 2].template multiply<Element>(scores);
    }
    if (chunk + 1 < chunks) pipeline.advance(load);
  }
}

// out += P V, of the first kBlocks blocks of each warp. `steps` is even.
template <class Traits, int kBlocks, class Pipeline, class Load, class Out>
CUTE_DEVICE void out_product(Pipeline& pipeline, Load& load, uint32_t weights, uint32_t values, int steps,
                             Out& out) {  // (4, 4, kOutBlocks)
  using Element = typename Traits::Element;
  large::OutFragments fragments[2];
  pipeline.advance(load);  // and all threads have written P
  fragments[0].template load<kBlocks>(weights, values + pipeline.current(), 0);
#pragma unroll 1
  for (int step = 0; step < steps; step += 2) {
    fragments[1].template load<kBlocks>(weights, values + pipeline.next(), step + 1);
    fragments[0].template multiply<Element, kBlocks>(out);
    pipeline.advance(load);
    bool const more = step + 2 < steps;
    if (more) fragments[0].template load<kBlocks>(weights, values + pipeline.next(), step + 2);
    fragments[1].template multiply<Element, kBlocks>(out);
    if (more) pipeline.advance(load);
  }
}

template <class Traits, class Pipeline, class Out>
CUTE_DEVICE void mainloop(FwdParams const& params, typename Traits::Storage& smem, Pipeline& pipeline,
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
    score_product<Traits>(pipeline, load, part, lanes, chunks, tSrS);

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
    int const steps = Loader<Traits>::value_steps(keys);
    if (few_columns) {
      out_product<Traits, 5>(pipeline, load, lanes.weights + weights, lanes.values, steps, out);
    } else {
      out_product<Traits, large::kOutBlocks>(pipeline, load, lanes.weights + weights, lanes.values, steps, out);
    }
  }
}

}  // namespace flash_cute::sm80::fwd_large
