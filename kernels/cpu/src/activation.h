// act(gate) * up for a row of values, rounded to the weights' dtype. Unnamed namespace: see numeric.h.
#pragma once
#include "apexk_cpu.h"
#include "numeric.h"

namespace {

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_approx(-x)); }

struct Silu {
  float operator()(float gate, float up) const { return gate / (1.0f + exp_approx(-gate)) * up; }
};

// x * Phi(x). erfc(z), z = |x| / sqrt(2), by Abramowitz and Stegun 7.1.26: off by at most 1.5e-7.
struct Gelu {
  float operator()(float gate, float up) const {
    const float z = __builtin_fabsf(gate) * 0.70710678f;
    const float t = 1.0f / (1.0f + 0.3275911f * z);
    const float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    const float half = 0.5f * p * exp_approx(-z * z);
    return gate * (gate < 0.0f ? half : 1.0f - half) * up;
  }
};

// The tanh form; 0.5 * (1 + tanh(u)) = sigmoid(2u).
struct GeluTanh {
  float operator()(float gate, float up) const {
    return gate * sigmoid(1.5957691216f * (gate + 0.044715f * gate * gate * gate)) * up;
  }
};

// gpt-oss: both halves clamped to 7, sigmoid(1.702 * gate), and up + 1. Comparisons are written so that NaN passes.
struct SwigluOss {
  float operator()(float gate, float up) const {
    constexpr float kAlpha = 1.702f, kLimit = 7.0f;
    gate = gate > kLimit ? kLimit : gate;
    up = up > kLimit ? kLimit : up;
    up = up < -kLimit ? -kLimit : up;
    return gate * sigmoid(kAlpha * gate) * (up + 1.0f);
  }
};

template <class E>
void activate(int activation, const float *gate, const float *up, int n, E *h) {
  const auto each = [=](auto act) {
    for (int i = 0; i < n; i++) h[i] = from_float<E>(act(gate[i], up[i]));
  };
  switch (activation) {
    case APEXK_SILU: return each(Silu());
    case APEXK_GELU: return each(Gelu());
    case APEXK_GELU_TANH: return each(GeluTanh());
    case APEXK_SWIGLU_OSS: return each(SwigluOss());
  }
}

}  // namespace
