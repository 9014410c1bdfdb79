// Views of MMA register fragments for softmax, masks and the second GEMM. They serve both mma.sync (a thread's C
// fragment is (2, 2)) and WGMMA ((2, 2, N/8)): in both, the first mode runs along columns and the second along rows.
#pragma once

#include <cute/tensor.hpp>

namespace flash_cute {

using namespace cute;

// The registers of an MMA's A or B operand: (M, K) -> (MMA, MMA_M, MMA_K), (N, K) -> (MMA, MMA_N, MMA_K). Made from a
// shape alone, since CuTe derives a fragment's layout only from a tensor without a swizzle; the pointer is not read.
template <class Element, class Mma, class Shape>
CUTE_HOST_DEVICE constexpr auto fragment_a(Mma const& mma, Shape shape) {
  return mma.get_slice(0).partition_fragment_A(make_tensor(static_cast<Element*>(nullptr), make_layout(shape)));
}
template <class Element, class Mma, class Shape>
CUTE_HOST_DEVICE constexpr auto fragment_b(Mma const& mma, Shape shape) {
  return mma.get_slice(0).partition_fragment_B(make_tensor(static_cast<Element*>(nullptr), make_layout(shape)));
}

// (MMA, MMA_M, MMA_N) -> (rows, columns) of the same registers: ((2, MMA_M), (2, [N/8,] MMA_N)).
template <class Layout>
CUTE_HOST_DEVICE constexpr auto rowcol_layout(Layout acc) {
  static_assert(decltype(rank(acc))::value == 3);
  auto const thread = get<0>(acc);
  if constexpr (decltype(rank(thread))::value == 2) {
    return make_layout(make_layout(get<1>(thread), get<1>(acc)), make_layout(get<0>(thread), get<2>(acc)));
  } else {
    return make_layout(make_layout(get<1>(thread), get<1>(acc)),
                       make_layout(get<0>(thread), get<2>(thread), get<2>(acc)));
  }
}

template <class Tensor>
CUTE_HOST_DEVICE constexpr auto rowcol_view(Tensor&& acc) {
  return make_tensor(acc.data(), rowcol_layout(acc.layout()));
}

// The first GEMM's C fragment as the second GEMM's A operand, for m16n8k16: two neighbouring 8-column blocks form one
// k step of 16.
// ((2, 2), MMA_M, MMA_N) -> ((2, 2, 2), MMA_M, MMA_N / 2)
template <class Layout>
CUTE_HOST_DEVICE constexpr auto operand_a_layout(Layout acc) {
  static_assert(decltype(size<0>(acc))::value == 4 && decltype(rank(acc))::value == 3);
  auto const halves = logical_divide(acc, Shape<Underscore, Underscore, _2>{});  // (4, MMA_M, (2, MMA_N / 2))
  return make_layout(make_layout(get<0, 0>(halves), get<0, 1>(halves), get<2, 0>(halves)), get<1>(halves),
                     get<2, 1>(halves));
}

// The same for WGMMA, for one 64-row block: ((2, 2, N / 8), 1, 1) -> ((2, 2, 2), 1, N / 16)
template <class Layout>
CUTE_HOST_DEVICE constexpr auto operand_a_layout_64(Layout acc) {
  static_assert(decltype(size<1>(acc))::value == 1 && decltype(size<2>(acc))::value == 1);
  auto const blocks = logical_divide(get<0, 2>(acc), _2{});  // (2, N / 16)
  return make_layout(make_layout(get<0, 0>(acc), get<0, 1>(acc), get<0>(blocks)), get<1>(acc), get<1>(blocks));
}

}  // namespace flash_cute
