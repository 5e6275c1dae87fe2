// Products of many tokens: weights are widened once for all of them, into a panel that stays in the first-level cache.
//
// A vector of the panel holds one quarter, 4 of the 16 lanes along k, of 4 rows. So a product with it takes 16 bytes of a
// token, repeated, and the sums of 4 vectors become those of 16 rows with few shuffles. Quarter by quarter, 16 rows x 6 tokens
// pass over k: each lane adds up what it does in vector_path.h, in the same order, and the bits are the same.
//
// Activations are packed as they are read: group by group of kPanelGroup tokens, [quarter][chunk][part][token][4 lanes].
//
// A vector set V has for this: kPanelTokens (a unit of so many takes this way), kPanelGroup, quarters, load_repeated,
// add_quarters. Unnamed namespace: see numeric.h.
#pragma once
#include "groups.h"
#include "kernels.h"
#include "numeric.h"

namespace {

template <class V, class E>
struct Panel {
  using Acc = typename V::Acc;
  static constexpr int kQuarters = V::kLanes / 4, kVectors = 4, kRows = kVectors * kQuarters;
  static constexpr int kChunks = 32;                  // of k in a panel: 16 KiB
  static constexpr int kStep = kVectors * V::kLanes;  // floats
  static constexpr int kQuarterStep = __is_same(E, bf16) ? 4 * V::kParts : 4;  // from a quarter to the next within a chunk
  static constexpr size_t kCarryBytes = sizeof(Acc) * kVectors * apexk::kUnitTokens;
  static constexpr size_t kScratchBytes = kCarryBytes + sizeof(float) * kStep * V::kParts * kChunks;

  // Where quarter q of the group's chunk begins. A quarter of a token's chunk is kParts times 4 floats.
  static int64_t place(int q, int chunks, int chunk, int size) {
    return (static_cast<int64_t>(q) * chunks + chunk) * V::kParts * 4 * size;
  }

  // One chunk of one token, [part][lane].
  static void put(float *group, int size, int token, int chunks, int chunk, const float *values) {
    for (int q = 0; q < kQuarters; q++) {
      float *to = group + place(q, chunks, chunk, size) + 4 * token;
      for (int p = 0; p < V::kParts; p++) __builtin_memcpy(to + p * 4 * size, values + p * V::kLanes + 4 * q, 16);
    }
  }

  // Row `kVectors * i + r` is quarter i of vector r: so the sums come out in the order of the rows. The last row stands in
  // for those that are not there; their sums are not used. `w` begins with the panel's first chunk, and `left` elements of
  // the row with it. Vector by vector: few streams at a time, since rows tend to lie at a power-of-two distance.
  static void fill(const E *w, int64_t stride, int rows, int left, int q, int chunks, float *panel) {
    const int whole = least(chunks, left / V::kChunk), tail = left - whole * V::kChunk;
    for (int r = 0; r < kVectors; r++) {
      const E *row[kQuarters];
      for (int i = 0; i < kQuarters; i++) row[i] = w + least(kVectors * i + r, rows - 1) * stride;
      float *to = panel + r * V::kLanes;
      const auto store = [&](int at) {
        at += q * kQuarterStep;
        Acc parts[V::kParts];
        V::quarters(row[0] + at, row[1] + at, row[2] + at, row[3] + at, parts);
        for (int p = 0; p < V::kParts; p++, to += kStep) V::store_x(to, parts[p]);
      };
      for (int c = 0; c < whole; c++) store(c * V::kChunk);
      if (whole < chunks) {
        E last[kQuarters][V::kChunk] = {};
        for (int i = 0; i < kQuarters; i++) {
          __builtin_memcpy(last[i], row[i] + whole * V::kChunk, tail * sizeof(E));
          row[i] = last[i];
        }
        store(0);
      }
    }
  }

  // Sums begin with `carry` unless this is the first panel of the quarter, and end there unless it is the last one.
  template <int M>
  static void multiply(const float *panel, const float *x, int steps, bool first, bool last, Acc *carry, float *tile, bool add) {
    Acc acc[kVectors][M];
#pragma GCC unroll 32
    for (int i = 0; i < kVectors * M; i++) acc[i % kVectors][i / kVectors] = first ? V::zero() : carry[i];
#pragma GCC unroll 2
    for (int s = 0; s < steps; s++, panel += kStep, x += 4 * M) {
      Acc w[kVectors];
#pragma GCC unroll 4
      for (int r = 0; r < kVectors; r++) {
        w[r] = V::load_x(panel + r * V::kLanes);
        V::keep(w[r]);
      }
#pragma GCC unroll 8
      for (int j = 0; j < M; j++) {
        Acc v = V::load_repeated(x + 4 * j);
        V::keep(v);
#pragma GCC unroll 4
        for (int r = 0; r < kVectors; r++) acc[r][j] = V::fma(w[r], v, acc[r][j]);
      }
    }
    if (last) {
#pragma GCC unroll 8
      for (int j = 0; j < M; j++) V::add_quarters(acc[0][j], acc[1][j], acc[2][j], acc[3][j], tile + j * kTile, add);
      return;
    }
#pragma GCC unroll 32
    for (int i = 0; i < kVectors * M; i++) carry[i] = acc[i % kVectors][i / kVectors];
  }

  static void products(const E *w, int64_t stride, int rows, int k, const float *x, int tokens, float *tile, void *scratch) {
    const Groups groups(tokens, V::kPanelGroup);
    Acc *carry = static_cast<Acc *>(scratch);
    float *panel = reinterpret_cast<float *>(static_cast<char *>(scratch) + kCarryBytes);
    const int chunks = (k + V::kChunk - 1) / V::kChunk, floats = chunks * V::kChunk;
    for (int r = 0; r < rows; r += kRows) {
      for (int q = 0; q < kQuarters; q++) {
        for (int c = 0; c < chunks; c += kChunks) {
          const int count = least(kChunks, chunks - c), at = c * V::kChunk;
          fill(w + r * stride + at, stride, rows - r, k - at, q, count, panel);
          const E *ahead = w + (r + kRows + kVectors * q) * stride + at;  // each quarter asks for kVectors of the next rows
          for (int g = 0; g < groups.count; g++) {
            const int size = groups.size(g), from = groups.first(g);
            with_size<V::kPanelGroup>(size, [&]<int M>() {
              multiply<M>(panel, x + static_cast<int64_t>(from) * floats + place(q, chunks, c, M), count * V::kParts, c == 0,
                          c + count == chunks, carry + kVectors * from, tile + from * kTile + r, q > 0);
            });
            for (int i = g; i < count; i += groups.count) {
              for (int n = 0; n < kVectors; n++) {
                const E *next = ahead + n * stride + i * V::kChunk;
                for (int e = 0; e < V::kChunk; e += 64 / static_cast<int>(sizeof(E))) __builtin_prefetch(next + e, 0, 2);
              }
            }
          }
        }
      }
    }
  }
};

}  // namespace
