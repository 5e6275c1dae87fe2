// Waiting: a bounded spin, because most waits are shorter than a sleep, then the kernel.
#pragma once
#include <atomic>

namespace apexk {

constexpr int kSpins = 2000;  // tens of microseconds

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns once `ready(value)` holds. Whoever stores a value that may be awaited calls notify_all().
template <class T, class Ready>
void wait_until(const std::atomic<T> &value, Ready ready) {
  for (int i = 0; i < kSpins; i++) {
    if (ready(value.load(std::memory_order_acquire))) return;
    pause_cpu();
  }
  for (T seen; !ready(seen = value.load(std::memory_order_acquire));) value.wait(seen, std::memory_order_acquire);
}

}  // namespace apexk
