// AVX-512 without BF16 products, for bf16. The other dtypes are a file of their own, so that two compilers share the work.
#include "avx512_widen.h"

namespace apexk {
extern const Kernels kAvx512Bf16;
const Kernels kAvx512Bf16 = Steps<VectorPath<Avx512, bf16>>::kernels;
}  // namespace apexk
