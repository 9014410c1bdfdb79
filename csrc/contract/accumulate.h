// What the products of a forward are accumulated in. Plain constants: no torch, no CuTe.
#pragma once

namespace flash_cute {

enum class AccumulateIn {
  kFloat32,    // both
  kFloat16Qk,  // S = Q K^T in float16
  kFloat16Pv,  // O = P V in float16, within a key tile
  kFloat16,    // both in float16
};
constexpr char const* kAccumulateNames[] = {"float32", "float16_qk", "float16_pv", "float16"};

constexpr bool has_float16_qk(AccumulateIn a) { return a == AccumulateIn::kFloat16Qk || a == AccumulateIn::kFloat16; }
constexpr bool has_float16_pv(AccumulateIn a) { return a == AccumulateIn::kFloat16Pv || a == AccumulateIn::kFloat16; }

}  // namespace flash_cute
