// What the two CTAs of a row tile exchange where its columns are divided between them, through DSMEM: their parts of S,
// each a product over half of the columns of Q and K, and the tickets of tiles.
#pragma once

#include <cute/tensor.hpp>

#include "../../core/registers.cuh"
#include "../cluster.cuh"
#include "../fwd/sequence_scheduler.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::fwd_large {

// A CTA's warpgroups send and receive by turns, like the steps, through one buffer in each CTA.
template <class Traits>
struct ScoreExchange {
  typename Traits::SharedStorage& smem;
  int count = 0;  // steps of the tiles before

  // Adds the other CTA's part of S(i), and sends it this one's. A sum of two is the same in either order, so that both
  // CTAs have the same S.
  template <class Accumulator>
  CUTE_DEVICE void add_other_part(int i, Accumulator& tSrS) const {  // (MMA, MMA_M, MMA_N)
    if constexpr (Traits::kCtas > 1) {
      auto& exchange = smem.exchange;
      int const phase = (count + i) & 1, thread = fresh_thread_index() % 128;
      uint32_t const other = cta_rank<Traits>() ^ 1;
      wait_for_cluster(exchange.scores_pipeline.empty[0], phase ^ 1);  // it has read the part of the step before
      if (thread == 0) exchange.scores_pipeline.expect({0, phase}, kScoreBytes);
      uint32_t const place = address_in_cta(exchange.scores + thread, other);
      uint32_t const full = address_in_cta(exchange.scores_pipeline.full, other);
      CUTE_UNROLL
      for (int j = 0; j < size(tSrS); j += 4) {
        store_async(place + j / 4 * 128 * sizeof(float4), {tSrS(j), tSrS(j + 1), tSrS(j + 2), tSrS(j + 3)}, full);
      }
      wait_for_cluster(exchange.scores_pipeline.full[0], phase);  // its four warps have sent their parts
      CUTE_UNROLL
      for (int j = 0; j < size(tSrS); j += 4) {
        float4 const part = exchange.scores[j / 4 * 128 + thread];
        tSrS(j) += part.x;
        tSrS(j + 1) += part.y;
        tSrS(j + 2) += part.z;
        tSrS(j + 3) += part.w;
      }
      __syncwarp();  // all lanes have read
      if (thread % 32 == 0) arrive_in_cta(address_in_cta(exchange.scores_pipeline.empty, other));
    }
  }
};

// CTA 0 draws for both.
template <class Traits>
struct PairTickets {
  typename Traits::SharedStorage& smem;
  int draws = 0;

  CUTE_DEVICE int first() const { return blockIdx.x / 2; }
  CUTE_DEVICE int number() const { return gridDim.x / 2; }

  CUTE_DEVICE int draw(FwdParams const& params, int lane) {
    auto& exchange = smem.exchange;
    int const phase = draws++ & 1;
    int ticket = 0;
    if (lane == 0 && cta_rank<Traits>() == 0) {
      ticket = number() + atomicAdd(params.ticket, 1);
      wait_for_cluster(exchange.ticket_pipeline.empty[0], phase ^ 1);  // CTA 1 has read the last one
      store_in_cta(address_in_cta(&exchange.ticket, 1), ticket);
      arrive_in_cta(address_in_cta(exchange.ticket_pipeline.full, 1));
    } else if (lane == 0) {
      wait_for_cluster(exchange.ticket_pipeline.full[0], phase);  // CTA 0 has written it
      ticket = *static_cast<int volatile*>(&exchange.ticket);
      arrive_in_cta(address_in_cta(exchange.ticket_pipeline.empty, 0));
    }
    return __shfl_sync(fwd::kAllLanes, ticket, 0);
  }
};

template <class Traits>
CUTE_DEVICE auto make_tickets(typename Traits::SharedStorage& smem) {
  if constexpr (Traits::kCtas > 1) {
    return PairTickets<Traits>{smem};
  } else {
    return fwd::CtaTickets{};
  }
}

// By one thread.
CUTE_DEVICE void init_exchange(Exchange<2>& exchange) {
  exchange.scores_pipeline.init(4);
  exchange.ticket_pipeline.init(1);
}

// All threads of the CTAs of a row tile have arrived.
template <class Traits>
CUTE_DEVICE void sync_ctas() {
  if constexpr (Traits::kCtas > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}

}  // namespace flash_cute::sm90::fwd_large
