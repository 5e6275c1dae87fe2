#include "dispatch.h"

#include <string.h>

#include "cpuid.h"

namespace apexk {

extern const Kernels kScalarBf16, kScalarFp16, kScalarFp32;
extern const Kernels kAvx2Bf16, kAvx2Fp16, kAvx2Fp32;
extern const Kernels kAvx512Bf16, kAvx512Fp16, kAvx512Fp32;
extern const Kernels kAvx512PairsBf16, kAmxTilesBf16;

namespace {

// Products of bf16 pairs exist for bf16 only: the other dtypes keep the path that widens.
const Isa kTable[] = {
#if defined(__x86_64__)
    {"amx", kHasAmxBf16 | kHasAvx512, {&kAmxTilesBf16, &kAvx512Fp16, &kAvx512Fp32}},
    {"avx512_bf16", kHasAvx512Bf16, {&kAvx512PairsBf16, &kAvx512Fp16, &kAvx512Fp32}},
    {"avx512", kHasAvx512, {&kAvx512Bf16, &kAvx512Fp16, &kAvx512Fp32}},
    {"avx2", kHasAvx2, {&kAvx2Bf16, &kAvx2Fp16, &kAvx2Fp32}},
#endif
    {"scalar", 0, {&kScalarBf16, &kScalarFp16, &kScalarFp32}},
};

}  // namespace

int isa_count() { return static_cast<int>(sizeof kTable / sizeof *kTable); }

const Isa &isa_at(int index) { return kTable[index]; }

bool isa_available(const Isa &isa) { return (isa.needs & ~cpu_features()) == 0; }

apexk_status choose_isa(const char *name, const Isa **chosen) {
  const bool any = name == nullptr || *name == '\0';
  for (const Isa &isa : kTable) {
    if (!any && strcmp(isa.name, name) != 0) continue;
    if (isa_available(isa)) {
      *chosen = &isa;
      return APEXK_OK;
    }
    if (!any) return APEXK_UNAVAILABLE_ISA;
  }
  return APEXK_UNKNOWN_ISA;
}

}  // namespace apexk
