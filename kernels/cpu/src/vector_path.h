// Products of plain weight rows with a group of tokens, for any vector width.
//
// Lanes run along k. A chunk is kChunk elements of a row, in every dtype; widening it gives `kParts` vectors of products'
// operands: of bf16 the even elements, then the odd ones; of fp16 and fp32 the first half, then the second; of native bf16
// products the chunk itself. Activations are packed in the same order, group by group of kTokens tokens:
// [chunk][token][part][lane], zero beyond k. So a group's operands are one forward stream, and tokens never compete for the
// same cache sets as rows at a power-of-two distance do.
//
// Every output is one accumulator vector, fed chunk by chunk and part by part, then added across lanes by one fixed
// tree. All tile shapes share that order, which is why the shape may follow the number of tokens.
//
// Many tokens take panel.h's way, which gives the same bits.
//
// A vector set V has: Acc, X, kLanes, kParts, kChunk (= kLanes * kParts), kTokens (largest group), rows_for(M),
// zero, part(chunk, p) for each dtype that it serves, load_x, store_x, fma, keep, sum4,
// kPanelTokens (0: no panels) and what panel.h needs. Unnamed namespace: see numeric.h.
#pragma once
#include "ffn_steps.h"
#include "panel.h"

namespace {

// Where a tile's weights come from: `part(r, c, p)` is part p of chunk c of row r.
template <class V, class E>
struct WeightRows {
  const E *w;
  int64_t stride;
  APEXK_INLINE auto part(int r, int c, int p) const { return V::part(w + r * stride + c * V::kChunk, p); }
};

// The last chunk of R rows, of which `n` elements are there.
template <class V, class E, int R>
struct LastChunk {
  E rows[R][V::kChunk] = {};
  LastChunk(const E *w, int64_t stride, int n) {
    for (int r = 0; r < R; r++) __builtin_memcpy(rows[r], w + r * stride, n * sizeof(E));
  }
  APEXK_INLINE auto part(int r, int, int p) const { return V::part(rows[r], p); }
};

template <class V, int R, int M, class Rows>
APEXK_INLINE void accumulate(typename V::Acc (&acc)[R][M], const Rows &rows, const typename V::X *x, int c) {
#pragma GCC unroll 2
  for (int p = 0; p < V::kParts; p++) {
    decltype(rows.part(0, 0, 0)) w[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) w[r] = rows.part(r, c, p);
#pragma GCC unroll 16
    for (int j = 0; j < M; j++) {
      auto v = V::load_x(x + (c * M + j) * V::kChunk + p * V::kLanes);
      if (R > 1) V::keep(v);  // one load for R products; without it the compiler loads v again for each
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r][j] = V::fma(w[r], v, acc[r][j]);
    }
  }
}

template <class V, int R, int M>
APEXK_INLINE void store_sums(const typename V::Acc (&acc)[R][M], float *tile) {
  constexpr int kCount = R * M;
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i += 4) {
    const auto at = [&](int n) { return acc[(i + n) % kCount % R][(i + n) % kCount / R]; };
    if constexpr (R == 4) {
      V::sum4(at(0), at(1), at(2), at(3), tile + i / R * kTile);
    } else {
      float sums[4];
      V::sum4(at(0), at(1), at(2), at(3), sums);
      for (int n = 0; n < 4 && i + n < kCount; n++) tile[(i + n) / R * kTile + (i + n) % R] = sums[n];
    }
  }
}

// Weights are widened in registers. Blocks of k keep a group's operands in the first-level cache while the rows pass
// by; the sums wait in `carry` from one block to the next.
template <class V, class E, int R, int M, bool kPrefetch>
void tile_of_rows(const E *w, int64_t stride, int rows, int k, const typename V::X *x, float *tile,
                  typename V::Acc *carry) {
  constexpr int kBlock = 24576 / (M * V::kChunk * static_cast<int>(sizeof(typename V::X)));  // chunks
  const int chunks = k / V::kChunk, tail = k % V::kChunk;
  for (int first = 0; first == 0 || first < chunks; first += kBlock) {
    const int end = least(first + kBlock, chunks);
    for (int r = 0; r < rows; r += R) {
      typename V::Acc acc[R][M], *saved = carry + r * M;
#pragma GCC unroll 32
      for (int i = 0; i < R * M; i++) acc[i % R][i / R] = first == 0 ? V::zero() : saved[i];
      const WeightRows<V, E> now{w + r * stride, stride};
      for (int c = first; c < end; c++) {
        if (kPrefetch) {
#pragma GCC unroll 8
          for (int i = 0; i < R; i++) {
            const E *next = now.w + (R + i) * stride + c * V::kChunk;
            for (int at = 0; at < V::kChunk; at += 64 / static_cast<int>(sizeof(E))) __builtin_prefetch(next + at);
          }
        }
        accumulate<V>(acc, now, x, c);
      }
      if (end < chunks) {
#pragma GCC unroll 32
        for (int i = 0; i < R * M; i++) saved[i] = acc[i % R][i / R];
        continue;
      }
      if (tail) {
        const LastChunk<V, E, R> last(now.w + chunks * V::kChunk, stride, tail);
        accumulate<V>(acc, last, x + chunks * M * V::kChunk, 0);
      }
      store_sums<V>(acc, tile + r);
    }
  }
}

template <class V, class E>
struct VectorPath {
  using Elem = E;
  using X = typename V::X;
  static constexpr bool kPanels = V::kPanelTokens > 0;

  static int padded(int k) { return (k + V::kChunk - 1) / V::kChunk * V::kChunk; }

  static size_t packed_bytes(int tokens, int k) { return static_cast<size_t>(tokens) * padded(k) * sizeof(X); }

  static size_t scratch_bytes(int) {
    constexpr size_t kCarry = sizeof(typename V::Acc) * kTile * V::kTokens;
    if constexpr (kPanels) return kCarry < Panel<V, E>::kScratchBytes ? Panel<V, E>::kScratchBytes : kCarry;
    return kCarry;
  }

  static void pack_chunk(const E *values, int n, X *packed) {
    if (n < V::kChunk) {
      E whole[V::kChunk] = {};
      __builtin_memcpy(whole, values, n * sizeof(E));
      return pack_chunk(whole, V::kChunk, packed);
    }
    for (int p = 0; p < V::kParts; p++) V::store_x(packed + p * V::kLanes, V::part(values, p));
  }

  static void pack_row(const E *values, int n, X *packed, int64_t step) {
    for (; n > 0; n -= V::kChunk, values += V::kChunk, packed += step) pack_chunk(values, least(n, V::kChunk), packed);
  }

  static void put_for_panels(void *packed, int tokens, int k, int token, int at, const E *values, int n) {
    const Groups groups(tokens, V::kPanelGroup);
    const int group = groups.of(token), first = groups.first(group), chunks = padded(k) / V::kChunk;
    float *to = static_cast<float *>(packed) + static_cast<int64_t>(first) * padded(k);
    for (int i = 0; i < n; i += V::kChunk) {
      float chunk[V::kChunk];
      pack_chunk(values + i, least(n - i, V::kChunk), chunk);
      Panel<V, E>::put(to, groups.size(group), token - first, chunks, (at + i) / V::kChunk, chunk);
    }
  }

  static void put(void *packed, int tokens, int k, int token, int at, const E *values, int n) {
    if constexpr (kPanels) {
      if (tokens >= V::kPanelTokens) return put_for_panels(packed, tokens, k, token, at, values, n);
    }
    const Groups groups(tokens, V::kTokens);
    const int group = groups.of(token), first = groups.first(group), size = groups.size(group);
    X *row = static_cast<X *>(packed) + static_cast<int64_t>(first) * padded(k) + (token - first) * V::kChunk;
    pack_row(values, n, row + static_cast<int64_t>(at) * size, static_cast<int64_t>(size) * V::kChunk);
  }

  static void products(const E *w, int64_t stride, int rows, int k, const void *packed, int tokens, float *tile,
                       void *scratch) {
    const X *x = static_cast<const X *>(packed);
    if constexpr (kPanels) {
      if (tokens >= V::kPanelTokens) return Panel<V, E>::products(w, stride, rows, k, x, tokens, tile, scratch);
    }
    const Groups groups(tokens, V::kTokens);
    auto *carry = static_cast<typename V::Acc *>(scratch);
    for (int g = 0; g < groups.count; g++) {
      with_size<V::kTokens>(groups.size(g), [&]<int M>() {
        const int first = groups.first(g);
        constexpr int R = V::rows_for(M);
        const int whole = rows / R * R;
        const X *group = x + static_cast<int64_t>(first) * padded(k);
        float *sums = tile + first * kTile;
        const auto form = g == 0 ? tile_of_rows<V, E, R, M, true> : tile_of_rows<V, E, R, M, false>;
        form(w, stride, whole, k, group, sums, carry);
        tile_of_rows<V, E, 1, M, false>(w + whole * stride, stride, rows - whole, k, group, sums + whole, carry);
      });
    }
  }
};

}  // namespace
