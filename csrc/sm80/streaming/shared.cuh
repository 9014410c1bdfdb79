// Tiles in shared memory by address: rows of 64 elements (128 bytes), whose eight 16-byte vectors are permuted by the
// row index (row r has vector v at v ^ (r % 8)), so that the eight rows of a matrix that ldmatrix reads lie in
// different banks. Addresses are 32-bit and computed once per thread: neither a stage nor a 16-column step changes the
// permutation of a thread's row, so that a step is one exclusive or.
#pragma once

#include <cstdint>

#include <cute/tensor.hpp>

namespace flash_cute::sm80::streaming {

using namespace cute;

constexpr int kRowBytes = 128;

CUTE_HOST_DEVICE constexpr uint32_t vector_offset(int row, int vector) {
  return row * kRowBytes + ((vector ^ (row & 7)) << 4);
}

// The address of a thread's vector 2 * step more columns on; `address` has those of step 0, and a row begins at a
// multiple of kRowBytes.
CUTE_DEVICE uint32_t at_step(uint32_t address, int step) { return address ^ (step << 5); }

// Starts the copy of a vector; `inside` false: zeros, and nothing is read.
CUTE_DEVICE void copy_async(uint32_t target, void const* source, bool inside) {
  int const bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}

// Four 8x8 matrices of 16-bit elements, each register one; lane l has the address of row l % 8 of matrix l / 8.
CUTE_DEVICE void load_matrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
CUTE_DEVICE void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

CUTE_DEVICE void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
CUTE_DEVICE uint4 load_shared_vector(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

}  // namespace flash_cute::sm80::streaming
