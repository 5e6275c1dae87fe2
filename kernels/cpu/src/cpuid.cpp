#include "cpuid.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace apexk {
namespace {

#if defined(APEXK_EMULATE)
uint32_t detect() { return ~0u; }  // a test build brings its own instructions
#elif defined(__x86_64__)
constexpr uint64_t kYmmState = 0x6, kZmmState = 0xe0, kTileState = 0x60000;  // bits of XCR0
constexpr int kRequestPermission = 0x1023, kTileData = 18;                  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

// The register states that the operating system saves: a feature whose registers it does not save must not be used.
uint64_t saved_states() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

bool bit(uint32_t word, int index) { return word >> index & 1; }

uint32_t detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return 0;  // no XSAVE enabled by the system
  const bool fma = bit(c, 12), f16c = bit(c, 29);
  const uint64_t saved = saved_states();
  uint32_t leaves, b7, c7, d7;
  if (!__get_cpuid_count(7, 0, &leaves, &b7, &c7, &d7)) return 0;

  uint32_t found = 0;
  if ((saved & kYmmState) == kYmmState && bit(b7, 5) && fma && f16c) found |= kHasAvx2;
  const bool avx512 = bit(b7, 16) && bit(b7, 17) && bit(b7, 30) && bit(b7, 31);
  if (found && (saved & kZmmState) == kZmmState && avx512) found |= kHasAvx512;
  if ((found & kHasAvx512) && leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && bit(a, 5)) found |= kHasAvx512Bf16;
  const bool tiles = bit(d7, 24) && bit(d7, 22) && (saved & kTileState) == kTileState;
  if (tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) found |= kHasAmxBf16;
  return found;
}
#else
uint32_t detect() { return 0; }
#endif

}  // namespace

uint32_t cpu_features() {
  static const uint32_t found = detect();
  return found;
}

}  // namespace apexk
