// The policies of a kernel as types. A policy is a type only when it changes the inner loop.
#pragma once

namespace flash_cute {

struct FullMask;    // every row sees every key
struct CausalMask;  // row i sees columns j <= i + FwdParams::diagonal

template <class Mask_>
struct Variant {
  using Mask = Mask_;
};

}  // namespace flash_cute
