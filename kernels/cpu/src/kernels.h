// What one implementation offers to the job: the steps of the FFN, and those of a linear layer, over one unit of work.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "apexk_cpu.h"

namespace apexk {

// A unit holds at most this many tokens of one expert: a multiple of every implementation's token group, large enough
// that bringing weights into a panel costs little, small enough that a quarter of the packed activations stays in the
// second-level cache.
constexpr int kUnitTokens = 144;

// One expert and a slice of the tokens that chose it; or a linear layer and a slice of its tokens.
struct Unit {
  const void *block;     // w13 [2I, H], then w2 [H, I]; the layer's weight
  const int32_t *pairs;  // [tokens] pair numbers p = t*topk + k; the layer's token numbers
  int tokens;
  void *packed_x;        // the gathered rows of x, in the form that gate_up reads
  void *packed_h;        // the activated rows, in the form that down reads
};

// Rows [row, row + rows) of gate_up's I outputs, of down's H or of linear's are independent of all others, and each output
// is summed in one fixed order. So neither the split into tasks nor the other tokens of a unit change a result.
struct Kernels {
  size_t (*packed_bytes)(int tokens, int k);                // of `tokens` activation rows of length k
  size_t (*scratch_bytes)(int hidden, int intermediate);    // that one thread needs in a step
  void (*pack)(const apexk_ffn_call &, const Unit &);
  void (*gate_up)(const apexk_ffn_call &, const Unit &, int row, int rows, void *scratch);
  void (*down)(const apexk_ffn_call &, const Unit &, int row, int rows, void *scratch);
  void (*pack_linear)(const apexk_linear_call &, const Unit &);
  void (*linear)(const apexk_linear_call &, const Unit &, int row, int rows, void *scratch);
};

struct Isa {
  const char *name;
  uint32_t needs;             // features, see cpuid.h
  const Kernels *kernels[3];  // by apexk_dtype
};

// Steps split their rows at multiples of this, so that packed_h is always written in whole chunks.
constexpr int kRowAlign = 32;

}  // namespace apexk
