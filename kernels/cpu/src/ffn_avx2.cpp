// AVX2, FMA and F16C: bf16 pairs become two fp32 vectors, by a shift (even elements) and a mask (odd ones).
#include <immintrin.h>

#include "vector_path.h"

namespace {

struct Avx2 {
  using Acc = __m256;
  using X = float;
  static constexpr int kLanes = 8, kParts = 2, kChunk = 16;
  // 2 rows x 6 tokens: 12 sums, 2 weights and 1 activation fill 15 of the 16 registers; 4 x 3 spills.
  static constexpr int kTokens = 6;
  static constexpr int kPanelTokens = 0;  // never
  static constexpr int rows_for(int tokens) { return tokens <= 2 ? 4 : 2; }

  APEXK_INLINE static Acc zero() { return _mm256_setzero_ps(); }
  APEXK_INLINE static __m256 part(const bf16 *w, int p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w));
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm256_castsi256_ps(p == 0 ? _mm256_slli_epi32(pairs, 16) : _mm256_and_si256(pairs, high));
  }
  APEXK_INLINE static __m256 part(const fp16 *w, int p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w + p * kLanes)));
  }
  APEXK_INLINE static __m256 part(const float *w, int p) { return load_x(w + p * kLanes); }
  APEXK_INLINE static __m256 load_x(const float *x) { return _mm256_loadu_ps(x); }
  APEXK_INLINE static void store_x(float *to, __m256 v) { _mm256_storeu_ps(to, v); }
  APEXK_INLINE static Acc fma(__m256 w, __m256 x, Acc sum) { return _mm256_fmadd_ps(w, x, sum); }
  APEXK_INLINE static void keep(__m256 &v) { __asm__("" : "+x"(v)); }
  APEXK_INLINE static void sum4(Acc a, Acc b, Acc c, Acc d, float *sums) {
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
  }
};

}  // namespace

namespace apexk {
extern const Kernels kAvx2Bf16, kAvx2Fp16, kAvx2Fp32;
const Kernels kAvx2Bf16 = Steps<VectorPath<Avx2, bf16>>::kernels;
const Kernels kAvx2Fp16 = Steps<VectorPath<Avx2, fp16>>::kernels;
const Kernels kAvx2Fp32 = Steps<VectorPath<Avx2, float>>::kernels;
}  // namespace apexk
