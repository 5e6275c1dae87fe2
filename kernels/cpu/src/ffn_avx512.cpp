// AVX-512 without BF16 products: as AVX2 with twice the lanes and twice the registers.
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
  static constexpr int kPanelTokens = 48;
  static constexpr int kPanelGroup = 6;  // 4 vectors x 6 tokens: 24 sums, 4 weights and 1 activation

  APEXK_INLINE static Raw load_quarters(const bf16 *const (&row)[4], int at) {
    const auto quarter = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(row[i] + at)); };
    const Raw two = _mm512_inserti32x4(_mm512_castsi128_si512(quarter(0)), quarter(1), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(two, quarter(2), 2), quarter(3), 3);
  }
  APEXK_INLINE static void store_x(float *to, __m512 v) { _mm512_storeu_ps(to, v); }
  APEXK_INLINE static __m512 load_repeated(const float *x) { return _mm512_broadcast_f32x4(_mm_loadu_ps(x)); }
  APEXK_INLINE static void add_quarters(Acc a, Acc b, Acc c, Acc d, float *sums, bool add) {
    const __m512 all = quarters(a, b, c, d);
    _mm512_storeu_ps(sums, add ? _mm512_add_ps(_mm512_loadu_ps(sums), all) : all);
  }

  APEXK_INLINE static __m512 part(Raw raw, int p) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(p == 0 ? _mm512_slli_epi32(raw, 16) : _mm512_and_si512(raw, high));
  }
  APEXK_INLINE static __m512 load_x(const float *x) { return _mm512_loadu_ps(x); }
  APEXK_INLINE static Acc fma(__m512 w, __m512 x, Acc sum) { return _mm512_fmadd_ps(w, x, sum); }
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
