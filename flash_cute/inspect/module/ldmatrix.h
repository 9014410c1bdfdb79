// Operands of mma.sync, which ldmatrix brings from shared memory.
#pragma once

#include "describe.h"

namespace inspect {

// One operand: where it lies, how ldmatrix takes it and what the MMA wants of it. Partitions are taken of the
// coordinates: an address is the layout's index there.
template <Name kCoord, Name kRegister, Name kFragment, class Copy, class Fragment, class Identity>
auto operand_entries(Copy const& copy, Fragment& fragment, Identity const& identity) {
  return tuple_cat(copy_entry<kCoord>(copy.tidfrg_S(identity)),
                   index_entry<kRegister>(copy.get_slice(0).retile_D(fragment).layout()),  // (CPY, CPY_MN, CPY_K)
                   index_entry<kFragment>(fragment.layout()));                             // (MMA, MMA_MN, MMA_K)
}

// What one ldmatrix moves: 8x8 matrices of 16-bit elements, transposed or not.
template <int kMatrices_, bool kTransposed_>
struct MatricesOf {
  static constexpr int kMatrices = kMatrices_;
  static constexpr int kTransposed = kTransposed_;
};
template <class Op>
struct Matrices;
template <> struct Matrices<SM75_U32x1_LDSM_N> : MatricesOf<1, false> {};
template <> struct Matrices<SM75_U32x2_LDSM_N> : MatricesOf<2, false> {};
template <> struct Matrices<SM75_U32x4_LDSM_N> : MatricesOf<4, false> {};
template <> struct Matrices<SM75_U16x2_LDSM_T> : MatricesOf<1, true> {};
template <> struct Matrices<SM75_U16x4_LDSM_T> : MatricesOf<2, true> {};
template <> struct Matrices<SM75_U16x8_LDSM_T> : MatricesOf<4, true> {};

template <class Atom>
struct MatricesOfAtom;
template <class Op, class Element>
struct MatricesOfAtom<Copy_Atom<Op, Element>> : Matrices<Op> {};

template <class Atom>
void add_matrices(Details& details, std::string const& name) {
  details.facts[name + ".matrices"] = MatricesOfAtom<Atom>::kMatrices;
  details.facts[name + ".transposed"] = MatricesOfAtom<Atom>::kTransposed;
}

}  // namespace inspect
