// A polynomial for the softcap where scores are far from the cap, as those of trained models nearly always are. Plain
// constants and data, for host and device.
#pragma once

namespace flash_cute {

// tanh(scale * x) = x (c[0] + c[1] x^2 + c[2] x^4) for |x| <= limit. With the scale in the coefficients, no instruction
// is spent on scale * x.
struct SoftcapPolynomial {
  float limit;  // negative: none
  float c[3];
};

// Minimax for |y| <= 1/2, with y = scale * x: relative error 2.26e-5. (With one coefficient more it would serve up to
// 0.83, with two up to 1.15.) For scales of which a power might leave float32's range there is no polynomial.
constexpr SoftcapPolynomial softcap_polynomial(double scale) {
  constexpr double kLimit = 0.5;
  constexpr double kC[] = {0.9999774098396301, -0.3316915035247803, 0.11520976573228836};
  if (!(scale > 1e-6 && scale < 1e6)) return {.limit = -1.f, .c = {}};
  SoftcapPolynomial result{.limit = static_cast<float>(kLimit / scale), .c = {}};
  double power = scale;
  for (int i = 0; i < 3; ++i) {
    result.c[i] = static_cast<float>(kC[i] * power);
    power *= scale * scale;
  }
  return result;
}

}  // namespace flash_cute
