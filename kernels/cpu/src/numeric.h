// Number formats and exp, the same arithmetic in every implementation.
//
// Everything is in an unnamed namespace on purpose: each source file compiles its own copy with its own flags, and the
// linker can never keep an AVX-512 copy for a file that must run without it. For the same reason no library header with
// inline functions is included here. Loops over these functions are plain so that the compiler can vectorise them.
#pragma once
#include <stdint.h>

#define APEXK_INLINE inline __attribute__((always_inline))

namespace {

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

struct bf16 { uint16_t v; };
struct fp16 { uint16_t v; };

inline float to_float(float f) { return f; }

inline float to_float(bf16 h) { return bits<float>(static_cast<uint32_t>(h.v) << 16); }

inline float to_float(fp16 h) {
  constexpr uint32_t kExponent = 0x7c00u << 13;
  uint32_t u = (h.v & 0x7fffu) << 13;
  const uint32_t exponent = u & kExponent;
  u += (127u - 15u) << 23;
  if (exponent == kExponent) u += (128u - 16u) << 23;  // infinity or NaN
  float f = bits<float>(u);
  if (exponent == 0) f = bits<float>(u + (1u << 23)) - bits<float>(113u << 23);  // a denormal becomes normal
  return bits<float>(bits<uint32_t>(f) | (h.v & 0x8000u) << 16);
}

// Nearest, ties to even; NaN stays NaN.
template <class To> inline To from_float(float f);

template <> inline float from_float<float>(float f) { return f; }

template <> inline bf16 from_float<bf16>(float f) {
  const uint32_t u = bits<uint32_t>(f);
  const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  const uint32_t nan = u >> 16 | 0x40u;
  return {static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

template <> inline fp16 from_float<fp16>(float f) {
  constexpr uint32_t kDenormalMagic = (127u - 15u + 23u - 10u + 1u) << 23;
  const uint32_t u = bits<uint32_t>(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  uint32_t h;
  if (a >= (127u + 16u) << 23) {
    h = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (a < 113u << 23) {
    h = bits<uint32_t>(bits<float>(a) + bits<float>(kDenormalMagic)) - kDenormalMagic;  // the addition rounds
  } else {
    h = (a + ((15u - 127u) << 23) + 0xfffu + (a >> 13 & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(h | sign)};
}

// exp by a polynomial of degree 6 on [-ln2/2, ln2/2] (Cephes' coefficients), about 2 ulp, no table and no branch.
inline float exp_approx(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * bits<float>((bits<uint32_t>(shifted) - bits<uint32_t>(kRound) + 127u) << 23);
}

}  // namespace
