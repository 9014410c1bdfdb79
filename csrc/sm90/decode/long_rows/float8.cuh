// Types of the kernel of long sequences over caches of float8. Keys and values become float16 numbers in shared memory,
// without error (load_float8.cuh), and the consumers are those of a forward in float16.
#pragma once

#include "core/convert.cuh"
#include "core/registers.cuh"
#include "core/split_keys/fold.cuh"
#include "core/split_keys/traits.cuh"
#include "sequences.cuh"
#include "sm90/forward/common/place.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::long_rows {

using flash_cute::split_keys::Float8;

struct Float8Params : Params {
  bool k_is_e5m2;  // else e4m3fn; each tensor has its own
  bool v_is_e5m2;
  Descale descale_k;
  Descale descale_v;
};
using Float8Args = Args<Float8Params>;

// descale_k is part of the softmax's scale; descale_v multiplies the result.
struct Float8Tile : SequenceTile {
  float scale_log2;
  float power_scale;
  float factor;
};
CUTE_DEVICE void add_factors(Float8Params const& params, Float8Tile& tile) {
  using flash_cute::split_keys::factor_of;
  tile.scale_log2 = params.scale_log2 * factor_of(params.descale_k, tile.batch, tile.head_kv);
  tile.power_scale = power_of_two_from(tile.scale_log2);
  tile.factor = factor_of(params.descale_v, tile.batch, tile.head_kv);
}
CUTE_DEVICE OnlineSoftmax<2> softmax_of(FwdParams const&, Float8Tile const& tile) {
  return {__int_as_float(uniform(__float_as_int(tile.scale_log2))),
          __int_as_float(uniform(__float_as_int(tile.power_scale)))};
}
template <class Accumulator>
CUTE_DEVICE void scale_values(Float8Tile const& tile, Accumulator& tOrO) {  // (MMA, MMA_M, MMA_D)
  float const factor = tile.factor;
  CUTE_UNROLL
  for (int i = 0; i < size(tOrO); ++i) tOrO(i) *= factor;
}

// `Result_`: of q and O.
template <class Result_, int kHeadDim>
struct Float8Traits : Traits<cutlass::half_t, kHeadDim> {
  using Base = Traits<cutlass::half_t, kHeadDim>;
  using Result = Result_;
  static constexpr forward::rows::SmemBytes kSmem = smem(kHeadDim, /*float8_cache=*/true);
  static constexpr bool kOutThroughSmem = kSmem.has_o;
  // The warps that widen need more than one that asks TMA. Four consumer warpgroups have none to spare.
  static constexpr int kProducerRegs = Base::kWarpgroups == 3 ? 56 : Base::kProducerRegs;
  static constexpr int kConsumerRegs = Base::kWarpgroups == 3 ? 152 : Base::kConsumerRegs;
  static constexpr bool kConvertsQueries = !std::is_same_v<Result, cutlass::half_t>;
  using Tile = Float8Tile;

  // A box of TMA has rows of a key tile, with all their columns.
  struct Columns {
    using Element = Float8;
    static constexpr int kChunk = kHeadDim;
    static constexpr int kChunks = 1;
  };
  static_assert(kHeadDim == 64 || kHeadDim == 128);  // bytes of a row that TMA swizzles
  static constexpr int kStageBytes = float8_stage_bytes(kHeadDim);

  struct alignas(1024) SharedStorage {
    cutlass::half_t k[Base::kStages][Base::kKElements];
    cutlass::half_t v[Base::kStages][Base::kVElements];
    cutlass::half_t q[kSmem.q_stages][Base::kWarpgroups][Base::kQElements];
    std::conditional_t<kSmem.has_o, forward::rows::OutBuffer<Base::kWarpgroups, kHeadDim>, forward::rows::NoOutBuffer>
        out;
    Float8 stored_k[Base::kStages][kStageBytes];  // as the cache has them
    Float8 stored_v[Base::kStages][kStageBytes];
    Pipeline<Base::kStages> k_pipeline;
    Pipeline<Base::kStages> v_pipeline;
    Pipeline<kSmem.q_stages> q_pipeline[Base::kWarpgroups];
    Pipeline<Base::kStages> stored_pipeline;
    Tile tile[2];
    Pipeline<2> tile_pipeline;
    Floors floors[32];
    forward::TileNumbers own_tiles[32];
    int range;  // as in a forward: none is split
  };
  static_assert(sizeof(SharedStorage) == kSmem.total);

  // Makes a warpgroup's rows of Q float16, in place: its threads have waited for them.
  CUTE_DEVICE static void convert_queries(SharedStorage& smem, int warpgroup, int stage) {
    auto* const vectors = reinterpret_cast<uint4*>(smem.q[stage][warpgroup]);
    for (int i = fresh_thread_index() % 128; i < Base::kQElements / 8; i += 128) {
      uint4 const x = vectors[i];
      vectors[i] = {in_float16<Result>(x.x), in_float16<Result>(x.y), in_float16<Result>(x.z), in_float16<Result>(x.w)};
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // WGMMA reads them
    named_sync(kMerge + warpgroup, 128);
  }

  CUTE_DEVICE static PipelineState<kSmem.q_stages> q_state(int tile_number) {
    return at_use<kSmem.q_stages>(tile_number);
  }
};

}  // namespace flash_cute::sm90::decode::long_rows
