// The steps of the FFN and of a linear layer over a `Path`, which knows how to pack activations and how to form products.
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
#include "activation.h"
#include "groups.h"
#include "kernels.h"

namespace {

constexpr int kTile = 64;  // rows of a product tile
static_assert(kTile % apexk::kRowAlign == 0);

template <class Path>
struct Steps {
  using Elem = typename Path::Elem;

  struct Block {
    const Elem *w13, *w2, *b13, *b2;  // the biases only where the call has them
    Block(const apexk_ffn_call &call, const apexk::Unit &unit) {
      const int64_t matrix = static_cast<int64_t>(call.intermediate) * call.hidden;
      w13 = static_cast<const Elem *>(unit.block);
      w2 = w13 + 2 * matrix;
      b13 = w2 + matrix;
      b2 = b13 + 2 * static_cast<int64_t>(call.intermediate);
    }
  };

  static void add_bias(const Elem *bias, int rows, int tokens, float *tile) {
    for (int i = 0; i < tokens; i++) {
      for (int j = 0; j < rows; j++) tile[i * kTile + j] += to_float(bias[j]);
    }
  }

  static constexpr size_t kTileFloats = static_cast<size_t>(apexk::kUnitTokens) * kTile;

  static size_t scratch_bytes(int hidden, int intermediate) {
    return 2 * kTileFloats * sizeof(float) + Path::scratch_bytes(hidden > intermediate ? hidden : intermediate);
  }

  static void pack(const apexk_ffn_call &call, const apexk::Unit &unit) {
    for (int i = 0; i < unit.tokens; i++) {
      const int32_t pair = unit.pairs[i];
      const Elem *row = static_cast<const Elem *>(call.x) + pair / call.topk * call.x_stride;
      if (!call.weight_on_input) {
        Path::put(unit.packed_x, unit.tokens, call.hidden, i, 0, row, call.hidden);
        continue;
      }
      for (int at = 0; at < call.hidden; at += kTile) {
        const int n = least(kTile, call.hidden - at);
        Elem scaled[kTile];
        for (int j = 0; j < n; j++) scaled[j] = from_float<Elem>(call.topk_weights[pair] * to_float(row[at + j]));
        Path::put(unit.packed_x, unit.tokens, call.hidden, i, at, scaled, n);
      }
    }
  }

  static void gate_up(const apexk_ffn_call &call, const apexk::Unit &unit, int row, int rows, void *scratch) {
    const Block block(call, unit);
    float *gate = static_cast<float *>(scratch), *up = gate + kTileFloats;
    const auto products = [&](int first, int n, float *tile) {
      const Elem *w = block.w13 + static_cast<int64_t>(first) * call.hidden;
      Path::products(w, call.hidden, n, call.hidden, unit.packed_x, unit.tokens, tile, up + kTileFloats);
      if (call.biases) add_bias(block.b13 + first, n, unit.tokens, tile);
    };
    for (const int end = row + rows; row < end; row += kTile) {
      const int n = least(kTile, end - row);
      products(row, n, gate);
      products(call.intermediate + row, n, up);
      for (int i = 0; i < unit.tokens; i++) {
        Elem h[kTile];
        activate(call.activation, gate + i * kTile, up + i * kTile, n, h);
        Path::put(unit.packed_h, unit.tokens, call.intermediate, i, row, h, n);
      }
    }
  }

  static void down(const apexk_ffn_call &call, const apexk::Unit &unit, int row, int rows, void *scratch) {
    const Block block(call, unit);
    float *y = static_cast<float *>(scratch);
    for (const int end = row + rows; row < end; row += kTile) {
      const int n = least(kTile, end - row), width = call.intermediate;
      const Elem *w = block.w2 + static_cast<int64_t>(row) * width;
      Path::products(w, width, n, width, unit.packed_h, unit.tokens, y, y + 2 * kTileFloats);
      if (call.biases) add_bias(block.b2 + row, n, unit.tokens, y);
      for (int i = 0; i < unit.tokens; i++) {
        const float weight = call.weight_on_input ? 1.0f : call.topk_weights[unit.pairs[i]];
        const int64_t place = call.summed ? unit.pairs[i] / call.topk : unit.pairs[i];
        float *out = call.out + place * call.hidden + row;
        if (call.summed) {
          for (int j = 0; j < n; j++) out[j] += weight * y[i * kTile + j];
        } else {
          for (int j = 0; j < n; j++) out[j] = weight * y[i * kTile + j];
        }
      }
    }
  }

  static void pack_linear(const apexk_linear_call &call, const apexk::Unit &unit) {
    for (int i = 0; i < unit.tokens; i++) {
      const Elem *row = static_cast<const Elem *>(call.x) + unit.pairs[i] * call.x_stride;
      Path::put(unit.packed_x, unit.tokens, call.inputs, i, 0, row, call.inputs);
    }
  }

  static void linear(const apexk_linear_call &call, const apexk::Unit &unit, int row, int rows, void *scratch) {
    float *y = static_cast<float *>(scratch);
    for (const int end = row + rows; row < end; row += kTile) {
      const int n = least(kTile, end - row), k = call.inputs;
      const Elem *w = static_cast<const Elem *>(unit.block) + static_cast<int64_t>(row) * k;
      Path::products(w, k, n, k, unit.packed_x, unit.tokens, y, y + 2 * kTileFloats);
      if (call.bias) add_bias(static_cast<const Elem *>(call.bias) + row, n, unit.tokens, y);
      for (int i = 0; i < unit.tokens; i++) {
        Elem *out = static_cast<Elem *>(call.y) + static_cast<int64_t>(unit.pairs[i]) * call.outputs + row;
        for (int j = 0; j < n; j++) out[j] = from_float<Elem>(y[i * kTile + j]);
      }
    }
  }

  static constexpr apexk::Kernels kernels = {Path::packed_bytes, scratch_bytes, pack, gate_up, down, pack_linear, linear};
};

}  // namespace
