// The instruction of GEMMs on every chip from Ampere on: mma.sync m16n8k16 with a float32 accumulator.
#pragma once

#include <type_traits>

#include <cute/arch/mma_sm80.hpp>
#include <cutlass/numeric_types.h>

namespace flash_cute {

template <class Element>
using MmaAtom = std::conditional_t<std::is_same_v<Element, cutlass::half_t>, cute::SM80_16x8x16_F32F16F16F32_TN,
                                   cute::SM80_16x8x16_F32BF16BF16F32_TN>;

}  // namespace flash_cute
