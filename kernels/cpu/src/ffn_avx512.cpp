// AVX-512: as AVX2 with twice the lanes and twice the registers.
#include <immintrin.h>

#include "vector_path.h"

namespace {

struct Avx512 {
  using Acc = __m512;
  using X = float;
  using Raw = __m512i;
  static constexpr int kLanes = 16, kParts = 2, kChunk = 32;
  // Few tokens: 4 rows, since each activation load then serves 4 sums. More: 2 rows x up to 12 tokens, since a weight is
  // then widened once for 12 sums; widening takes the ports that the products need. Both shapes hold 24 sums.
  static constexpr int kTokens = 12;
  static constexpr int rows_for(int tokens) { return tokens <= 6 ? 4 : 2; }

  APEXK_INLINE static Acc zero() { return _mm512_setzero_ps(); }
  APEXK_INLINE static Raw load(const bf16 *w) { return _mm512_loadu_si512(w); }
  APEXK_INLINE static Raw load_tail(const bf16 *w, int n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1u), w);
  }
  APEXK_INLINE static __m512 part(Raw raw, int p) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(p == 0 ? _mm512_slli_epi32(raw, 16) : _mm512_and_si512(raw, high));
  }
  APEXK_INLINE static __m512 load_x(const float *x) { return _mm512_loadu_ps(x); }
  APEXK_INLINE static Acc fma(__m512 w, __m512 x, Acc sum) { return _mm512_fmadd_ps(w, x, sum); }
  APEXK_INLINE static void keep(__m512 &v) { __asm__("" : "+v"(v)); }
  // Transposes within 128-bit lanes while adding, then folds the four lanes.
  APEXK_INLINE static void sum4(Acc a, Acc b, Acc c, Acc d, float *sums) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  APEXK_INLINE static void pack_bf16(const bf16 *values, int n, float *packed) {
    const Raw raw = n == kChunk ? load(values) : load_tail(values, n);
    _mm512_storeu_ps(packed, part(raw, 0));
    _mm512_storeu_ps(packed + kLanes, part(raw, 1));
  }
};

}  // namespace

namespace apexk {
extern const Kernels kAvx512Bf16, kAvx512Fp16, kAvx512Fp32;
const Kernels kAvx512Bf16 = Steps<VectorPath<Avx512, bf16>>::kernels;
const Kernels kAvx512Fp16 = Steps<VectorPath<Avx512, fp16>>::kernels;
const Kernels kAvx512Fp32 = Steps<VectorPath<Avx512, float>>::kernels;
}  // namespace apexk
