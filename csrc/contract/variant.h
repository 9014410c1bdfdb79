// The kinds of a kernel at one tile. Plain constants: no torch, no CuTe.
#pragma once

namespace flash_cute {

struct Variant {
  bool reads_sequences;  // the sequences of a batch are read at run time, packed or dense; else the batch is dense
  bool modifies_scores;  // softcap, ALiBi
  bool reads_mask = false;  // FwdParams::mask; the batch is dense then

  static Variant const kDense, kPacked, kModified, kDenseModified, kMasked, kMaskedModified;

  friend constexpr bool operator==(Variant const&, Variant const&) = default;
};
constexpr Variant Variant::kDense = {.reads_sequences = false, .modifies_scores = false};
constexpr Variant Variant::kPacked = {.reads_sequences = true, .modifies_scores = false};
constexpr Variant Variant::kModified = {.reads_sequences = true, .modifies_scores = true};
constexpr Variant Variant::kDenseModified = {.reads_sequences = false, .modifies_scores = true};
constexpr Variant Variant::kMasked = {.reads_sequences = false, .modifies_scores = false, .reads_mask = true};
constexpr Variant Variant::kMaskedModified = {.reads_sequences = false, .modifies_scores = true, .reads_mask = true};

// The columns of v and out. Dense kernels take those of q and k: one predicate less per load.
template <class Traits, class Params>
constexpr int value_columns(Params const& params) {
  constexpr bool kSame = Traits::kVariant == Variant::kDense && Traits::kHeadDimV == Traits::kHeadDim;
  return kSame ? params.head_dim : params.head_dim_v;
}

}  // namespace flash_cute
