// Operands of mma.sync m16n8k16 from shared memory: blocks of 64 columns, see block_offset.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/tensor.hpp>

#include "load.cuh"
#include "core/mma_atom.cuh"

namespace flash_cute::sm80::decode::streamed {

// `lane`: of the thread in its warp. `row`: a multiple of 8.

// 16 rows and the columns of vectors `vector` and `vector + 1` of a block, as the left operand: matrices down the rows,
// then along them.
template <class Element>
CUTE_DEVICE void load_left(uint32_t (&a)[4], Element const* block, int row, int vector, unsigned lane) {
  Element const* const source = block + block_offset(row + lane % 16, vector + lane / 16);
  SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(source), a[0], a[1], a[2], a[3]);
}

// The right operands of two products over those columns, of 8 rows each: matrices along the rows, then down them.
template <class Element>
CUTE_DEVICE void load_right(uint32_t (&b)[4], Element const* block, int row, int vector, unsigned lane) {
  Element const* const source = block + block_offset(row + lane / 16 * 8 + lane % 8, vector + lane / 8 % 2);
  SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(source), b[0], b[1], b[2], b[3]);
}

// The right operands of two products over 16 rows, of the columns of a vector each: matrices down the rows, then along
// them.
template <class Element>
CUTE_DEVICE void load_right_transposed(uint32_t (&b)[4], Element const* block, int row, int vector, unsigned lane) {
  Element const* const source = block + block_offset(row + lane % 16, vector + lane / 16);
  SM75_U16x8_LDSM_T::copy(*reinterpret_cast<uint128_t const*>(source), b[0], b[1], b[2], b[3]);
}

template <class Element, class Acc>
CUTE_DEVICE void multiply(Acc&& acc,  // (4)
                          uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  MmaAtom<Element>::fma(acc(0), acc(1), acc(2), acc(3), a[0], a[1], a[2], a[3], b0, b1, acc(0), acc(1), acc(2), acc(3));
}

}  // namespace flash_cute::sm80::decode::streamed
