// The two kinds of product of products.cuh over the steps whose operands pass through the ring. Each begins with the
// barrier of its first step and ends without one: of the step before it nothing is read any more.
#pragma once

#include "pipeline.cuh"
#include "products.cuh"

namespace flash_cute::sm80::streaming {

// Where the chunks of the CTA's rows are, the left operand of the scores: in shared memory from `tiles` on, else in the
// stage of their step, behind the chunk of the keys.
struct LeftChunks {
  uint32_t tiles;
  bool resident;

  CUTE_DEVICE uint32_t address(int chunk, uint32_t stage) const {
    return resident ? tiles + chunk * kLeftBytes : stage + kRightBytes;
  }
};

// The steps of a tile's X, an even number: steps past the keys are left out.
CUTE_HOST_DEVICE constexpr int value_steps(int keys) {
  constexpr int kPair = 2 * kValueKeys;
  return (keys < kBlockN ? (keys + kPair - 1) / kPair * kPair : kBlockN) / kValueKeys;
}

// scores += left right^T.
template <class Element, class Load, class Scores>
CUTE_DEVICE void score_product(Pipeline& pipeline, Load& load, LeftChunks const& left, LaneOffsets const& lanes,
                               int chunks,
                               Scores& scores) {  // (4, 2, 4)
  constexpr int kSteps = kChunk / 16;
  static_assert(kSteps % 2 == 0);
  ScoreFragments fragments[2];
  pipeline.advance();
  fragments[0].load(lanes.left + left.address(0, pipeline.current()), lanes.right + pipeline.current(), 0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    uint32_t const stage = pipeline.current();
    uint32_t const left_tile = lanes.left + left.address(chunk, stage), right_tile = lanes.right + stage;
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      if (k + 1 < kSteps) {
        fragments[(k + 1) % 2].load(left_tile, right_tile, k + 1);
      } else if (chunk + 1 < chunks) {
        uint32_t const next = pipeline.next();
        fragments[0].load(lanes.left + left.address(chunk + 1, next), lanes.right + next, 0);
      }
      fragments[k % 2].template multiply<Element>(scores);
      if (k == 0) pipeline.fill(load);
    }
    if (chunk + 1 == chunks) break;
    chunk % 2 == 0 ? pipeline.advance_in_pair() : pipeline.advance();
  }
}

// out += W X, of the first kBlocks blocks of each warp; W is what all threads have stored before. `weights`, `values`:
// the thread's addresses in W and in a stage. `steps` is even.
template <class Element, int kBlocks, class Load, class Out>
CUTE_DEVICE void out_product(Pipeline& pipeline, Load& load, uint32_t weights, uint32_t values, int steps,
                             Out& out) {  // (4, 4, kOutBlocks)
  constexpr int kFirstBlocks = 2;  // that are multiplied before the copies of a step are started
  OutFragments fragments[2];
  auto const multiply = [&](OutFragments const& operands) {
    operands.template multiply<Element, 0, kFirstBlocks>(out);
    pipeline.fill(load);
    operands.template multiply<Element, kFirstBlocks, kBlocks>(out);
  };
  pipeline.advance();  // and all threads have stored W
  fragments[0].template load<kBlocks>(weights, values + pipeline.current(), 0);
#pragma unroll 1
  for (int step = 0; step < steps; step += 2) {
    fragments[1].template load<kBlocks>(weights, values + pipeline.next(), step + 1);
    multiply(fragments[0]);
    pipeline.advance_in_pair();
    bool const more = step + 2 < steps;
    if (more) fragments[0].template load<kBlocks>(weights, values + pipeline.next(), step + 2);
    multiply(fragments[1]);
    if (more) pipeline.advance();
  }
}

}  // namespace flash_cute::sm80::streaming
