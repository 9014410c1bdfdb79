// A polynomial for the softcap where scores are far from the cap, as those of trained models nearly always are. Plain
// constants and data, for host and device.
#pragma once

#include <bit>
#include <cfloat>

namespace flash_cute {

// tanh(scale * x) = x (c[0] + c[1] x^2 + c[2] x^4) for |x| <= limit. With the scale in the coefficients, no instruction
// is spent on scale * x.
struct SoftcapPolynomial {
  float limit;  // negative: none
  float c[3];
  float c_log2[3];  // the same of the exponent of 2: times the cap and log2(e)
  float floor;      // a row whose maximum in use is at least this, as an exponent of 2, may have scores below -limit

  // Of the backward, for scores near 0: with w = min(near_square x^2, 1) the exponent of 2 is x (near_log2[0] +
  // near_log2[1] w), and the capped score's derivative by the score 1 - w, see kNearTanh.
  float near_square;
  float near_log2[2];
};

// Minimax for |y| <= 0.23: tanh(y) = y (c[0] + c[1] y^2), relative error 4.6e-5, and so at most 1.03e-5, where the
// polynomial of |y| <= 1/2 has up to 1.04e-5; and 1 - tanh(y)^2 = 1 - kNearSquare y^2, error 3.1e-4 at most and 1.2e-5
// for |y| = 1/50. That w is at most 1 keeps scores below -0.23 there: the exponent of y = -1, -2/3, goes on linearly.
constexpr double kNearTanh = 0.22602;  // tanh(0.23), rounded down
constexpr double kNearSquare = 0.97156;
constexpr double kNearC[] = {0.999954426, -0.326412979};

// The least maximum of a row, as an exponent of 2, from which the polynomial serves scores x < -limit of that row, too.
// `cap_log2`: the cap times log2(e). With y = scale * |x| > 1/2 the polynomial is above tanh(y), but for its error near
// 1/2, and grows with y. So the score's term of the row's sum, 2^(-cap_log2 tanh y), comes out too small, by E, which
// is less than the term itself, and that less than 2^(-0.462 cap_log2), for tanh(1/2) > 0.462. Where cap_log2 is in
// [28, 145], E is less than 2^(-0.462 cap_log2 - 9): the terms just past the limit, where the polynomial is nearly
// right, are the large ones. The row's maximum has a term of at least 2^floor, so that `keys` times E is at most 2^-14
// of the row's sum, 6.1e-5.
constexpr float softcap_floor(double cap_log2, int keys) {
  double const error_log2 = -0.462 * cap_log2 - (cap_log2 >= 28 && cap_log2 <= 145 ? 9 : 0);
  return static_cast<float>(14 + std::bit_width(static_cast<unsigned>(keys)) + error_log2);
}

// Minimax for |y| <= 1/2, with y = scale * x: relative error 2.26e-5. (With one coefficient more it would serve up to
// 0.83, with two up to 1.15.) Where a coefficient might leave float32's range there is no polynomial.
constexpr SoftcapPolynomial softcap_polynomial(double scale, double cap_log2, int keys) {
  constexpr double kLimit = 0.5;
  constexpr double kC[] = {0.9999774098396301, -0.3316915035247803, 0.11520976573228836};
  bool const in_range = scale > 1e-6 && scale < 1e6 && cap_log2 < 1e6;
  if (!in_range) return {.limit = -1.f, .c = {}, .c_log2 = {}, .floor = FLT_MAX, .near_square = 0, .near_log2 = {}};
  SoftcapPolynomial result{.limit = static_cast<float>(kLimit / scale),
                           .c = {},
                           .c_log2 = {},
                           .floor = softcap_floor(cap_log2, keys),
                           .near_square = static_cast<float>(kNearSquare * scale * scale),
                           .near_log2 = {static_cast<float>(kNearC[0] * scale * cap_log2),
                                         static_cast<float>(kNearC[1] / kNearSquare * scale * cap_log2)}};
  double power = scale;
  for (int i = 0; i < 3; ++i) {
    result.c[i] = static_cast<float>(kC[i] * power);
    result.c_log2[i] = static_cast<float>(kC[i] * power * cap_log2);
    power *= scale * scale;
  }
  return result;
}

}  // namespace flash_cute
