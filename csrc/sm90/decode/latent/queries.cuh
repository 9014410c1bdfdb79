// The queries of a row tile, in shared memory as WGMMA reads them: chunks of 64 columns, whose rows of 128 bytes have
// their eight vectors permuted by the row index. Rows and columns that do not exist are zeros.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/tensor.hpp>

#include "core/registers.cuh"
#include "core/split_keys/rows.cuh"
#include "traits.cuh"

namespace flash_cute::sm90::decode::latent {

using flash_cute::split_keys::Row;

// By all threads that compute; the caller waits for them.
template <class Element>
CUTE_DEVICE void load_queries(DecodeParams const& params, Unit const& unit, Element* queries) {
  constexpr int kVectors = kChunk / 8, kRowsAtOnce = kConsumers / kVectors;
  int const thread = fresh_thread_index(), vector = thread % kVectors;
#pragma unroll 1
  for (int number = thread / kVectors; number < kRows; number += kRowsAtOnce) {
    Row const row = Row::of(params, unit, number);
    auto const* const q = static_cast<Element const*>(params.q);
    Element const* const source = q + unit.batch * params.q_strides.batch + row.head * params.q_strides.head +
                                  int64_t{unit.sequence.first_row + row.index} * params.q_strides.row;
    Element* const target = queries + number * kChunk + 8 * (vector ^ (number % kVectors));
    CUTE_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      int const column = chunk * kChunk + 8 * vector;
      bool const exists = row.exists && column < params.head_dim;
      Element const* const from = exists ? source + column : q;
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(*reinterpret_cast<uint128_t const*>(from),
                                                       *reinterpret_cast<uint128_t*>(target + chunk * kChunkElements),
                                                       exists);
    }
  }
  cp_async_fence();
  cp_async_wait<0>();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // makes them visible to WGMMA
}

}  // namespace flash_cute::sm90::decode::latent
