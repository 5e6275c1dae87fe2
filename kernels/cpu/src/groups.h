// How tokens are split into groups whose sums fit the registers. Unnamed namespace: see numeric.h.
#pragma once

namespace {

inline int least(int a, int b) { return a < b ? a : b; }

// As few groups as `largest` allows, of sizes that differ by one at most.
struct Groups {
  int count, small, large;  // `large` of the groups hold small + 1 tokens, and come first
  Groups(int tokens, int largest) {
    count = (tokens + largest - 1) / largest;
    small = tokens / count;
    large = tokens % count;
  }
  int size(int group) const { return small + (group < large ? 1 : 0); }
  int first(int group) const { return group * small + least(group, large); }
  int of(int token) const {
    const int beyond = token - large * (small + 1);
    return beyond < 0 ? token / (small + 1) : large + beyond / small;
  }
};

// Calls job.template operator()<M>() with M = m, at most `Largest`.
template <int Largest, class Job>
inline void with_size(int m, const Job &job) {
  if constexpr (Largest > 1) {
    if (m < Largest) return with_size<Largest - 1>(m, job);
  }
  job.template operator()<Largest>();
}

}  // namespace
