// What the products of a forward are accumulated in. Plain constants: no torch, no CuTe.
#pragma once

namespace flash_cute {

enum class Accumulate {
  kFloat32,    // both
  kFloat16Qk,  // S = Q K^T in float16
  kFloat16Pv,  // O = P V in float16, within a key tile
  kFloat16,    // both in float16
};
constexpr char const* kAccumulateNames[] = {"float32", "float16_qk", "float16_pv", "float16"};

constexpr bool has_float16_qk(Accumulate a) { return a == Accumulate::kFloat16Qk || a == Accumulate::kFloat16; }
constexpr bool has_float16_pv(Accumulate a) { return a == Accumulate::kFloat16Pv || a == Accumulate::kFloat16; }

}  // namespace flash_cute
