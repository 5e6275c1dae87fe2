// The three steps of the FFN over a `Path`, which knows how to pack activations and how to form products.
//
// A Path has
//   Elem                      bf16, fp16 or float: the dtype of weights, x and the rounded intermediate activation
//   packed_bytes(m, k)        room for m packed rows of length k
//   scratch_bytes(k)          room that products() needs
//   put(packed, m, k, token, at, values, n)
//                             packs values[0, n) as elements at.. of one token's row; `at` is a multiple of kRowAlign,
//                             and n is too unless the row ends there
//   products(w, stride, rows, k, packed, m, tile, scratch)
//                             tile[token * kTile + r] = dot(row r of w, token's row), r < rows <= kTile
// Unnamed namespace: see numeric.h.
#pragma once
#include "kernels.h"
#include "numeric.h"

namespace {

constexpr int kTile = 64;  // rows of a product tile
static_assert(kTile % apexk::kRowAlign == 0);

inline int least(int a, int b) { return a < b ? a : b; }

template <class Path>
struct Steps {
  using Elem = typename Path::Elem;
  static constexpr size_t kTileFloats = static_cast<size_t>(apexk::kUnitTokens) * kTile;

  static size_t scratch_bytes(int hidden, int intermediate) {
    return 2 * kTileFloats * sizeof(float) + Path::scratch_bytes(hidden > intermediate ? hidden : intermediate);
  }

  static void pack(const apexk_ffn_call &call, const apexk::Unit &unit) {
    const Elem *x = static_cast<const Elem *>(call.x);
    for (int i = 0; i < unit.tokens; i++) {
      const Elem *row = x + unit.pairs[i] / call.topk * call.x_stride;
      Path::put(unit.packed_x, unit.tokens, call.hidden, i, 0, row, call.hidden);
    }
  }

  static void gate_up(const apexk_ffn_call &call, const apexk::Unit &unit, int row, int rows, void *scratch) {
    const int64_t hidden = call.hidden;
    const Elem *gate_rows = static_cast<const Elem *>(unit.block), *up_rows = gate_rows + call.intermediate * hidden;
    float *gate = static_cast<float *>(scratch), *up = gate + kTileFloats;
    for (const int end = row + rows; row < end; row += kTile) {
      const int n = least(kTile, end - row);
      Path::products(gate_rows + row * hidden, hidden, n, call.hidden, unit.packed_x, unit.tokens, gate, up + kTileFloats);
      Path::products(up_rows + row * hidden, hidden, n, call.hidden, unit.packed_x, unit.tokens, up, up + kTileFloats);
      for (int i = 0; i < unit.tokens; i++) {
        Elem h[kTile];
        for (int j = 0; j < n; j++) h[j] = from_float<Elem>(gated_silu(gate[i * kTile + j], up[i * kTile + j]));
        Path::put(unit.packed_h, unit.tokens, call.intermediate, i, row, h, n);
      }
    }
  }

  static void down(const apexk_ffn_call &call, const apexk::Unit &unit, int row, int rows, void *scratch) {
    const int64_t width = call.intermediate;
    const Elem *w2 = static_cast<const Elem *>(unit.block) + 2 * width * call.hidden;
    float *y = static_cast<float *>(scratch);
    for (const int end = row + rows; row < end; row += kTile) {
      const int n = least(kTile, end - row);
      Path::products(w2 + row * width, width, n, call.intermediate, unit.packed_h, unit.tokens, y, y + 2 * kTileFloats);
      for (int i = 0; i < unit.tokens; i++) {
        const float weight = call.topk_weights[unit.pairs[i]];
        float *out = call.out + static_cast<int64_t>(unit.pairs[i]) * call.hidden + row;
        for (int j = 0; j < n; j++) out[j] = weight * y[i * kTile + j];
      }
    }
  }

  static constexpr apexk::Kernels kernels = {Path::packed_bytes, scratch_bytes, pack, gate_up, down};
};

}  // namespace
