// What AVX-512 without BF16 products does: as AVX2 with twice the lanes and twice the registers.
// Unnamed namespace: see numeric.h.
#pragma once
#include "avx512.h"

namespace {

struct Avx512 : Avx512Base {
  using X = float;
  static constexpr int kLanes = 16, kParts = 2;
  // Few tokens: 4 rows, since each activation load then serves 4 sums. More: 2 rows x up to 12 tokens, since a weight is
  // then widened once for 12 sums; widening takes the ports that the products need. Both shapes hold 24 sums.
  static constexpr int kTokens = 12;
  static constexpr int rows_for(int tokens) { return tokens <= 6 ? 4 : 2; }

  // Below, each weight's way through the panel costs more than widening it once for every 12 tokens.
  static constexpr int kPanelTokens = 40;
  static constexpr int kPanelGroup = 6;  // 4 vectors x 6 tokens: 24 sums, 4 weights and 1 activation

  APEXK_INLINE static __m512 part(const bf16 *w, int p) { return widened(_mm512_loadu_si512(w), p); }
  APEXK_INLINE static __m512 part(const fp16 *w, int p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + p * kLanes)));
  }
  APEXK_INLINE static __m512 part(const float *w, int p) { return load_x(w + p * kLanes); }

  // Both parts of the same quarter of 4 rows' chunks.
  APEXK_INLINE static void quarters(const bf16 *a, const bf16 *b, const bf16 *c, const bf16 *d, __m512 (&parts)[kParts]) {
    const __m512i all = joined(a, b, c, d);
    for (int p = 0; p < kParts; p++) parts[p] = widened(all, p);
  }
  APEXK_INLINE static void quarters(const fp16 *a, const fp16 *b, const fp16 *c, const fp16 *d, __m512 (&parts)[kParts]) {
    for (int p = 0; p < kParts; p++) {
      const auto load = [p](const fp16 *row) { return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(row + p * kLanes)); };
      const __m128i low = _mm_unpacklo_epi64(load(a), load(b)), high = _mm_unpacklo_epi64(load(c), load(d));
      parts[p] = _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
    }
  }
  APEXK_INLINE static void quarters(const float *a, const float *b, const float *c, const float *d, __m512 (&parts)[kParts]) {
    for (int p = 0; p < kParts; p++) {
      const int at = p * kLanes;
      parts[p] = _mm512_castsi512_ps(joined(a + at, b + at, c + at, d + at));
    }
  }
  APEXK_INLINE static __m512 load_repeated(const float *x) { return _mm512_broadcast_f32x4(_mm_loadu_ps(x)); }
  APEXK_INLINE static void add_quarters(Acc a, Acc b, Acc c, Acc d, float *sums, bool add) {
    const __m512 all = sums_of_quarters(a, b, c, d);
    _mm512_storeu_ps(sums, add ? _mm512_add_ps(_mm512_loadu_ps(sums), all) : all);
  }

  APEXK_INLINE static __m512 load_x(const float *x) { return _mm512_loadu_ps(x); }
  APEXK_INLINE static void store_x(float *to, __m512 v) { _mm512_storeu_ps(to, v); }
  APEXK_INLINE static Acc fma(__m512 w, __m512 x, Acc sum) { return _mm512_fmadd_ps(w, x, sum); }

 private:
  APEXK_INLINE static __m512 widened(__m512i pairs, int p) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(p == 0 ? _mm512_slli_epi32(pairs, 16) : _mm512_and_si512(pairs, high));
  }
  APEXK_INLINE static __m512i joined(const void *a, const void *b, const void *c, const void *d) {
    const auto load = [](const void *from) { return _mm_loadu_si128(static_cast<const __m128i *>(from)); };
    const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(load(a)), load(b), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(two, load(c), 2), load(d), 3);
  }
};

}  // namespace
