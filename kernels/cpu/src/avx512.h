// What the AVX-512 paths share: real intrinsics, or emulated ones in a test build, and the sum across lanes.
// Unnamed namespace: see numeric.h.
#pragma once
#include <immintrin.h>
#ifdef APEXK_EMULATE
#include "../tests/avx512_emulation.h"
#endif

#include "vector_path.h"

namespace {

struct Avx512Base {
  using Acc = __m512;
  static constexpr int kChunk = 32;

  APEXK_INLINE static Acc zero() { return _mm512_setzero_ps(); }
  template <class Vector>
  APEXK_INLINE static void keep([[maybe_unused]] Vector &v) {
#ifndef APEXK_EMULATE
    __asm__("" : "+v"(v));
#endif
  }
  // Transposes within the four quarters while adding: quarter q of the result has its sums of a, b, c and d.
  APEXK_INLINE static Acc sums_of_quarters(Acc a, Acc b, Acc c, Acc d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
  // Then adds up the quarters, one after the other.
  APEXK_INLINE static void sum4(Acc a, Acc b, Acc c, Acc d, float *sums) {
    const __m512 all = sums_of_quarters(a, b, c, d);
    const __m256 lower = _mm512_castps512_ps256(all), upper = _mm512_extractf32x8_ps(all, 1);
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(lower), _mm256_extractf128_ps(lower, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm_add_ps(half, _mm256_castps256_ps128(upper)), _mm256_extractf128_ps(upper, 1)));
  }
};

}  // namespace
