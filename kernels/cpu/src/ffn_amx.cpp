// AMX: 16 x 16 tiles of BF16 products. Weights are the A operand, plain rows at their own stride; activations are the B
// operand, packed at run time as pairs along k for 16 tokens: [16 tokens][k/2] -> [k/2][16][2]. So C = W X^T, and no
// second copy of the weights exists. Products flush denormals.
//
// A token's column of C is summed over k in one order whatever the other columns hold. Rows beyond a multiple of 16 and
// elements beyond a multiple of 32 are multiplied from a zero-filled copy: nothing past the matrix is read.
#include <immintrin.h>
#ifdef APEXK_EMULATE
#include "../tests/amx_emulation.h"
#endif

#include "ffn_steps.h"

namespace {

constexpr int kSide = 16;   // rows of a weight tile, tokens of an activation tile
constexpr int kDepth = 32;  // elements of k in a tile

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles keep state that the system must save: configured before a task's products and released after them.
struct Tiles {
  Tiles() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

struct Scratch {
  float sums[2 * kSide][2 * kSide];    // [row][token] of one block of products
  bf16 edge[2 * kSide][kDepth];        // a zero-filled copy of weights at the rim of the matrix
};

// 32 rows of weights, or fewer, and where a step of k finds them.
struct Rows {
  const bf16 *w;
  int64_t stride;
  int rows, k;
  Scratch *scratch;

  // The tiles' source for elements [at, at + kDepth) and its stride in bytes.
  const bf16 *source(int at, int64_t *bytes) const {
    if (rows == 2 * kSide && at + kDepth <= k) {
      *bytes = stride * static_cast<int64_t>(sizeof(bf16));
      return w + at;
    }
    const int n = least(kDepth, k - at);
    for (int r = 0; r < 2 * kSide; r++) {
      for (int j = 0; j < kDepth; j++) scratch->edge[r][j] = r < rows && j < n ? w[r * stride + at + j] : bf16{0};
    }
    *bytes = sizeof scratch->edge[0];
    return scratch->edge[0];
  }
};

// scratch.sums = 32 rows x 32 tokens, or x 16. Tiles 0-3 hold sums, 4-5 weights, 6-7 activations.
template <bool kTwo>
inline void multiply(const Rows &rows, const bf16 *x, int64_t next_tokens) {
  _tile_zero(0);
  _tile_zero(1);
  if (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int at = 0; at < rows.k; at += kDepth) {
    int64_t bytes;
    const bf16 *w = rows.source(at, &bytes), *pairs = x + at * kSide;
    _tile_loadd(4, w, bytes);
    _tile_loadd(6, pairs, 64);
    _tile_loadd(5, w + kSide * bytes / static_cast<int64_t>(sizeof(bf16)), bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (kTwo) {
      _tile_loadd(7, pairs + next_tokens, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  float(*sums)[2 * kSide] = rows.scratch->sums;
  constexpr int64_t kSumBytes = sizeof sums[0];
  _tile_stored(0, sums[0], kSumBytes);
  _tile_stored(1, sums[kSide], kSumBytes);
  if (kTwo) {
    _tile_stored(2, sums[0] + kSide, kSumBytes);
    _tile_stored(3, sums[kSide] + kSide, kSumBytes);
  }
}

struct AmxPath {
  using Elem = bf16;

  static int padded(int k) { return (k + kDepth - 1) / kDepth * kDepth; }

  static size_t packed_bytes(int tokens, int k) {
    return static_cast<size_t>((tokens + kSide - 1) / kSide * kSide) * padded(k) * sizeof(bf16);
  }

  static size_t scratch_bytes(int) { return sizeof(Scratch); }

  static void put(void *packed, int, int k, int token, int at, const bf16 *values, int n) {
    bf16 *block = static_cast<bf16 *>(packed) + static_cast<int64_t>(token / kSide) * kSide * padded(k);
    bf16 *pairs = block + static_cast<int64_t>(at) * kSide + token % kSide * 2;
    for (int i = 0; i < padded(n); i++) pairs[i / 2 * 2 * kSide + i % 2] = i < n ? values[i] : bf16{0};
  }

  static void products(const bf16 *w, int64_t stride, int rows, int k, const void *packed, int tokens, float *tile,
                       void *scratch) {
    const Tiles configured;
    const int64_t next_tokens = static_cast<int64_t>(kSide) * padded(k);
    Scratch *own = static_cast<Scratch *>(scratch);
    for (int r = 0; r < rows; r += 2 * kSide) {
      const Rows now{w + r * stride, stride, least(2 * kSide, rows - r), k, own};
      for (int first = 0; first < tokens; first += 2 * kSide) {
        const bf16 *x = static_cast<const bf16 *>(packed) + first / kSide * next_tokens;
        const int count = least(2 * kSide, tokens - first);
        if (count > kSide) {
          multiply<true>(now, x, next_tokens);
        } else {
          multiply<false>(now, x, next_tokens);
        }
        for (int i = 0; i < count; i++) {
          for (int j = 0; j < now.rows; j++) tile[(first + i) * kTile + r + j] = own->sums[j][i];
        }
      }
    }
  }
};

}  // namespace

namespace apexk {
extern const Kernels kAmxTilesBf16;
const Kernels kAmxTilesBf16 = Steps<AmxPath>::kernels;
}  // namespace apexk
