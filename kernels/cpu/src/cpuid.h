// Instruction-set features that both the processor and the operating system offer.
#pragma once
#include <stdint.h>

namespace apexk {

enum Feature : uint32_t {
  kHasAvx2 = 1u << 0,
  kHasAvx512 = 1u << 1,      // F, BW, DQ and VL
  kHasAvx512Bf16 = 1u << 2,
  kHasAmxBf16 = 1u << 3,     // tiles, BF16 products, and Linux's permission to use them
};

uint32_t cpu_features();  // asked once; asks Linux for AMX tiles on behalf of the process

}  // namespace apexk
