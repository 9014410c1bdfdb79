// Records what a thread of the kernels that compute addresses themselves does to shared memory: their own functions run
// on the host, with these in place of the instructions. Included before csrc/sm80/streaming/products.cuh.
#pragma once

#include "host.h"

#include <map>
#include <string>
#include <vector>

#include <cute/atom/mma_atom.hpp>

#include "registry.h"

inline void __syncthreads() {}
// Nothing calls what calls these.
void __threadfence();
int atomicAdd(int* address, int value);
template <class T>
T __ldcg(T const* address);

#include "sm80/streaming/shared.cuh"

namespace inspect {

// What the running thread has done since start(), in order.
struct Recorder {
  std::vector<uint32_t> matrices;  // addresses of ldmatrix.x4; its registers get the numbers 4 * call + matrix
  std::vector<int> transposed;     // whether it was ldmatrix.x4.trans
  std::vector<uint32_t> copies;    // targets of cp.async, and what they copy: element offsets, -1: zeros
  std::vector<int64_t> sources;
  std::vector<uint32_t> stores;  // of 4 bytes, and what is stored
  std::vector<uint32_t> values;
  std::vector<uint32_t> vectors;  // loads of 16 bytes, which return their own address
  std::vector<int> products;      // accumulator, 4 registers of A, 2 of B

  uint16_t const* memory = nullptr;  // where the sources' offsets count from
  float const* accumulators = nullptr;
};
inline Recorder recorder;

}  // namespace inspect

namespace flash_cute::sm80::streaming {

inline void record_matrices(uint32_t (&x)[4], uint32_t address, bool transposed = false) {
  for (int i = 0; i < 4; ++i) x[i] = 4 * inspect::recorder.matrices.size() + i;
  inspect::recorder.matrices.push_back(address);
  inspect::recorder.transposed.push_back(transposed);
}
inline void record_matrices_transposed(uint32_t (&x)[4], uint32_t address) { record_matrices(x, address, true); }

inline void record_copy(uint32_t target, void const* source, bool inside) {
  inspect::recorder.copies.push_back(target);
  auto const offset = static_cast<uint16_t const*>(source) - inspect::recorder.memory;
  inspect::recorder.sources.push_back(inside ? offset : -1);
}

inline void record_store(uint32_t address, uint32_t x) {
  inspect::recorder.stores.push_back(address);
  inspect::recorder.values.push_back(x);
}

inline uint4 record_vector(uint32_t address) {
  inspect::recorder.vectors.push_back(address);
  return {address, address, address, address};
}

}  // namespace flash_cute::sm80::streaming

namespace cute {

// The MMA of bfloat16, which notes its registers.
struct RecordedMma : SM80_16x8x16_F32BF16BF16F32_TN {
  static void fma(float& d0, float&, float&, float&, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                  uint32_t b1, float const&, float const&, float const&, float const&) {
    for (int x : {int(&d0 - ::inspect::recorder.accumulators), int(a0), int(a1), int(a2), int(a3), int(b0), int(b1)}) {
      ::inspect::recorder.products.push_back(x);
    }
  }
};
template <>
struct MMA_Traits<RecordedMma> : MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN> {};

}  // namespace cute
