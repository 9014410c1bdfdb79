// Copies to shared memory by cp.async, to where TMA would write: of rows whose pages are too small for its boxes.
#pragma once

#include <cute/arch/util.hpp>
#include <cute/config.hpp>

#include "contract/decode.h"
#include "sm90/common/pipeline.cuh"

namespace flash_cute::sm90::decode {

constexpr int kVectorBytes = 16;

// Where TMA's swizzle puts a vector of a row of so many vectors: 128 bytes, or 64. For two rows without a common bit,
// the place in their sum is the place in the one, swizzled by the other: so a lane computes its first place alone.
template <int kVectors>
CUTE_DEVICE constexpr int swizzled(int row, int vector) {
  static_assert(kVectors == 8 || kVectors == 4);
  return vector ^ (kVectors == 8 ? row % 8 : row / 2 % 4);
}

// The address of a row of a page; 0: the page does not exist. A number, since nothing may be added to a null pointer.
template <class Cache>
CUTE_DEVICE uint64_t address_of_row(void const* cache, CacheStrides const& strides, int pages, int head, int page,
                                    int row) {
  if (unsigned(page) >= unsigned(pages)) return 0;
  return reinterpret_cast<uint64_t>(static_cast<Cache const*>(cache) + page * strides.page + head * strides.head +
                                    row * strides.row);
}

// A vector that does not exist becomes zeros, and nothing is read.
CUTE_DEVICE void copy_vector(uint32_t to, uint64_t from, bool exists) {
  int const bytes = exists ? kVectorBytes : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

constexpr int kCopyArrivals = 32;  // of a warp that copies, at the barrier of what it copied

// The thread's arrival, when its copies are there. The form without .noinc, which raises the count first, is right too,
// but synccheck of CUDA 13.0 takes it for one arrival too many.
CUTE_DEVICE void arrive_with_copies(uint64_t& barrier) {
  jitter();
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cute::cast_smem_ptr_to_uint(&barrier))
               : "memory");
}

}  // namespace flash_cute::sm90::decode
