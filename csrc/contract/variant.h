// The kinds of a kernel at one tile. Plain constants: no torch, no CuTe.
#pragma once

namespace flash_cute {

enum class Variant {
  kDense,          // dense batches, plain scores, v with the head dim of q
  kPacked,         // the sequences of a batch are read at run time: packed or dense; plain scores
  kModified,       // the same with modified scores: softcap, ALiBi
  kDenseModified,  // dense batches, modified scores: sm90 backward
};

constexpr bool reads_sequences(Variant variant) {
  return variant == Variant::kPacked || variant == Variant::kModified;
}
constexpr bool modifies_scores(Variant variant) {
  return variant == Variant::kModified || variant == Variant::kDenseModified;
}

// The columns of v and out. Dense kernels take those of q and k: one predicate less per load.
template <class Traits, class Params>
constexpr int value_columns(Params const& params) {
  constexpr bool kSame = Traits::kVariant == Variant::kDense && Traits::kHeadDimV == Traits::kHeadDim;
  return kSame ? params.head_dim : params.head_dim_v;
}

}  // namespace flash_cute
