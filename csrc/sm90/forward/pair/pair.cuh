// Two CTAs that compute a row tile together: which one is which, and the tickets of their tiles.
#pragma once

#include "contract/params.h"
#include "sm90/common/cluster.cuh"
#include "sm90/forward/common/sequence_scheduler.cuh"

namespace flash_cute::sm90::forward::pair {

// Which CTA of its pair this one is.
CUTE_DEVICE int rank_in_pair() { return static_cast<int>(block_rank_in_cluster()); }

// In shared memory.
struct PairTicket {
  int ticket;  // which CTA 0 has drawn for both
  Pipeline<1> pipeline;
};

// Where a pair's tile numbers come from, see common/sequence_scheduler.cuh. CTA 0 draws for both.
struct PairTickets {
  PairTicket& shared;
  int tile_number = 0;

  CUTE_DEVICE int first() const { return blockIdx.x / 2; }
  CUTE_DEVICE int number() const { return gridDim.x / 2; }

  CUTE_DEVICE int draw(FwdParams const& params, int lane) {
    int const phase = tile_number++ & 1;
    int ticket = 0;
    if (lane == 0 && rank_in_pair() == 0) {
      ticket = number() + atomicAdd(params.ticket, 1);
      wait_for_cluster(shared.pipeline.empty[0], phase ^ 1);  // CTA 1 has read the last one
      store_in_cta(address_in_cta(&shared.ticket, 1), ticket);
      arrive_in_cta(address_in_cta(shared.pipeline.full, 1));
    } else if (lane == 0) {
      wait_for_cluster(shared.pipeline.full[0], phase);  // CTA 0 has written it
      ticket = *static_cast<int volatile*>(&shared.ticket);
      arrive_in_cta(address_in_cta(shared.pipeline.empty, 0));
    }
    return __shfl_sync(forward::kAllLanes, ticket, 0);
  }
};

}  // namespace flash_cute::sm90::forward::pair
