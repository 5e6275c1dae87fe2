// The AVX-512 intrinsics that the kernels use, for machines and tests without them: include after <immintrin.h>.
//
// 64-byte vectors are the compiler's own, which it splits into what the machine has. Each function follows the operation
// section of Intel's manual; dpbf16_ps with its order (odd element first, each product fused into the sum) and with
// denormals flushed on the way in and out, rounding to nearest whatever MXCSR says. Compile with -ffp-contract=off.
// The functions stay out of line: inlined into unrolled tiles they take minutes to compile.
#ifndef APEXK_AVX512_EMULATION_H
#define APEXK_AVX512_EMULATION_H
#include <stdint.h>
#include <string.h>

#define AVX512E_FUNCTION __attribute__((noinline, unused))

namespace {
namespace avx512e {

typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));

AVX512E_FUNCTION __m512i load(const void *p) { __m512i v; memcpy(&v, p, 64); return v; }

AVX512E_FUNCTION __m512 fma(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}

// Element i of each 128-bit lane comes from a (i < 2) or b, at the position that two bits of `select` give.
AVX512E_FUNCTION __m512 shuffle(__m512 a, __m512 b, int select) {
  __m512 r;
  for (int i = 0; i < 16; i++) {
    const int from = i / 4 * 4 + (select >> (i % 4 * 2) & 3);
    r[i] = i % 4 < 2 ? a[from] : b[from];
  }
  return r;
}

AVX512E_FUNCTION __m512 unpack(__m512 a, __m512 b, int from) {
  __m512 r;
  for (int i = 0; i < 16; i++) {
    const int at = i / 4 * 4 + from + i % 4 / 2;
    r[i] = i % 2 ? b[at] : a[at];
  }
  return r;
}

AVX512E_FUNCTION __m256 half(__m512 a, int upper) {
  __m256 r;
  memcpy(&r, reinterpret_cast<const char *>(&a) + 32 * upper, 32);
  return r;
}

AVX512E_FUNCTION __m512i insert(__m512i a, __m128i quarter, int at) {
  memcpy(reinterpret_cast<char *>(&a) + 16 * at, &quarter, 16);
  return a;
}

AVX512E_FUNCTION __m512 widen_halves(__m256i halves) {
  __m512 r;
  for (int i = 0; i < 2; i++) {
    const __m256 eight = _mm256_cvtph_ps(i == 0 ? _mm256_castsi256_si128(halves) : _mm256_extracti128_si256(halves, 1));
    memcpy(reinterpret_cast<char *>(&r) + 32 * i, &eight, 32);
  }
  return r;
}

AVX512E_FUNCTION __m512 repeat(__m128 quarter) {
  __m512 r;
  for (int i = 0; i < 16; i++) r[i] = quarter[i % 4];
  return r;
}

inline float flushed(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7f800000u) == 0) u &= 0x80000000u;
  memcpy(&x, &u, 4);
  return x;
}

inline float widened(uint16_t h) {
  const uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  memcpy(&f, &u, 4);
  return flushed(f);
}

AVX512E_FUNCTION __m512 dpbf16(__m512 sum, __m512i a, __m512i b) {
  uint16_t x[32], y[32];
  memcpy(x, &a, 64);
  memcpy(y, &b, 64);
  for (int i = 0; i < 16; i++) {
    for (int odd = 1; odd >= 0; odd--) {
      sum[i] = flushed(__builtin_fmaf(widened(x[2 * i + odd]), widened(y[2 * i + odd]), flushed(sum[i])));
    }
  }
  return sum;
}

}  // namespace avx512e
}  // namespace

#define _mm512_setzero_ps() (__m512{})
#define _mm512_set1_epi32(x) (__m512i)(avx512e::i32x16{} + (x))
#define _mm512_loadu_si512(p) avx512e::load(p)
#define _mm512_loadu_ps(p) (__m512)avx512e::load(p)
#define _mm512_storeu_ps(p, v) (void)(*reinterpret_cast<__m512_u *>(p) = (v))
#define _mm512_storeu_si512(p, v) (void)(*reinterpret_cast<__m512i_u *>(p) = (v))
#define _mm512_castsi512_ps(v) (__m512)(v)
#define _mm512_castps512_ps256(v) avx512e::half(v, 0)
#define _mm512_extractf32x8_ps(v, upper) avx512e::half(v, upper)
#define _mm512_castsi128_si512(v) avx512e::insert(__m512i{}, v, 0)
#define _mm512_inserti32x4(a, quarter, at) avx512e::insert(a, quarter, at)
#define _mm512_cvtph_ps(halves) avx512e::widen_halves(halves)
#define _mm512_broadcast_f32x4(quarter) avx512e::repeat(quarter)
#define _mm512_slli_epi32(v, n) (__m512i)((avx512e::u32x16)(v) << (n))
#define _mm512_and_si512(a, b) ((a) & (b))
#define _mm512_add_ps(a, b) ((a) + (b))
#define _mm512_fmadd_ps(a, b, c) avx512e::fma(a, b, c)
#define _mm512_unpacklo_ps(a, b) avx512e::unpack(a, b, 0)
#define _mm512_unpackhi_ps(a, b) avx512e::unpack(a, b, 2)
#define _mm512_shuffle_ps(a, b, select) avx512e::shuffle(a, b, select)
#define _mm512_dpbf16_ps(sum, a, b) avx512e::dpbf16(sum, (__m512i)(a), (__m512i)(b))
#endif
