// The portable path: plain loops in fp32, one sum per output in the order of k. It is the fallback, not a fast path.
#include "ffn_steps.h"

namespace {

template <class E>
struct ScalarPath {
  using Elem = E;

  static size_t packed_bytes(int tokens, int k) { return static_cast<size_t>(tokens) * k * sizeof(float); }

  static size_t scratch_bytes(int) { return 0; }

  static void put(void *packed, int, int k, int token, int at, const E *values, int n) {
    float *row = static_cast<float *>(packed) + static_cast<int64_t>(token) * k + at;
    for (int i = 0; i < n; i++) row[i] = to_float(values[i]);
  }

  static void products(const E *w, int64_t stride, int rows, int k, const void *packed, int tokens, float *tile, void *) {
    for (int i = 0; i < tokens; i++) {
      const float *x = static_cast<const float *>(packed) + static_cast<int64_t>(i) * k;
      for (int r = 0; r < rows; r++) {
        float sum = 0.0f;
        for (int j = 0; j < k; j++) sum += to_float(w[r * stride + j]) * x[j];
        tile[i * kTile + r] = sum;
      }
    }
  }
};

}  // namespace

namespace apexk {
extern const Kernels kScalarBf16, kScalarFp16, kScalarFp32;
const Kernels kScalarBf16 = Steps<ScalarPath<bf16>>::kernels;
const Kernels kScalarFp16 = Steps<ScalarPath<fp16>>::kernels;
const Kernels kScalarFp32 = Steps<ScalarPath<float>>::kernels;
}  // namespace apexk
