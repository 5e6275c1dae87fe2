// AVX-512 for fp16 and fp32.
#include "avx512_widen.h"

namespace apexk {
extern const Kernels kAvx512Fp16, kAvx512Fp32;
const Kernels kAvx512Fp16 = Steps<VectorPath<Avx512, fp16>>::kernels;
const Kernels kAvx512Fp32 = Steps<VectorPath<Avx512, float>>::kernels;
}  // namespace apexk
