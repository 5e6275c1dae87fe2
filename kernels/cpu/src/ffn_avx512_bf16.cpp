// AVX-512 BF16: vdpbf16ps multiplies pairs of bf16 along k as they lie in the rows, so nothing is widened.
// It flushes denormals; the paths that widen do not.
#include "avx512.h"

namespace {

#ifdef APEXK_EMULATE
using Pairs = __m512i;
#else
using Pairs = __m512bh;
#endif

struct Avx512Bf16 : Avx512Base {
  using X = bf16;
  static constexpr int kLanes = 32, kParts = 1;
  static constexpr int kTokens = 6;  // 4 rows x 6 tokens: 24 sums, 4 weights and 1 activation fill 29 of 32 registers
  static constexpr int kPanelTokens = 0;  // never
  static constexpr int rows_for(int) { return 4; }

  APEXK_INLINE static Pairs part(const bf16 *w, int) { return (Pairs)_mm512_loadu_si512(w); }
  APEXK_INLINE static Pairs load_x(const bf16 *x) { return part(x, 0); }
  APEXK_INLINE static void store_x(bf16 *to, Pairs v) { _mm512_storeu_si512(to, (__m512i)v); }
  APEXK_INLINE static Acc fma(Pairs w, Pairs x, Acc sum) { return _mm512_dpbf16_ps(sum, w, x); }
};

}  // namespace

namespace apexk {
extern const Kernels kAvx512PairsBf16;
const Kernels kAvx512PairsBf16 = Steps<VectorPath<Avx512Bf16, bf16>>::kernels;
}  // namespace apexk
